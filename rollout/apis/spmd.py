"""Runs the methods of an LLM on all ranks of a trainer's process group (`pg_collection`).

Used by `rollout.apis.llm`, which also creates the runtimes of other LLMs here. Rank 0 has the
engine. Each rank calls the same LLM methods, and in each call the other ranks run commands that
rank 0 sends over the trainer's process group.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from msgspec import structs
from torch import nn

from rollout.apis.engines import make_engine
from rollout.apis.in_process import InProcessRuntime
from rollout.child_process import pickled
from rollout.config import OWN_ENGINE, InferenceConfig
from rollout.control.commands import Command
from rollout.control.state import EngineState
from rollout.engine.build import DynamicInferenceEngine, follower_of
from rollout.errors import ConfigError, EngineStateError, encode_error
from rollout.tensor_parallel.executor import SpmdExecutor
from rollout.tensor_parallel.follower import SpmdCall, SpmdFollower, SpmdOutcome
from rollout.tensor_parallel.start import num_spmd_ranks
from rollout.text import Tokenizer
from rollout.weights.update import NamedTensors

Method = TypeVar("Method", bound=Callable[..., Any])
_SOURCE = "named_tensors"
# Arguments that may differ between ranks. Rank 0's weight names and values are used.
_OWN_ARGUMENTS = ("self", _SOURCE, "progress", "timeout_s")


class AllRanks(Protocol):
    """Runs the methods of an LLM that all ranks call together."""

    def run(self, call: SpmdCall, source: NamedTensors, work: Callable[[], Any]) -> Any:
        """Run `work`, the method itself, on rank 0 while the other ranks make the same call.
        `source` is this rank's weights for an update, else (). Returns the result of `work` on all
        ranks, or raises its error on all ranks."""
        ...


def runtime_of(
    model: str | Path | nn.Module | Any,
    tokenizer: Tokenizer | None,
    config: InferenceConfig,
    weights_version: int,
) -> tuple[Any, AllRanks | None]:
    """Build this process's engine, or its rank of an engine. Returns the LLM's runtime and its
    AllRanks. The AllRanks is None without `pg_collection`. Raises ConfigError and ModelError."""
    if num_spmd_ranks(config) == 1:
        engine = make_engine(model, config, tokenizer, weights_version)
        has_ranks = config.tensor_parallel_size > 1
        return InProcessRuntime(engine, tokenizer, has_ranks=has_ranks), None
    if config.engine != OWN_ENGINE:
        raise ConfigError(
            f"pg_collection works with engine={OWN_ENGINE!r} alone, not {config.engine!r}; leave "
            "out one of them"
        )
    if config.pg_collection.tp.rank():
        follower = FollowerRuntime(follower_of(model, config, weights_version), tokenizer)
        return follower, follower
    lead, executor = DynamicInferenceEngine.leading(model, config, tokenizer, weights_version)
    return InProcessRuntime(lead, tokenizer, has_ranks=True), _LeadRank(lead, executor)


def on_all_ranks(method: Method) -> Method:
    """Decorate a method of LLM so that it runs on all ranks, if the LLM has an AllRanks."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def on_this_rank(self: Any, *arguments: Any, **named: Any) -> Any:
        ranks: AllRanks | None = self._ranks
        work = functools.partial(method, self, *arguments, **named)
        if ranks is None:
            return work()
        given = signature.bind(self, *arguments, **named)
        given.apply_defaults()
        source = given.arguments.get(_SOURCE, ())
        return ranks.run(_call_of(method.__name__, given.arguments), source, work)

    return cast(Method, on_this_rank)


def require_one_process(ranks: AllRanks | None, what: str) -> None:
    """Raise ConfigError if `ranks` is not None. `what` names the unsupported method in the
    message."""
    if ranks is not None:
        raise ConfigError(
            f"{what} does not work with pg_collection, whose ranks call methods together; use an "
            "LLM without pg_collection"
        )


class _LeadRank:
    """`AllRanks` on rank 0, which has the engine."""

    def __init__(self, engine: DynamicInferenceEngine, executor: SpmdExecutor) -> None:
        self._engine, self._executor, self._calling = engine, executor, threading.Lock()

    def run(self, call: SpmdCall, source: NamedTensors, work: Callable[[], Any]) -> Any:
        with _one_call(self._calling, call):
            self._executor.begin_call(call)
            try:
                result = work()
                answer = pickled(result, f"the result of {call.method}")
            except BaseException as error:  # Ctrl-C included, because the other ranks wait
                self._executor.end_call(self._outcome(error=_encoded(error)))
                raise
            self._executor.end_call(self._outcome(result=answer))
            return result

    def _outcome(self, **what: Any) -> SpmdOutcome:
        engine = self._engine
        return SpmdOutcome(state=engine.state.value, weights_version=engine.weights_version, **what)


class FollowerRuntime:
    """The runtime and the `AllRanks` of an LLM on a rank other than 0, which has no engine."""

    def __init__(self, rank: SpmdFollower, tokenizer: Tokenizer | None) -> None:
        self._rank, self.tokenizer, self._calling = rank, tokenizer, threading.Lock()

    @property
    def state(self) -> EngineState:
        """The engine's state at the end of the last call."""
        return self._rank.state

    @property
    def weights_version(self) -> int:
        """The engine's weights version at the end of the last call."""
        return self._rank.weights_version

    def run(self, call: SpmdCall, source: NamedTensors, work: Callable[[], Any]) -> Any:
        with _one_call(self._calling, call):
            return self._rank.join_call(call, source)

    def shutdown(self) -> None:
        self._rank.shutdown()


@contextmanager
def _one_call(calling: threading.Lock, call: SpmdCall) -> Iterator[None]:
    if not calling.acquire(blocking=False):
        raise EngineStateError(
            f"cannot {call.method} while another thread is in a call: with pg_collection all ranks "
            "call methods in one order, one at a time"
        )
    try:
        yield
    finally:
        calling.release()


def _encoded(error: BaseException) -> Mapping[str, Any]:
    encoded = encode_error(error)
    if not str(encoded["message"]).startswith("rank "):  # else another rank was at fault
        encoded["message"] = f"rank 0: {encoded['message']}"
    return encoded


def call_of_command(command: Command[Any]) -> SpmdCall:
    """Return the name of a control call and digests of its arguments, which the ranks compare."""
    arguments = structs.asdict(command)
    del arguments["command_id"], arguments["deadline_s"]  # for messages to a coordinator only
    return _call_of(command.name, arguments)


def _call_of(method: str, arguments: Mapping[str, Any]) -> SpmdCall:
    shared = {name: value for name, value in arguments.items() if name not in _OWN_ARGUMENTS}
    digests = {
        name: hashlib.blake2b(repr(_plain(value)).encode(), digest_size=16).hexdigest()
        for name, value in shared.items()
    }
    return SpmdCall(method=method, digests=digests)


def _plain(value: Any) -> Any:
    """Return `value` in a form whose `repr` is the same on all ranks. An iterator, which must not
    be read here, and an object without such a form become the name of their type."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    has_text = value is None or isinstance(value, str | int | float) or is_dataclass(value)
    return value if has_text else type(value).__name__
