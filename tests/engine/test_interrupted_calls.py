"""Exceptions that arrive within a call of an engine, from a signal handler or another thread.

A trace function raises them at a random line that the call runs in the package.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import rollout
from rollout import LLM, DynamicInferenceEngine, RolloutGroup, SamplingParams
from rollout.engine.guard import CallGuard
from rollout.errors import EngineStateError
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.worker.model_runner import ModelRunner
from tests.run_seed import run_seed
from tests.tiny_models import prompt_of, tiny_engine, tiny_model

PACKAGE = str(Path(rollout.__file__).parent)
NUM_REQUESTS = 5
NUM_TOKENS = 12
MAX_STEPS = 400
COUNT = 150 if os.environ.get("ROLLOUT_TEST_LONG") == "1" else 20


class Interruption(TimeoutError):
    """The exception of a user's deadline."""


def add_one(engine: DynamicInferenceEngine, seed: int) -> None:
    params = SamplingParams(
        num_tokens_to_generate=NUM_TOKENS + seed,
        seed=seed,
        temperature=1.0,
        return_log_probs=True,
        frequency_penalty=0.5 if seed % 2 else 0.0,
    )
    engine.add_request(prompt_of(9 + 8 * (seed % 2), seed=seed % 3), params, request_id=seed)


def add(engine: DynamicInferenceEngine) -> None:
    for seed in range(NUM_REQUESTS):
        add_one(engine, seed)


def new_engine() -> DynamicInferenceEngine:
    """Return an engine with too few blocks: requests are preempted, and share prefixes."""
    return tiny_engine(tiny_model(seed=3), num_blocks=12, enable_prefix_caching=True)


class Trace:
    """Counts the lines that the package runs, and does `act` once, at line number `at`."""

    def __init__(self, at: int | None, act: Callable[[], object]) -> None:
        self.num_lines, self._at, self._act = 0, at, act
        # CPython raises another thread's exception between bytecodes, but never between the end of
        # a `with lock` block and the lock's release, where a trace function can raise.
        self._passed_over = () if act is be_signalled else ("_acquire", "_release")

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if frame.f_code.co_name in self._passed_over:
            return None
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self._at:
                self._act()
        return self


@contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def tokens_of(finished: dict[int, DynamicInferenceRequest]) -> dict[int, list[int]]:
    return {i: request.generated_tokens for i, request in finished.items()}


def work(engine: DynamicInferenceEngine, finished: dict[int, DynamicInferenceRequest]) -> None:
    while engine.has_unfinished_requests():
        for record in engine.step():
            finished[record.request_id] = record.merge()


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    engine, finished = new_engine(), dict[int, DynamicInferenceRequest]()
    add(engine)
    work(engine, finished)
    return tokens_of(finished)


@pytest.fixture(scope="module")
def num_lines() -> int:
    engine, trace = new_engine(), Trace(None, lambda: None)
    with tracing(trace):
        add(engine)
        work(engine, {})
    return trace.num_lines


def raises(error: type[BaseException]) -> Callable[[], None]:
    """Return a function that raises `error`, as if another thread raised it at this line."""

    def act() -> None:
        raise error("from another thread")

    return act


def be_signalled() -> None:
    """A signal at this line; `handler_raises` says what its handler raises."""
    signal.raise_signal(signal.SIGALRM)


KINDS: dict[str, tuple[type[BaseException], bool]] = {
    "KeyboardInterrupt from a thread": (KeyboardInterrupt, False),
    "TimeoutError from a thread": (Interruption, False),
    "KeyboardInterrupt from a signal": (KeyboardInterrupt, True),
    "TimeoutError from a signal": (Interruption, True),
}


