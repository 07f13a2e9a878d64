"""`rollout train`: a whole training job, its configs, the files of a run and its report.

`main` is the program and `job` holds its settings. `learner` is one training step, `task` the data
and rewards, `report` the HTML page of a run. Users' training loops may use the dashboard without
the rest. Examples and benchmarks use `job`, `task` and `warm_up`. No other part of trainer_hooks
imports this package.
"""

from rollout.extras import extra_needed

with extra_needed("train", "trainer_hooks.train"):
    from trainer_hooks.train.dashboard import Dashboard, watch_step

__all__ = ["Dashboard", "watch_step"]
