"""`rollout train`: a whole training job, its configs, the files of a run and its pictures.

main is the program, job its settings (`compose_settings`), learner one step. A training loop of
your own needs none of this, and the library never imports it. What needs transformers is imported
from its own module: main, task, learner, adapter and warm_up. report is a program as well.
"""

from trainer_hooks.train.config_loading import load_dataclass
from trainer_hooks.train.dashboard import Dashboard, watch_step
from trainer_hooks.train.hydra_job import checked_overrides, run_hydra_job, wandb_names
from trainer_hooks.train.report import write_reward_curve, write_run_picture
from trainer_hooks.train.run_files import (
    begin_directory,
    locked_run,
    open_logger,
    stop_on_interrupt,
)
from trainer_hooks.train.samples import SampleLog
from trainer_hooks.train.settings import (
    DataSettings,
    EvaluationSettings,
    FunctionSettings,
    LoggerSettings,
    LoraSettings,
    ModelSettings,
    ProducerSettings,
    RewardSettings,
    RewardTerm,
    SourceSettings,
    WarmupSettings,
    WeightSyncSettings,
)

__all__ = [
    "Dashboard",
    "DataSettings",
    "EvaluationSettings",
    "FunctionSettings",
    "LoggerSettings",
    "LoraSettings",
    "ModelSettings",
    "ProducerSettings",
    "RewardSettings",
    "RewardTerm",
    "SampleLog",
    "SourceSettings",
    "WarmupSettings",
    "WeightSyncSettings",
    "checked_overrides",
    "load_dataclass",
    "open_logger",
    "run_hydra_job",
    "begin_directory",
    "locked_run",
    "stop_on_interrupt",
    "wandb_names",
    "watch_step",
    "write_reward_curve",
    "write_run_picture",
]
