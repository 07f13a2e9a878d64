"""`rollout train`: a whole training job, its configs, the files of a run and its report.

`command` is the program, `main` runs the job and `job` holds its settings. `learner` does a
training step, `task` has data and rewards, and `report` makes a run's HTML page. Examples and
benchmarks use `job`, `task` and `warm_up`. Users' training loops can import Dashboard and
`watch_step`. No other part of trainer_hooks imports this package.
"""

from typing import Any as _Any

from rollout.extras import extra_needed as _extra_needed
from rollout.lazy_names import lazy_names as _lazy_names

_HOMES = {
    "trainer_hooks.train.dashboard": "Dashboard watch_step",
    "trainer_hooks.train.main": "run_job",
}
_load, __all__ = _lazy_names(__name__, _HOMES)


def __getattr__(name: str) -> _Any:
    with _extra_needed("train", "trainer_hooks.train"):
        return _load(name)


def __dir__() -> list[str]:
    return __all__
