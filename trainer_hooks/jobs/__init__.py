"""Parts of a whole training job: config and command line, the files of a run, its pictures.

A training loop of your own needs none of this, and the library never imports it.
"""

from trainer_hooks.jobs.config_loading import load_dataclass
from trainer_hooks.jobs.curve import write_reward_curve
from trainer_hooks.jobs.dashboard import Dashboard
from trainer_hooks.jobs.hydra_job import checked_overrides, run_hydra_job, wandb_names
from trainer_hooks.jobs.run_files import open_logger, set_aside, stop_on_interrupt
from trainer_hooks.jobs.settings import LoggerSettings, ProducerSettings, WeightSyncSettings

__all__ = [
    "Dashboard",
    "LoggerSettings",
    "ProducerSettings",
    "WeightSyncSettings",
    "checked_overrides",
    "load_dataclass",
    "open_logger",
    "run_hydra_job",
    "set_aside",
    "stop_on_interrupt",
    "wandb_names",
    "write_reward_curve",
]
