"""Engine processes of a test, run by `run_engine`. They report what they do, and can be killed by
it.

Each process imports this module, so it does not import transformers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rollout import InferenceConfig
from rollout.apis import engine_process
from rollout.coordinator.agent.agent import EngineAgent
from rollout.coordinator.net.link import Link
from rollout.coordinator.protocol.messages import Ack, AssignRequest, Commit, Rollback
from rollout.engine.engine import Engine
from rollout.weights.source import WeightsSource
from rollout.weights.transports.registry import WeightFetcher
from rollout.weights.update import NamedTensors, by_name
from rollout.wire import Message
from tests.processes import PROCESSES

WAIT_S = 150.0
NUM_STEPS_OF_THE_KILLED = 108


class EngineChild:
    """One engine process. `behaviour` is the name of one of BEHAVIOURS."""

    def __init__(
        self,
        address: str,
        model: str,
        config: InferenceConfig,
        behaviour: str = "lives",
        diary: Path | None = None,
    ) -> None:
        """`diary`: where it writes how many tokens it has of each request, after every step."""
        self._words, theirs = PROCESSES.Pipe(duplex=False)
        self.process = PROCESSES.Process(
            target=_live, args=(theirs, address, model, config, behaviour, diary), daemon=True
        )
        self.process.start()
        theirs.close()

    async def word(self, expected: str) -> Any:
        """What it tells next about `expected`; other words are passed over."""
        passed = []
        while await asyncio.to_thread(self._words.poll, WAIT_S):
            word, told = self._words.recv()
            if word == expected:
                return told
            passed.append((word, told))
            assert word != "failed", passed
        raise AssertionError(f"no {expected!r} for {WAIT_S:g} s after {passed}")

    async def death(self) -> int | None:
        """Wait for it; the exit code."""
        await asyncio.to_thread(self.process.join, WAIT_S)
        return self.process.exitcode

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self._words.close()


@contextmanager
def engine_child(*args: Any, **kwargs: Any) -> Iterator[EngineChild]:
    child = EngineChild(*args, **kwargs)
    try:
        yield child
    finally:
        child.close()


# ---- in the process


def _live(
    words: Connection,
    address: str,
    model: str,
    config: InferenceConfig,
    behaviour: str,
    diary: Path | None,
) -> None:
    class Agent(_TellingAgent):
        tell, book = staticmethod(words.send), _Diary(diary)

    engine_process.EngineAgent = Agent  # type: ignore[misc]
    logging.getLogger("rollout.coordinator.agent").addHandler(_Teller(words))
    BEHAVIOURS[behaviour](Agent)
    try:
        engine_process.run_engine(
            address, model, None, config, on_registered=lambda: words.send(("here", None))
        )
    except Exception as error:
        words.send(("failed", f"{type(error).__name__}: {error}"))


class _Diary:
    """What is written survives a SIGKILL."""

    def __init__(self, path: Path | None) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = None if path is None else os.open(path, flags)

    def note(self, tokens_of: dict[int, int]) -> None:
        if self._file is not None:
            os.write(self._file, (json.dumps(tokens_of) + "\n").encode())


class _Teller(logging.Handler):
    """Tells what the engine's side warns of."""

    def __init__(self, words: Connection) -> None:
        super().__init__(logging.WARNING)
        self._words = words

    def emit(self, record: logging.LogRecord) -> None:
        self._words.send(("warned", record.getMessage()))


class _TellingAgent(EngineAgent):
    """Tells the version and checksum that it serves when work comes for the first time, and after
    each commit and rollback.
    """

    tell: Callable[[tuple[str, Any]], None]
    book: _Diary
    has_worked = False

    def __init__(self, engine: Engine, **arguments: Any) -> None:
        super().__init__(engine, **arguments)
        self.engine = engine

    def handle(self, message: Message) -> Sequence[Message]:
        if isinstance(message, AssignRequest) and not self.has_worked:
            self.has_worked = True
            self._tell_served("work")
        answers = super().handle(message)
        if isinstance(message, Commit | Rollback):
            self._tell_served(type(message).__name__)
        return answers

    def _tell_served(self, word: str) -> None:
        self.tell((word, (self.engine.weights_version, self.engine.weights_checksum())))

    def step(self) -> Sequence[Message]:
        outbox = super().step()
        records = [self.engine.get_record(request_id) for request_id in self.engine.request_ids()]
        self.book.note({r[0].seed: sum(len(s.generated_tokens) for s in r) for r in records})
        return outbox


def _die_voted(agent: type[EngineAgent]) -> None:
    """Kill itself once its vote is with the coordinator, which an answered heartbeat says."""

    class MortalLink(Link):
        def queue(self, message: Message) -> None:
            super().queue(message)
            if isinstance(message, Ack) and message.result.keys() == {"checksum"}:
                self.flush()
                while self.outbox.num_kept:
                    time.sleep(0.005)
                _die()

    engine_process.Link = MortalLink  # type: ignore[misc]


def _die_committing(agent: type[EngineAgent]) -> None:
    handle = agent.handle

    def mortal_handle(self: EngineAgent, message: Message) -> Sequence[Message]:
        if isinstance(message, Commit):
            _die()
        return handle(self, message)

    agent.handle = mortal_handle  # type: ignore[method-assign]


def _wait_to_be_killed(agent: type[EngineAgent]) -> None:
    """Make so many steps and no more; heartbeats go on."""
    step, num_steps = agent.step, 0

    def limited_step(self: EngineAgent) -> Sequence[Message]:
        nonlocal num_steps
        num_steps += 1
        if num_steps > NUM_STEPS_OF_THE_KILLED:
            time.sleep(WAIT_S)
        return step(self)

    agent.step = limited_step  # type: ignore[method-assign]


def _get_other_weights(agent: type[EngineAgent]) -> None:
    """Until SIGUSR1 what it fetches is not what was published."""
    fetch, is_right = WeightFetcher.__call__, threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: is_right.set())

    def fetch_other_weights(self: WeightFetcher, source: WeightsSource) -> NamedTensors:
        tensors = by_name(fetch(self, source))
        if not is_right.is_set():
            tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
        return tensors

    WeightFetcher.__call__ = fetch_other_weights  # type: ignore[method-assign]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


BEHAVIOURS: dict[str, Callable[[type[EngineAgent]], None]] = {
    "lives": lambda agent: None,
    "dies after its vote": _die_voted,
    "dies at the commit": _die_committing,
    "waits to be killed": _wait_to_be_killed,
    "gets other weights": _get_other_weights,
}
