"""LLM: generation and control in a few lines, on an engine in this process or on a fleet.

Used by user programs, `rollout.cli`, `trainer_hooks.train`, `trainer_hooks.trl_rollouts`,
`rollout.testing`, `rollout.apis.threaded_llm` and `rollout.apis.serving`. An LLM keeps the
submitted groups and the HTTP server. Its runtime (InProcessRuntime, FleetRuntime or
FollowerRuntime) has the engine or the fleet.
"""

from __future__ import annotations

import inspect
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import nn

from rollout import apis
from rollout.apis.arguments import (
    FLEET_DEFAULTS,
    Groups,
    OneThread,
    RolloutGroup,
    SamplingArgument,
    as_groups,
    config_with,
)
from rollout.apis.in_process import InProcessRuntime
from rollout.apis.spmd import (
    AllRanks,
    call_of_command,
    on_all_ranks,
    require_one_process,
    runtime_of,
)
from rollout.config import InferenceConfig
from rollout.control.commands import Command, ControlCalls, R
from rollout.control.reports import WeightUpdateReport
from rollout.control.state import EngineState
from rollout.deferred_signals import deferred_signals
from rollout.engine.engine import Engine
from rollout.errors import ConfigError, EngineStateError, InvalidRequestError, RolloutError
from rollout.extras import extra_needed
from rollout.models.checkpoints.smollm2 import model_directory
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.serve.config import ServeConfig
from rollout.text import Prompt, Tokenizer, tokenizer_of
from rollout.weights.transports.base import WeightTransport
from rollout.weights.update import NamedTensors

_LOST_CHECK_S = 1.0  # between two checks whether an error has ended the server


