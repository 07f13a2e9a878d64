"""The doctor: finds out why the log-probs of trainer and engine differ, and names a remedy.

Users call `diagnose`, which examines a batch, and `report`, which formats the diagnosis.
`save_rollouts` writes a batch to a file, and `load_rollouts` reads it. `python -m
trainer_hooks.doctor` examines the files of a run. `trainer_hooks.train.main` saves batches by
BatchFiles, and `trainer_hooks.update.guarded_step` by `save_rollouts`.
"""

from trainer_hooks.doctor.command import BatchFiles, SavedRollouts, load_rollouts, save_rollouts
from trainer_hooks.doctor.diagnosis import Diagnosis, Finding, diagnose
from trainer_hooks.doctor.report import report

__all__ = [
    "diagnose",
    "Diagnosis",
    "Finding",
    "report",
    "save_rollouts",
    "load_rollouts",
    "BatchFiles",
    "SavedRollouts",
]
