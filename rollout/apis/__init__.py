"""LLM, AsyncLLM and ThreadedLLM: generation and control, in this process or over a fleet."""

from rollout.lazy_names import lazy_names as _lazy_names

# Module -> the names that it gives to this package. The stub beside this file has the same.
_HOMES = {
    "rollout.apis.async_llm": "AsyncLLM MegatronAsyncLLM",
    "rollout.apis.fleet_runtime": "FleetRuntime",
    "rollout.apis.llm": "LLM MegatronLLM",
    "rollout.apis.progress": "progress_bar",
    "rollout.apis.serving": "EngineServer Serving",
    "rollout.apis.threaded_llm": "ThreadedLLM",
}
__getattr__, __all__ = _lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
