"""AsyncLLM: generation and control over a fleet of engine processes, for asyncio.

Used by user programs, `rollout.cli.serve`, `trainer_hooks.train`, `rollout_verl.server`, and
`rollout.apis.fleet_runtime` for an LLM over a fleet. It starts and ends the fleet's processes, and
keeps a client of the coordinator.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from rollout.addresses import host_towards, own_host
from rollout.apis.arguments import config_with
from rollout.apis.fleet_processes import FleetProcesses, coordinator_arguments, engine_arguments
from rollout.apis.serving import Serving
from rollout.apis.streaming import LOST, AsyncGeneration
from rollout.apis.weight_push import WeightPush
from rollout.config import InferenceConfig
from rollout.control.commands import AsyncControlCalls, Command, R, fleet_stats
from rollout.control.reports import FleetStats, WeightChecksums, WeightUpdateReport
from rollout.control.state import EngineState
from rollout.coordinator.client.inference_client import Group, InferenceClient
from rollout.coordinator.client.streams import RequestFuture, RequestStream
from rollout.coordinator.net.security import CurveKeys
from rollout.coordinator.net.sockets import address_of
from rollout.errors import (
    ConfigError,
    CoordinatorLostError,
    EngineStateError,
    RolloutError,
)
from rollout.launch.launcher import Launcher
from rollout.launch.local import LocalLauncher
from rollout.models.checkpoints.smollm2 import model_directory
from rollout.serve.config import ServeConfig
from rollout.step.seeds import given_or_drawn
from rollout.text import Tokenizer, tokenizer_of
from rollout.weights.transports.base import WeightTransport
from rollout.weights.update import NamedTensors

_NOTICE_S = 1.0  # wait for the coordinator process's end after the connection's end


class AsyncLLM(AsyncGeneration, AsyncControlCalls):
    """A model in `data_parallel_size` engine processes behind a coordinator.

    It is an async context manager, and leaving it ends all processes that it started. `model`,
    `tokenizer`, `inference_config` and `config_fields` are as for LLM. Methods with the names of
    LLM's methods are awaited here. They take effect on all engines, and return when the last engine
    has confirmed.

    Without a host or a port, only processes of the same user can join the fleet. Otherwise every
    process that can connect to the coordinator can join. With `curve` in `coordinator_options`,
    only peers with a known key can join.
    """

    _fleet: FleetProcesses | None
    model_directory: str | None

    def __init__(
        self,
        model: str | Path | Any,
        tokenizer: Tokenizer | Any | None = None,
        inference_config: InferenceConfig | None = None,
        *,
        use_coordinator: bool = True,
        data_parallel_size: int = 1,
        spawn: int | None = None,
        coordinator_host: str | None = None,
        coordinator_port: int | None = None,
        coordinator_options: Mapping[str, Any] | None = None,
        weights_version: int = 0,
        max_engine_restarts: int = 3,
        start_timeout_s: float = 1800.0,
        launcher: Launcher | None = None,
        weight_transport: str | WeightTransport | None = None,
        **config_fields: Any,
    ) -> None:
        """Start the fleet's processes and wait until they run.

        spawn: number of engines to start; None for all engines. Other engines connect to `address`,
            for example with `rollout engine --join`.
        coordinator_host, coordinator_port: address at which the coordinator listens; None for a
            socket of this user.
        coordinator_options: further arguments of DataParallelInferenceCoordinator, such as
            schedule_output_path or limits.
        max_engine_restarts: how often in a row a failed engine is started again.
        start_timeout_s: maximum seconds for the start of a process, and for the wait of requests
            for an engine.
        launcher: starts the engines, for example on other hosts with rollout.launch.ray; None for
            processes on this machine.
        weight_transport: a name from docs/weight_transports.md, or a transport object; None for
            "shared", which reaches engines on this machine.

        Raises ConfigError, ModelError, and the error that keeps a process from starting.
        """
        if not use_coordinator:
            raise ConfigError("AsyncLLM needs use_coordinator=True; without a coordinator use LLM")
        known = inspect.signature(AsyncLLM).parameters
        config = config_with(inference_config, config_fields, *known)
        launcher, model = launcher or LocalLauncher(), model_directory(model)
        host, options = coordinator_host or launcher.host, coordinator_options or {}
        reached_at = partial(own_host, host, options.get("advertise_host"))
        push = WeightPush(
            weight_transport, config.reject_non_finite_weights, reached_at, config.engine
        )
        self._set_up(tokenizer_of(model, tokenizer), config.seed, weights_version, push)
        self.model_directory = str(model) if isinstance(model, str | Path) else None
        for_coordinator = coordinator_arguments(
            config,
            options,
            data_parallel_size=data_parallel_size,
            host=host,
            port=coordinator_port,
            orphan_deadline_s=start_timeout_s,
        )
        self._fleet = FleetProcesses(
            for_coordinator,
            engine_arguments(model, self.tokenizer, config, weights_version, start_timeout_s),
            launcher=launcher,
            spawn=spawn,
            max_engine_restarts=max_engine_restarts,
            start_timeout_s=start_timeout_s,
            on_lost=self._on_fleet_lost,
        )
        self.address, self._curve = self._fleet.address, self._fleet.curve

    @classmethod
    async def connect(
        cls,
        address: int | str,
        tokenizer: Tokenizer | Any | None = None,
        *,
        seed: int | None = None,
        curve: CurveKeys | None = None,
        weight_transport: str | WeightTransport | None = None,
    ) -> AsyncLLM:
        """Connect to the fleet of a running coordinator. The fleet continues after this AsyncLLM
        ends.

        `address`, `seed` and `curve` are as for InferenceClient. The engines' config decides
        whether non-finite weights are refused. Raises CoordinatorLostError if the coordinator does
        not answer.
        """
        llm = cls.joined(
            address, tokenizer, seed=seed, curve=curve, weight_transport=weight_transport
        )
        await llm.start()
        return llm

    @classmethod
    def joined(
        cls,
        address: int | str,
        tokenizer: Tokenizer | Any | None = None,
        *,
        seed: int | None = None,
        curve: CurveKeys | None = None,
        model_directory: str | None = None,
        weight_transport: str | WeightTransport | None = None,
    ) -> AsyncLLM:
        """Return an AsyncLLM as `connect` does, but without connecting. Its first awaited call
        connects. `model_directory` is the model's directory, which a server reads."""
        llm = cls.__new__(cls)
        dialled = address_of(address)
        push = WeightPush(weight_transport, False, partial(host_towards, dialled))
        llm._set_up(tokenizer_of(None, tokenizer), seed, 0, push, curve)
        llm.address, llm.model_directory = dialled, model_directory
        return llm

    def _set_up(
        self,
        tokenizer: Tokenizer | None,
        seed: int | None,
        weights_version: int,
        push: WeightPush,
        curve: CurveKeys | None = None,
    ) -> None:
        self.tokenizer, self._curve = tokenizer, curve
        self.seed = given_or_drawn(seed, "an AsyncLLM")  # requests without a seed derive theirs
        self.address = ""  # the coordinator's; other clients, and engines, may connect to it
        self.model_directory = None
        self.serving = Serving(self)
        self._fleet = None
        self._push, self._start_lock = push, asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: InferenceClient | None = None
        self._end: asyncio.Future[None] | None = None
        self._lost: CoordinatorLostError | None = None
        self._is_lost = asyncio.Event()
        self._weights_version = weights_version  # while there is no client

    @property
    def client(self) -> InferenceClient:
        """The client of the coordinator. Raises EngineStateError before the start and after the
        end, and CoordinatorLostError if the fleet has ended."""
        if self._lost is not None:
            raise CoordinatorLostError(*self._lost.args)
        if self._client is None:
            raise EngineStateError("this AsyncLLM is not started, or shut down already")
        return self._client

    @property
    def state(self) -> EngineState:
        """The fleet's state after the latest control call of this object; RUNNING before a start,
        STOPPED after the end. Other clients may have changed the fleet's state since then."""
        if self._end is not None:
            return EngineState.STOPPED
        client = self._client
        return EngineState.RUNNING if client is None else client.state

    @property
    def weights_version(self) -> int:
        """The fleet's weights version after the latest control call of this object."""
        client = self._client
        return self._weights_version if client is None else client.weights_version

    async def _connect(self) -> None:
        await self.start()

    async def start(self) -> InferenceClient:
        """Connect to the coordinator, unless connected, and return the client. The awaited methods
        call it first. Raises EngineStateError after the end."""
        async with self._start_lock:
            if self._end is not None:
                raise EngineStateError("this AsyncLLM is shut down; make a new one")
            if self._client is None:
                self._loop = asyncio.get_running_loop()
                client = InferenceClient(
                    self.address, tokenizer=self.tokenizer, seed=self.seed, curve=self._curve
                )
                await client.start()
                self._client = client
            return self.client

    # ---- the end of pending calls

    def _on_fleet_lost(self, error: CoordinatorLostError) -> None:
        """Fail all pending calls, because the fleet's processes end. Called in another thread."""
        self._lost = error
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._fail_pending)

    def _fail_pending(self) -> None:
        self._is_lost.set()
        if self._client is not None and self._end is None:
            self._client.stop()

    def _end_error(self) -> RolloutError | None:
        if self._end is not None:
            return EngineStateError(
                "this AsyncLLM was shut down before this call was answered; make a new one"
            )
        return None if self._lost is None else CoordinatorLostError(*self._lost.args)

    def _fails_batch(self, error: BaseException) -> bool:
        return isinstance(error, LOST) or self._end_error() is not None

    @asynccontextmanager
    async def _named_errors(self) -> AsyncIterator[None]:
        try:
            yield
        except RolloutError as error:
            if isinstance(error, CoordinatorLostError) and self._fleet is not None:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._is_lost.wait(), _NOTICE_S)
            reason = self._end_error()
            if reason is None:
                raise
            task = asyncio.current_task()
            if task is not None:
                # The caller does not wait any more; asyncio need not report the error.
                task.add_done_callback(lambda task: task.cancelled() or task.exception())
            raise reason from error

    # ---- generation

    def add_groups(
        self, groups: Sequence[Group], *, priority: int = 0, deadline_s: float | None = None
    ) -> list[list[RequestFuture]]:
        """Queue groups without waiting. See InferenceClient.add_groups."""
        return self.client.add_groups(groups, priority=priority, deadline_s=deadline_s)

    def stream_groups(
        self, groups: Sequence[Group], *, priority: int = 0, deadline_s: float | None = None
    ) -> list[list[RequestStream]]:
        """Queue groups as streams, without waiting. See InferenceClient.stream_groups."""
        return self.client.stream_groups(groups, priority=priority, deadline_s=deadline_s)

    def abort_request(self, future: RequestFuture) -> None:
        """Abort a request. Its future resolves to the record with the tokens so far."""
        self.client.abort(future.request_id)

    def _unfinished(self) -> list[RequestFuture]:
        return list(self.client.completion_futures.values())

    async def lost(self) -> RolloutError:
        """Wait until the client has ended, and return the reason. The client does not connect
        again. A client ends when the coordinator is lost, when the client is shut down, or when
        this process stood still for longer than the client's lease."""
        listener = self.client.listener_task
        assert listener is not None, "this AsyncLLM is started"
        await asyncio.wait([listener])
        try:
            await self.stats()
        except RolloutError as error:
            return error
        return CoordinatorLostError("the client of the engines has ended")

    # ---- HTTP

    async def serve(self, config: ServeConfig | None = None, *, blocking: bool = True) -> None:
        """Serve over HTTP until `stop_serving`, SIGTERM or SIGINT.

        If not `blocking`, returns when the server listens at `serving.address`. If the coordinator
        is lost, the server ends with CoordinatorLostError. This error is raised if `blocking`, and
        otherwise kept in `serving.lost`. Raises ConfigError if the extra `serve` is missing or the
        address cannot be used, and EngineStateError if a server runs already.
        """
        await self.start()
        await self.serving.start(config or ServeConfig(), blocking=blocking)

    async def stop_serving(self, drain_timeout_s: float | None = None) -> None:
        """End `serve`, if a server runs. Running requests get `drain_timeout_s` seconds to finish
        (None: as configured)."""
        await self.serving.stop(drain_timeout_s)

    # ---- control. If the caller is cancelled, its command still runs to its end

    async def do(self, command: Command[R]) -> R:
        """Run a control call on all engines. Returns its result after the last engine has
        confirmed."""
        client = await self.start()
        async with self._named_errors():
            return await asyncio.shield(client.do(command))

    async def update_weights(
        self, named_tensors: NamedTensors, version: int | None = None, in_flight: bool = False
    ) -> WeightUpdateReport:
        """Replace the weights of all engines, or of none, through the `weight_transport`.

        The arguments are those of LLM.update_weights. The tensors must not change until this call
        returns. If the caller is cancelled, an update that has begun continues, and its result is
        lost.
        """
        await self.start()
        update = asyncio.ensure_future(
            self._push.push(
                named_tensors,
                self.start,  # raises if it was shut down while the update waited
                lambda source: self.client.update_weights(source, version, in_flight),
            )
        )
        async with self._named_errors():
            return await asyncio.shield(update)

    def use_weight_transport(self, transport: str | WeightTransport) -> None:
        """Use another transport than the constructor's `weight_transport` for later updates.
        docs/weight_transports.md lists the names. This AsyncLLM closes a given WeightTransport at
        its end. Raises ConfigError for an unknown name."""
        self._push.use(transport)

    async def weights_checksum(self) -> str:
        """Return the checksum of the weights that all engines serve."""
        client = await self.start()
        async with self._named_errors():
            return (await client.engine_stats()).weights_checksum

    async def fleet_stats(self) -> FleetStats:
        """Return the counters of each engine and of the coordinator."""
        client = await self.start()
        async with self._named_errors():
            results = await client.engine_stats()
        return fleet_stats(results)

    async def weight_checksums(self, start: int = 0) -> Mapping[int, WeightChecksums]:
        """Return one page of each engine's weight checksums, from index `start` on, by the engine's
        rank."""
        client = await self.start()
        async with self._named_errors():
            return (await client.weight_checksums(start)).by_rank

    async def shutdown(self, *, end_fleet: bool | None = None) -> None:
        """End this AsyncLLM, from any state. A second call waits for the first. `end_fleet` is
        whether to end all engines and the coordinator. None ends them if this AsyncLLM started
        them. If the fleet is not ended, only this AsyncLLM's requests are aborted."""
        if self._end is None:
            ends_fleet = self._fleet is not None if end_fleet is None else end_fleet
            self._end = asyncio.ensure_future(self._shut_down(ends_fleet))
        await asyncio.shield(self._end)

    async def _shut_down(self, ends_fleet: bool) -> None:
        async with AsyncExitStack() as last:  # every callback runs, even if another one raises
            last.push_async_callback(self._push.close)
            if self._fleet is not None:
                self._fleet.end_restarts()
                last.push_async_callback(asyncio.to_thread, self._fleet.close)
            await self.serving.stop(drain_timeout_s=0.0)
            async with self._start_lock:  # a running start ends first
                client, self._client = self._client, None
            if client is not None:
                self._weights_version = client.weights_version
                last.push_async_callback(client.aclose)
                with suppress(RolloutError):  # the processes are ended in any case
                    if ends_fleet:
                        await client.shutdown_engines(deadline_s=5.0)

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self.start()
        except BaseException:  # __aexit__ is not called after an error here
            await self.shutdown()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.shutdown()


MegatronAsyncLLM = AsyncLLM  # its name in Megatron Core
