"""EngineHost: the engine of this process behind a coordinator of this process, as long as it is
served.
"""

from __future__ import annotations

import logging
import threading
import uuid
from contextlib import suppress

from rollout.apis.async_llm import AsyncLLM
from rollout.apis.fleet_runtime import FleetRuntime
from rollout.control.state import EngineState
from rollout.coordinator.agent.agent import EngineAgent
from rollout.coordinator.agent.loop import serve
from rollout.coordinator.coordinator import DataParallelInferenceCoordinator
from rollout.coordinator.net.dealer import CoordinatorLostError
from rollout.coordinator.net.link import Link, LinkClosedError
from rollout.engine.build import DynamicInferenceEngine
from rollout.errors import EngineStateError
from rollout.text import Tokenizer
from rollout.weights.transports.registry import WeightFetcher

_logger = logging.getLogger(__name__)
_REGISTER_S = 60.0


class EngineHost:
    """A fleet of one engine, in three threads: the coordinator's, the engine's, and that of
    `runtime`, through which everybody asks for requests and commands meanwhile.

    `close` ends the threads and leaves the engine, with its weights, without requests.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        tokenizer: Tokenizer | None,
        model_directory: str | None,
    ) -> None:
        """Raises EngineStateError if the engine is not RUNNING, or has requests."""
        if engine.state is not EngineState.RUNNING or engine.has_unfinished_requests():
            raise EngineStateError(
                f"the engine is {engine.state.name} with {len(engine.request_ids())} requests; "
                "unpause it and collect() them before it is served"
            )
        self._engine = engine
        engine.measure_step()
        # Without a host it listens where only this user's processes can dial.
        self._coordinator = DataParallelInferenceCoordinator(None, 1, host=None)
        self._agent = EngineAgent(
            engine,
            engine_id=uuid.uuid4().bytes,
            block_size_tokens=engine.block_size_tokens,
            max_requests=engine.build.sizes.num_rows,
            settings=engine.shared_settings,
            fetch=WeightFetcher(),
        )
        address = self._coordinator.address
        self._link = Link(address, handshake=self._agent.registration, status=self._agent.status)
        self._threads = [
            threading.Thread(target=self._coordinator.start, name="coordinator", daemon=True),
            threading.Thread(target=self._run_engine, name="engine", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        try:
            self._link.wait_registered(_REGISTER_S)
            self.runtime = FleetRuntime(
                lambda: AsyncLLM.joined(
                    address,
                    tokenizer,
                    seed=engine.seed_of_next_client(),
                    model_directory=model_directory,
                )
            )
        except BaseException:
            self._end()
            raise

    def _run_engine(self) -> None:
        try:
            serve(self._agent, self._link)
        except (LinkClosedError, CoordinatorLostError):
            return
        except Exception:
            _logger.exception("the engine failed")
            self._coordinator.stop("the engine failed")

    def close(self) -> None:
        """Abort what is unfinished, and end."""
        try:
            self.runtime.shutdown()
        finally:
            self._end()

    def _end(self) -> None:
        self._link.close("the LLM is served no longer")
        self._coordinator.stop("the LLM is served no longer")
        for thread in self._threads:
            thread.join()
        for request_id in self._engine.request_ids():
            with suppress(EngineStateError):
                self._engine.abort_request(request_id)
