"""`rollout train`: a whole training job, its configs, the files of a run and its report.

`main` is the program and `job` holds its settings. `learner` is one training step, `task` the data
and rewards, `report` the HTML page of a run. A training loop of your own can use the dashboard; it
needs nothing else of this package, and no other part of trainer_hooks imports it.
"""

from rollout.extras import extra_needed

with extra_needed("train", "trainer_hooks.train"):
    from trainer_hooks.train.dashboard import Dashboard, watch_step

__all__ = ["Dashboard", "watch_step"]