@contextmanager
def handler_raises(error: type[BaseException]) -> Iterator[None]:
    """The handler of the signal of `be_signalled` raises `error`, as one of a user would."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise error("from a signal")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def interrupted_at(line: int, act: Callable[[], None]) -> tuple[DynamicInferenceEngine, Any, bool]:
    """An engine whose calls were interrupted at that line; what it returned, and whether an
    exception came out of a call."""
    engine, finished, came_out = new_engine(), dict[int, DynamicInferenceRequest](), False
    trace = Trace(line, act)
    try:
        with tracing(trace):
            add(engine)
            work(engine, finished)
    except (KeyboardInterrupt, Interruption):
        came_out = True
    return engine, finished, came_out


def assert_broken_for_good(engine: DynamicInferenceEngine, fault: EngineStateError) -> None:
    """Check that each further call raises, and that shutdown releases all memory."""
    assert "halfway" in str(fault)
    assert "create a new engine" in str(fault)
    params = SamplingParams(num_tokens_to_generate=1)
    for call in (engine.step, engine.pause, lambda: engine.add_request([1], params)):
        with pytest.raises(EngineStateError, match="halfway"):
            call()
    engine.shutdown()
    assert not engine.kv_data_ptrs()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_within_a_call_changes_no_token_or_breaks_the_engine(
    kind: str, expected: dict[int, list[int]], num_lines: int
) -> None:
    chooser, outcomes = random.Random(run_seed()), {"whole": 0, "broken": 0}
    error, is_signal = KINDS[kind]
    act = be_signalled if is_signal else raises(error)
    for _ in range(COUNT):
        line = chooser.randint(1, num_lines)
        with handler_raises(error):
            engine, finished, came_out = interrupted_at(line, act)
        try:
            known = {*engine.request_ids(), *finished}
            for seed in {*range(NUM_REQUESTS)} - known:  # the call that would add it was stopped
                add_one(engine, seed)
            for _ in range(MAX_STEPS):
                if not engine.has_unfinished_requests():
                    break
                finished |= {record.request_id: record.merge() for record in engine.step()}
            assert not engine.has_unfinished_requests(), f"line {line}: hangs"
        except EngineStateError as fault:
            assert came_out, f"line {line}: broken without a word"
            assert not is_signal, f"line {line}: a signal waits for the end of a call"
            assert_broken_for_good(engine, fault)
            outcomes["broken"] += 1
        else:
            assert tokens_of(finished) == expected, f"line {line}: other tokens"
            engine.check_integrity()
            assert engine.stats().num_blocks_used == 0, f"line {line}: blocks leak"
            engine.shutdown()
            outcomes["whole"] += 1
        # Else later tensors of this thread, a trainer's among them, would record no gradients.
        assert not torch.is_inference_mode_enabled(), f"line {line}: the thread's mode is changed"
    print(kind, outcomes)


@pytest.mark.parametrize("line", range(8))
def test_an_exception_at_any_line_of_launch_keeps_inference_mode_off(line: int) -> None:
    """Else later tensors of this thread, a trainer's among them, record no gradients."""
    lines: list[int] = []

    def in_launch(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not ModelRunner.launch.__code__:
            return in_launch
        if event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == line + 1:
                raise Interruption
        return in_launch

    engine = new_engine()
    add_one(engine, 0)
    before = sys.gettrace()  # a debugger's, or coverage's
    sys.settrace(in_launch)
    try:
        with suppress(Interruption):
            engine.step()
    finally:
        sys.settrace(before)
    assert not torch.is_inference_mode_enabled(), lines
    engine.shutdown()


def enter(guard: CallGuard) -> None:
    with guard.change("step"):
        pass


def test_a_signal_at_any_line_of_a_guard_leaves_it_free() -> None:
    """A handler that raises while the guard's mutex is taken would block every later call."""
    with tracing(trace := Trace(None, be_signalled)):
        enter(CallGuard())
    assert trace.num_lines > 15
    for line in range(1, trace.num_lines + 1):
        guard = CallGuard()
        with (
            handler_raises(Interruption),
            suppress(Interruption),
            tracing(Trace(line, be_signalled)),
        ):
            enter(guard)
        assert not guard._mutex.locked(), f"line {line}"
        enter(guard)


def test_a_call_of_a_second_thread_is_refused_and_names_the_first(
    expected: dict[int, list[int]],
) -> None:
    engine = new_engine()
    add(engine)
    inside, may_go_on = threading.Event(), threading.Event()
    finished: dict[int, DynamicInferenceRequest] = {}

    def stop_once() -> None:
        inside.set()
        assert may_go_on.wait(60)

    def first() -> None:
        with tracing(Trace(200, stop_once)):
            work(engine, finished)

    thread = threading.Thread(target=first, name="the first")
    thread.start()
    assert inside.wait(60)
    params = SamplingParams(num_tokens_to_generate=1)
    try:
        for call in (
            engine.step,
            lambda: engine.add_request([1, 2], params),
            lambda: engine.abort_request(0),
        ):
            with pytest.raises(EngineStateError, match="while thread 'the first' is in step"):
                call()
    finally:
        may_go_on.set()
        thread.join()
    assert tokens_of(finished) == expected


def test_block_at_exit_waits_for_the_running_call_and_blocks_other_threads() -> None:
    """A daemon thread that computed while the interpreter is torn down would abort the process."""
    guard = CallGuard()
    inside, may_end, is_out, got_in = (threading.Event() for _ in range(4))

    def call_for_ever() -> None:
        with guard.change("step"):
            inside.set()
            assert may_end.wait(60)
        is_out.set()
        with guard.change("step"):
            got_in.set()

    threading.Thread(target=call_for_ever, daemon=True).start()
    assert inside.wait(60)
    held = threading.Thread(target=guard.block_at_exit)
    held.start()
    while guard._ends_process is None:
        time.sleep(0.001)
    assert held.is_alive(), "it waits for the end of the call"
    may_end.set()
    held.join(60)
    assert not held.is_alive()
    assert is_out.wait(60)
    assert not got_in.is_set()


def test_collect_keeps_ended_requests_if_a_signal_handler_raises(
    expected: dict[int, list[int]],
) -> None:
    """At any line of it, also between a step and the list of finished groups."""
    chooser = random.Random(run_seed())
    for _ in range(COUNT // 4):
        line = chooser.randint(1, 4000)
        with LLM(tiny_model(seed=3), max_sequence_length=64, buffer_size_gb=0.01, seed=0) as llm:
            params = SamplingParams(num_tokens_to_generate=3)
            group_ids = llm.submit([prompt_of(9, seed=seed) for seed in range(4)], params)
            groups: list[RolloutGroup] = []
            trace = Trace(line, be_signalled)
            with handler_raises(Interruption), suppress(Interruption), tracing(trace):
                groups = llm.collect()
            groups += llm.collect()
            assert sorted(group.group_id for group in groups) == group_ids, f"line {line}"
