"""`rollout train`: a whole training job, its configs, the files of a run and its report."""

from trainer_hooks.train.dashboard import Dashboard as Dashboard
from trainer_hooks.train.dashboard import watch_step as watch_step
from trainer_hooks.train.main import run_job as run_job

__all__: list[str]
