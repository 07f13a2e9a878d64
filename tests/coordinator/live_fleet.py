"""LiveFleet: a coordinator and real small engines over real sockets, in threads of one process. A
test can hold the engines back."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from rollout import DynamicInferenceEngine, EngineState
from rollout.coordinator.agent.agent import EngineAgent, serve
from rollout.coordinator.coordinator import DataParallelInferenceCoordinator
from rollout.coordinator.core.context import CoordinatorLimits
from rollout.coordinator.net.link import Link, LinkClosedError
from rollout.weights.transports.registry import WeightFetcher
from rollout.wire import Message
from tests.tiny_models import BLOCK_SIZE, tiny_engine, tiny_model

BOUND_S = 30.0
LIMITS = CoordinatorLimits(heartbeat_s=0.2)


@cache
def model() -> Any:
    return tiny_model("qwen3", seed=20)


class HeldLink:
    """A link whose engine's thread stops while it is held: before it executes a command, or, if
    `holds_answers`, before it answers. The link's own thread keeps running."""

    def __init__(self, link: Link, *, holds_answers: bool) -> None:
        self.link, self._holds_answers = link, holds_answers
        self.is_free = threading.Event()
        self.is_free.set()
        self.may_step, self.flush = link.may_step, link.flush

    def receive(self, timeout_s: float) -> list[Message]:
        messages = self.link.receive(timeout_s)
        if not self._holds_answers:
            self.is_free.wait(BOUND_S)
        return messages

    def queue(self, message: Message) -> None:
        if self._holds_answers:
            self.is_free.wait(BOUND_S)
        self.link.queue(message)


class LiveEngine:
    """A real engine, served by a thread of its own."""

    def __init__(self, address: str, number: int) -> None:
        self.engine: DynamicInferenceEngine = tiny_engine(model(), num_blocks=64)
        self.agent = EngineAgent(
            self.engine,
            engine_id=bytes([number + 1]) * 16,
            block_size_tokens=BLOCK_SIZE,
            max_requests=16,
            settings={},
            fetch=WeightFetcher(),
        )
        self.link = Link(address, handshake=self.agent.registration, status=self.agent.status)
        # Every second engine has executed a command when it is held.
        self.held_link = HeldLink(self.link, holds_answers=number % 2 == 1)
        self._thread = threading.Thread(target=self._run, name=f"engine {number}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            serve(self.agent, self.held_link)  # type: ignore[arg-type]
        except LinkClosedError:
            return

    def close(self) -> None:
        self.held_link.is_free.set()
        self.link.close()
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive()


class LiveFleet:
    """A context manager. `address`: where clients are served."""

    def __init__(self, num_engines: int = 2, limits: CoordinatorLimits = LIMITS) -> None:
        self.coordinator = DataParallelInferenceCoordinator(None, num_engines, None, limits=limits)
        self.address = self.coordinator.address
        self._thread = threading.Thread(target=self.coordinator.start, daemon=True)
        self._thread.start()
        self.engines = [LiveEngine(self.address, number) for number in range(num_engines)]

    def __enter__(self) -> LiveFleet:
        for engine in self.engines:
            engine.link.wait_registered(BOUND_S)
        return self

    def __exit__(self, *exception: object) -> None:
        for engine in self.engines:
            engine.close()
        self.coordinator.stop()
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive()

    def hold(self) -> None:
        """Let no engine execute or answer a command until `free`."""
        for engine in self.engines:
            engine.held_link.is_free.clear()

    def free(self) -> None:
        for engine in self.engines:
            engine.held_link.is_free.set()

    def engine_states(self) -> set[EngineState]:
        return {engine.engine.state for engine in self.engines}
