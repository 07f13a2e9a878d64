"""Parts of a whole training job: config and command line, the files of a run, its pictures.

A training loop of your own needs none of this, and the library never imports it. What needs
transformers is imported from its module: jobs.task (prompts, rewards, policy), jobs.adapter and
jobs.warm_up.
jobs.report and jobs.dashboard_picture are programs as well.
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
