"""LLM, AsyncLLM and ThreadedLLM: generation and control, in this process or over a fleet."""

from rollout.apis.async_llm import AsyncLLM as AsyncLLM
from rollout.apis.async_llm import MegatronAsyncLLM as MegatronAsyncLLM
from rollout.apis.engine_process import run_engine as run_engine
from rollout.apis.fleet_runtime import FleetRuntime as FleetRuntime
from rollout.apis.llm import LLM as LLM
from rollout.apis.llm import MegatronLLM as MegatronLLM
from rollout.apis.progress import progress_bar as progress_bar
from rollout.apis.serving import EngineServer as EngineServer
from rollout.apis.serving import Serving as Serving
from rollout.apis.threaded_llm import ThreadedLLM as ThreadedLLM

__all__: list[str]
