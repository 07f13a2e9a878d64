"""LLM, AsyncLLM and ThreadedLLM: generation and control, in this process or over a fleet.

Used by user programs, `rollout.cli` and `trainer_hooks`. Each name's module is imported at the
first use of the name.
"""

from rollout.lazy_names import lazy_names as _lazy_names

# Module -> the names that this package exports from it. The stub beside this file lists the same.
_HOMES = {
    "rollout.apis.async_llm": "AsyncLLM MegatronAsyncLLM",
    "rollout.apis.engine_process": "run_engine",
    "rollout.apis.fleet_runtime": "FleetRuntime",
    "rollout.apis.llm": "LLM MegatronLLM",
    "rollout.apis.progress": "progress_bar",
    "rollout.apis.serving": "EngineServer Serving",
    "rollout.apis.threaded_llm": "ThreadedLLM",
}
__getattr__, __all__ = _lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
