"""AsyncLLM: generation and control over a fleet of engine processes, for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from msgspec import structs

from rollout.apis.fleet_processes import EngineRecipe, FleetProcesses
from rollout.apis.fleet_reports import (
    engine_stats,
    resume_report,
    suspend_report,
    weight_update_report,
)
from rollout.apis.prompts import Prompt, as_batch, per_sample
from rollout.apis.text_output import finished_request, streamed, text_to_stream
from rollout.config import InferenceConfig, KVCacheManagementMode
from rollout.coordinator.client.inference_client import InferenceClient
from rollout.coordinator.client.pending_commands import CommandFuture
from rollout.coordinator.client.streams import RequestFuture
from rollout.coordinator.core.fleet import CoordinatorState
from rollout.coordinator.publisher import WeightPublisher
from rollout.engine.reports import EngineStats, ResumeReport, SuspendReport
from rollout.engine.state import EngineState
from rollout.errors import ConfigError, EngineStateError, RolloutError
from rollout.models.loading import without_shards
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.runner.weight_update import NamedTensors, WeightUpdateReport
from rollout.sampling_params import SamplingParams
from rollout.text import Tokenizer, tokenizer_of

Results = Mapping[str, Any]
_PUBLISH_S = 60.0  # how long the end waits for an update that is copying its tensors


class AsyncLLM:
    """A model in `data_parallel_size` engine processes behind a coordinator. An async context
    manager: leaving it ends all processes.

    `model` and `tokenizer` as for LLM. All verbs are those of LLM, to be awaited; they take effect
    on all engines, and return when the last one has confirmed. `coordinator_options`: further
    arguments of DataParallelInferenceCoordinator, such as schedule_output_path or limits. Only
    processes of the same user can join, unless a host or a port is given; over TCP everybody on
    the machine can, or with `curve` in `coordinator_options` whose key is known.
    """

    def __init__(
        self,
        model: str | Path | Any,
        tokenizer: Tokenizer | Any | None = None,
        inference_config: InferenceConfig | None = None,
        *,
        use_coordinator: bool = True,
        data_parallel_size: int = 1,
        coordinator_host: str | None = None,
        coordinator_port: int | None = None,
        coordinator_options: Mapping[str, Any] | None = None,
        weights_version: int = 0,
    ) -> None:
        """Raises ConfigError, ModelError and whatever else keeps a process from starting."""
        if not use_coordinator:
            raise ConfigError("AsyncLLM needs use_coordinator=True; without a coordinator use LLM")
        self.tokenizer = tokenizer_of(model, tokenizer)
        config = inference_config or InferenceConfig()
        model = without_shards(model, config.dtype)
        recipe = EngineRecipe(
            model=model, config=config, tokenizer=self.tokenizer, weights_version=weights_version
        )
        self._fleet = FleetProcesses(
            recipe,
            data_parallel_size=data_parallel_size,
            host=coordinator_host,
            port=coordinator_port,
            options=coordinator_options,
        )
        self._seed = recipe.config.seed
        self._publisher = WeightPublisher(reject_non_finite=config.reject_non_finite_weights)
        self._start_turn, self._update_turn = asyncio.Lock(), asyncio.Lock()
        self._client: InferenceClient | None = None
        self._end: asyncio.Future[None] | None = None
        self._state, self._weights_version = EngineState.RUNNING, weights_version

    @property
    def address(self) -> str:
        """Of the coordinator: other clients, and engines, may dial it."""
        return self._fleet.address

    @property
    def client(self) -> InferenceClient:
        """For aborts and deadlines, which no verb has. Raises EngineStateError unless started."""
        if self._client is None:
            raise EngineStateError("this AsyncLLM is not started, or shut down already")
        return self._client

    @property
    def state(self) -> EngineState:
        """Of all engines, as the answer to the latest verb told; other clients may order, too."""
        return self._state

    @property
    def weights_version(self) -> int:
        """Of all engines, as `state`."""
        return self._weights_version

    def _told(self, results: Results) -> Results:
        self._state = CoordinatorState[results["state"]].engine_state
        self._weights_version = results["weights_version"]
        return results

    async def start(self) -> None:
        """Connect; done by `async with`, and by the first use."""
        await self._connected()

    async def _connected(self) -> InferenceClient:
        async with self._start_turn:
            if self._end is not None:
                raise EngineStateError("this AsyncLLM is shut down; make a new one")
            if self._client is None:
                client = InferenceClient(
                    self._fleet.address,
                    tokenizer=self.tokenizer,
                    seed=self._seed,
                    curve=self._fleet.curve,
                )
                await client.start()
                self._client = client
                if client.coordinator is not None:
                    self._told(structs.asdict(client.coordinator))
            return self._client

    @contextmanager
    def _until_shutdown(self) -> Iterator[None]:
        """What a shutdown cuts short fails with that, whichever of its steps was noticed first."""
        try:
            yield
        except RolloutError as error:
            if self._end is None:
                raise
            task = asyncio.current_task()
            if task is not None:
                # To a caller who waits no more it is no news: asyncio need not report it.
                task.add_done_callback(lambda task: task.cancelled() or task.exception())
            raise EngineStateError("this AsyncLLM was shut down before the answer came") from error

    async def _order(self, order: Callable[[InferenceClient], CommandFuture]) -> Results:
        client = await self._connected()
        with self._until_shutdown():
            return self._told(await order(client))

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        n: int = 1,
        *,
        priority: int = 0,
    ) -> DynamicInferenceRequest | list[DynamicInferenceRequest]:
        """Run prompts to their end. One prompt with n = 1 gives one request, else a flat list.

        The list is prompt-major, in input order. A higher `priority` goes first. Raises
        InvalidRequestError for a malformed prompt; a request that cannot run comes back FAILED, or
        its error is raised if no engine took it.
        """
        client = await self._connected()
        batch, is_single = as_batch(prompts)
        groups = per_sample(sampling_params, len(batch), n)
        futures: list[RequestFuture] = []
        try:
            for prompt, params in zip(batch, groups, strict=True):
                futures += client.add_group(prompt, params, priority=priority)
            with self._until_shutdown():
                records = await asyncio.gather(*futures)
        finally:
            for future in futures:
                future.cancel()  # those that are not done
        requests = [finished_request(record, self.tokenizer) for record in records]
        return requests[0] if is_single and n == 1 else requests

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        as_text: bool = False,
    ) -> AsyncIterator[list[int] | str | DynamicInferenceRequest]:
        """Token ids as they come, each once, then the whole request. Closed early, it aborts.

        `as_text`: pieces of its text instead; what may begin a stop string waits until it is none.
        """
        client, params = await self._connected(), sampling_params or SamplingParams()
        text = text_to_stream(self.tokenizer, params) if as_text else None
        async with aclosing(client.stream(prompt, params, priority=priority)) as items:
            with self._until_shutdown():
                async for item in items:
                    for piece in streamed(item, self.tokenizer, text):
                        yield piece

    # ---- control

    async def pause(self) -> None:
        """Stop all engines at their next step."""
        await self._order(lambda client: client.pause_engines())

    async def unpause(self) -> None:
        """Let generation go on."""
        await self._order(lambda client: client.unpause_engines())

    async def suspend(
        self,
        mode: KVCacheManagementMode | str | None = None,
        release: Sequence[str] = ("kv_cache",),
        discard_weights: bool = False,
    ) -> SuspendReport:
        """Give memory back; unfinished requests stay. The engines must be paused."""
        return suspend_report(
            await self._order(lambda client: client.suspend_engines(mode, release, discard_weights))
        )

    async def resume(self, only: str | None = None) -> ResumeReport:
        """Have the memory again; once all is back the engines are paused."""
        return resume_report(await self._order(lambda client: client.resume_engines(only)))

    async def set_generation_epoch(self, version: int) -> None:
        """Set the weights version without new weights."""
        await self._order(lambda client: client.set_generation_epoch(version))

    async def update_weights(
        self, named_tensors: NamedTensors, version: int | None = None, in_flight: bool = False
    ) -> WeightUpdateReport:
        """Replace the weights of all engines, or of none, through one copy in shared memory.

        Takes what LLM.update_weights does. The tensors must not change until this returns. An
        update that has begun goes on when its caller is cancelled, who then does not learn whether
        it succeeded.
        """
        await self._connected()
        update = asyncio.ensure_future(self._update(named_tensors, version, in_flight))
        with self._until_shutdown():
            return await asyncio.shield(update)

    async def _update(
        self, named_tensors: NamedTensors, version: int | None, in_flight: bool
    ) -> WeightUpdateReport:
        async with self._update_turn:
            await self._connected()  # whose end may have come before this turn
            start = time.perf_counter()
            source = await asyncio.to_thread(self._publisher.publish, named_tensors)
            try:
                results = await self._order(
                    lambda client: client.update_weights(source, version, in_flight)
                )
            except BaseException:
                self._publisher.drop()
                raise
            self._publisher.commit()
            return weight_update_report(results, time.perf_counter() - start)

    async def stats(self) -> EngineStats:
        """Counters of all engines together."""
        return engine_stats(await self._order(lambda client: client.engine_stats()))

    async def shutdown(self) -> None:
        """End all processes. From any state; twice is fine, and whoever calls it awaits the end."""
        if self._end is None:
            self._state = EngineState.STOPPED
            self._end = asyncio.ensure_future(self._shut_down())
        await asyncio.shield(self._end)

    async def _shut_down(self) -> None:
        async with AsyncExitStack() as last:  # each of these, whatever another one raises
            last.callback(self._publisher.close)
            last.push_async_callback(self._await_update)
            last.push_async_callback(asyncio.to_thread, self._fleet.close)
            async with self._start_turn:  # a start under way ends first
                client, self._client = self._client, None
            if client is not None:
                last.push_async_callback(client.aclose)
                with suppress(Exception):  # whatever the engines say, they are ended anyway
                    await client.shutdown_engines(deadline_s=5.0)

    async def _await_update(self) -> None:
        """One that is publishing cannot be stopped, and gives up what it has published."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._update_turn.acquire(), _PUBLISH_S)
            self._update_turn.release()

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self.start()
        except BaseException:
            await self.shutdown()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.shutdown()