class LLM(ControlCalls):
    """A model and the engine that serves it. It is a context manager; leaving it shuts the engine
    down.

    model: a Hugging Face directory, a transformers model, or a model of rollout.models.
    tokenizer: a Tokenizer, a transformers tokenizer or a `tokenizers.Tokenizer`. None uses the
        tokenizer in the model's directory. If there is no tokenizer, prompts are token ids.
    weights_version: version of the model's weights.
    options: fields of InferenceConfig, which replace those of `inference_config`. If
        `use_coordinator` is set, keywords of AsyncLLM are allowed, too.

    Raises ConfigError and ModelError. For an unknown option the error names the most similar one.

    By default the engine is in this process and works while `generate` or `collect` runs. With
    `use_coordinator`, `data_parallel_size` engines work all the time, each in a process of its own
    behind a coordinator. The methods are the same, and return when the last engine has confirmed.
    The processes import the classes of `model` and `tokenizer`. A program that defines such a class
    must therefore guard its start by `if __name__ == "__main__":`.

    With `pg_collection`, each process of its group `tp` creates an LLM and calls the same methods,
    which return the same results on all of them: see docs/tensor_parallel.md.

    Only one thread may generate. While one thread is in generate, submit or collect, these methods
    raise EngineStateError in other threads. Other threads can call control methods, which take
    effect between two steps. A weight update is verified and prepared while steps continue.
    """

    def __init__(
        self,
        model: str | Path | nn.Module | Any,
        tokenizer: Tokenizer | Any | None = None,
        inference_config: InferenceConfig | None = None,
        use_coordinator: bool = False,
        weights_version: int = 0,
        **options: Any,
    ) -> None:
        of_fleet = {name: options.pop(name) for name in FLEET_DEFAULTS if name in options}
        parameters = (*inspect.signature(LLM).parameters, *FLEET_DEFAULTS)
        config = config_with(inference_config, options, *parameters)
        model = model_directory(model)
        directory = str(model) if isinstance(model, str | Path) else None
        if use_coordinator:
            fleet = apis.FleetRuntime(
                lambda: apis.AsyncLLM(
                    model, tokenizer, config, weights_version=weights_version, **of_fleet
                )
            )
            self._set_up(fleet, model_directory=directory)
        else:
            _require_defaults(of_fleet, config)
            own = tokenizer_of(model, tokenizer)
            runtime, ranks = runtime_of(model, own, config, weights_version)
            self._set_up(runtime, ranks, model_directory=directory)

    def _set_up(
        self,
        runtime: Any,
        ranks: AllRanks | None = None,
        *,
        model_directory: str | None = None,
    ) -> None:
        self._runtime: InProcessRuntime | apis.FleetRuntime = runtime
        self._ranks = ranks  # None without pg_collection
        self.tokenizer, self.model_directory = runtime.tokenizer, model_directory
        self.one_thread = OneThread()  # held by the thread that steps or waits for groups
        self._groups = Groups()
        self._server: apis.EngineServer | None = None  # while an engine of this process is served
        self._serving_lock = threading.Lock()  # held to begin and end serving
        self._stop_requested = threading.Event()
        self.serving_address: tuple[str, int] | None = None  # host and port; None: not served

    @property
    def engine(self) -> Engine:
        """The engine in this process, which can be stepped by hand. Raises ConfigError if the
        engines are behind a coordinator, and with pg_collection."""
        require_one_process(self._ranks, "llm.engine")
        if isinstance(self._runtime, InProcessRuntime):
            return self._runtime.engine
        raise ConfigError(
            f"this {type(self).__name__} has no engine in this process; llm.engine needs "
            "use_coordinator=False"
        )

    @property
    def seed(self) -> int:
        """The seed from which requests without a seed derive theirs. Raises ConfigError with
        pg_collection."""
        require_one_process(self._ranks, "llm.seed")
        return self._runtime.seed

    # ---- generation

    @on_all_ranks
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingArgument = None,
        n: int = 1,
        progress: bool = False,
        *,
        priority: int = 0,
    ) -> DynamicInferenceRequest | list[DynamicInferenceRequest]:
        """Run n samples of each prompt to their end and return the requests.

        Returns one request for a single prompt with n = 1. Otherwise returns a list in the order of
        the prompts, with a prompt's samples together. `progress` shows a progress bar. Requests
        with a higher `priority` run first. A request that cannot run is returned FAILED with its
        error event. Raises InvalidRequestError for a malformed prompt, before anything is queued.
        After any later error, all requests of this call are aborted.
        """
        groups, is_single = as_groups(prompts, sampling_params, n)
        with (
            self._generating("generate"),
            self._submitted(groups, priority) as group_ids,
        ):
            with _progress_bar(progress, len(groups) * n) as advance:
                self._work_until(
                    lambda: not self._groups.has_unfinished(group_ids), on_finished=advance
                )
            requests = [r for group_id in group_ids for r in self._groups.take(group_id).requests]
        return requests[0] if is_single and n == 1 else requests

    @on_all_ranks
    def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingArgument = None,
        n: int = 1,
        *,
        priority: int = 0,
    ) -> list[int]:
        """Queue n samples of each prompt and return one group id per prompt, without waiting. The
        arguments are those of `generate`. Raises InvalidRequestError for a malformed prompt."""
        groups, _ = as_groups(prompts, sampling_params, n)
        with self._generating("submit"), self._submitted(groups, priority) as group_ids:
            return group_ids

    @on_all_ranks
    def collect(
        self, num_groups: int | None = None, timeout_s: float | None = None
    ) -> list[RolloutGroup]:
        """Run until `num_groups` submitted groups are finished (None: all), and return them.

        Groups are in the order of their completion. Unfinished groups stay in the engine, even
        through suspend, update and resume. After `timeout_s` seconds, the groups finished so far
        are returned.
        """
        with self._generating("collect"):
            wanted = self._groups.num_wanted(num_groups)
            deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
            self._work_until(lambda: self._groups.num_finished >= wanted, deadline=deadline)
            return self._groups.take_finished(wanted)

    @on_all_ranks
    def abort(self, group_ids: Sequence[int]) -> list[RolloutGroup]:
        """End groups now, in any state. Returns the groups, whose requests have the tokens so far.
        Raises EngineStateError for a group that is unknown or was already returned."""
        group_ids = list(dict.fromkeys(group_ids))
        unfinished = self._groups.unfinished_requests(group_ids)
        with deferred_signals():
            for request in self._runtime.abort(unfinished):
                self._groups.add_finished(request)
        return [self._groups.take(group_id) for group_id in group_ids]

    @contextmanager
    def _generating(self, method: str) -> Iterator[None]:
        """Keep other threads from generating during the block. `method` names the caller in
        messages. Raises EngineStateError if another thread or a server generates."""
        if self._server is not None:
            raise EngineStateError(
                "this LLM is served: ask it over HTTP, or call stop_serving() first"
            )
        with self.one_thread.calling(method):
            yield

    @contextmanager
    def _submitted(
        self, groups: list[tuple[Prompt, list[SamplingParams]]], priority: int
    ) -> Iterator[list[int]]:
        """Queue groups and yield their ids. If the block raises, the groups are dropped."""
        if any(params.streaming for _, each in groups for params in each):
            raise InvalidRequestError(
                "streaming=True needs AsyncLLM.stream; LLM returns whole requests"
            )
        group_ids: list[int] = []
        try:
            with deferred_signals():  # Ctrl-C does not separate queued requests from their ids
                ids = self._runtime.submit(groups, priority)
                group_ids = [self._groups.open(request_ids) for request_ids in ids]
            yield group_ids
        except BaseException:  # Ctrl-C included, because the caller never gets the ids
            left = [i for group_id in group_ids for i in self._groups.drop(group_id)]
            with suppress(RolloutError):  # an engine that has ended has no requests
                self._runtime.drop(left)
            raise

    def _work_until(
        self,
        is_done: Callable[[], bool],
        *,
        deadline: float = math.inf,
        on_finished: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Advance until `is_done` or `deadline`. Calls `on_finished` with the number of ended
        requests."""
        while True:
            on_finished(self._take_ended())
            left_s = deadline - time.monotonic()
            if is_done() or left_s <= 0:
                return
            self._runtime.advance(None if math.isinf(left_s) else left_s)

    def _take_ended(self) -> int:
        """Add the requests that ended to their groups. Returns the number of these requests."""
        with deferred_signals():  # Ctrl-C does not keep a request from its group
            ended = self._runtime.take_ended()
            for request in ended:
                self._groups.add_finished(request)
        return len(ended)

    # ---- HTTP

    def serve(self, config: ServeConfig | None = None, *, blocking: bool = True) -> None:
        """Serve over HTTP until `stop_serving`, SIGTERM or SIGINT.

        If not `blocking`, returns when the server listens at `serving_address`. Signals end the
        server only if `blocking`, and only in the main thread. An engine in this process then works
        in a thread of its own and accepts requests over HTTP only. Control methods can still be
        called. Raises ConfigError if the extra `serve` is missing or the address cannot be used.
        Raises EngineStateError if a server runs already, or if an engine in this process is not
        RUNNING or has unfinished requests.
        """
        require_one_process(self._ranks, "llm.serve")
        config = config or ServeConfig()
        if not blocking:
            self._start_serving(config)
            return
        with _set_by_signals(self._stop_requested):
            self._start_serving(config)
            try:
                while not self._stop_requested.wait(_LOST_CHECK_S):
                    with self._serving_lock:
                        if self.serving_address is not None:
                            self._serving.require_serving()
            finally:
                self.stop_serving()

    def _start_serving(self, config: ServeConfig) -> None:
        with self._serving_lock:
            if self.serving_address is not None:
                raise EngineStateError("this LLM serves already; call stop_serving() first")
            self._stop_requested.clear()
            if isinstance(self._runtime, InProcessRuntime):
                self._server = apis.EngineServer(self, config)
                self.serving_address = self._server.address
            else:
                self.serving_address = self._runtime.serve(config)

    def stop_serving(self, drain_timeout_s: float | None = None) -> None:
        """End `serve`. Does nothing if no server runs. Running requests get `drain_timeout_s`
        seconds to finish (None: as configured), and are then aborted."""
        self._stop_requested.set()
        with self._serving_lock:
            if self.serving_address is None:
                return
            try:
                self._serving.stop_serving(drain_timeout_s)
            finally:
                self.serving_address = self._server = None

    @property
    def _serving(self) -> apis.EngineServer | apis.FleetRuntime:
        """The object that serves over HTTP now."""
        if self._server is not None:
            return self._server
        assert not isinstance(self._runtime, InProcessRuntime)
        return self._runtime

    # ---- control calls: the other methods are those of ControlCalls

    @property
    def state(self) -> EngineState:
        return self._runtime.state

    @property
    def weights_version(self) -> int:
        return self._runtime.weights_version

    def do(self, command: Command[R]) -> R:
        """Run a control call and return its result. With `pg_collection` it runs on all ranks."""
        if self._ranks is None:
            return self._runtime.do(command)
        call = call_of_command(command)
        result: R = self._ranks.run(call, (), lambda: self._runtime.do(command))
        return result

    @on_all_ranks
    def warm_up(self) -> int:
        """Capture steps in advance instead of at their first run. Returns the number of captured
        steps; 0 on a CPU. Raises ConfigError for engines in other processes."""
        if not isinstance(self._runtime, InProcessRuntime):
            raise ConfigError(
                "warm_up() needs the engine in this process; other engines capture a step when it "
                "first runs"
            )
        return self._runtime.warm_up()

    @on_all_ranks
    def update_weights(
        self, named_tensors: NamedTensors, version: int | None = None, in_flight: bool = False
    ) -> WeightUpdateReport:
        """Replace all weights in place, or none, from any thread. See Engine.update_weights.

        `named_tensors` is a module, including its persistent buffers, a mapping, or (name, tensor)
        pairs. Sharded tensors are gathered by collectives in the order of names. The trainer's
        other ranks must therefore push too, or call `trainer_hooks.join_push`. Steps wait only for
        the copies.
        """
        return self._runtime.update_weights(named_tensors, version, in_flight)

    def use_weight_transport(self, transport: str | WeightTransport) -> None:
        """Use another transport for later updates. See AsyncLLM.use_weight_transport. Raises
        ConfigError for an engine in this process, which copies tensors directly."""
        if isinstance(self._runtime, InProcessRuntime):
            raise ConfigError(
                "the engine is in this process and copies weights directly; a weight transport "
                "needs use_coordinator=True"
            )
        self._runtime.use_weight_transport(transport)

    @on_all_ranks
    def weights_checksum(self) -> str:
        """Return a checksum of all weights, which is equal for engines that serve equal weights."""
        return self._runtime.weights_checksum()

    def shutdown(self) -> None:
        """Stop the engine and free its KV memory. A second call does nothing."""
        self.stop_serving(drain_timeout_s=0.0)
        self._runtime.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def own_runtime(llm: LLM, user: str) -> InProcessRuntime:
    """Return the runtime of an LLM whose engine is in this process. `user` names the caller in
    messages. Raises ConfigError for engines behind a coordinator, and with pg_collection."""
    require_one_process(llm._ranks, user)
    if not isinstance(llm._runtime, InProcessRuntime):
        raise ConfigError(
            f"{user} needs the engine in this process, use_coordinator=False; use AsyncLLM for "
            "engines behind a coordinator"
        )
    return llm._runtime


@contextmanager
def _progress_bar(is_shown: bool, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances a progress bar. The function does nothing if not
    `is_shown`."""
    if not is_shown:
        yield lambda count: None
        return
    with extra_needed("serve", "progress=True"):
        progress_bar = apis.progress_bar
    with progress_bar(total) as advance:
        yield advance


@contextmanager
def _set_by_signals(event: threading.Event) -> Iterator[None]:
    """Let SIGTERM and SIGINT set the event. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = signal.SIGTERM, signal.SIGINT
    before = [signal.signal(number, lambda *_: event.set()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _require_defaults(of_fleet: Mapping[str, Any], config: InferenceConfig) -> None:
    """Raise ConfigError if a setting that only a coordinator uses differs from its default."""
    given = {name: (value, FLEET_DEFAULTS[name]) for name, value in of_fleet.items()}
    name = "prefix_caching_coordinator_policy"
    given[name] = getattr(config, name), getattr(InferenceConfig(), name)
    for name, (value, default) in given.items():
        if value != default:
            raise ConfigError(f"{name}={value!r} needs use_coordinator=True")


MegatronLLM = LLM  # its name in Megatron Core
