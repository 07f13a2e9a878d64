"""EngineServer: the Ray actor that runs the engines of one verl replica as an AsyncLLM.

`rollout_verl.replica` starts it. verl's agent loops call `generate`, and verl's trainer aborts
requests. `rollout_verl.adapter` updates weights, and releases and restores memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.workers.rollout.replica import RolloutMode, TokenOutput

from rollout import (
    AsyncLLM,
    DynamicInferenceRequest,
    EngineState,
    InvalidRequestError,
    SamplingParams,
    ServeConfig,
)
from rollout.engine.suspension import KV_CACHE, RESOURCES
from rollout.errors import RolloutError
from rollout.models.checkpoints.reader import Checkpoint
from rollout.step.seeds import mix_seed, params_of_sample
from rollout_verl.settings import engine_fields, sampling_params_of
from trainer_hooks.losses.routing_forms import without_unknown


class EngineServer:
    """Serves verl's requests. An aborted request returns its tokens so far. From
    `abort_all_requests` to `resume_generation` new requests wait, or are answered as aborted.

    A reply has the trainer's step as `global_steps`. It also has the lowest and highest step of the
    weights that sampled its tokens, as `min_global_steps` and `max_global_steps`, if they are
    known."""

    def __init__(
        self, config: Any, model_path: str, rollout_mode: RolloutMode, replica_rank: int = 0
    ) -> None:
        self._config, self._model_path, self._mode = config, model_path, rollout_mode
        self._replica_rank = replica_rank
        self._num_requests = 0  # requests since the start
        self._llm: AsyncLLM | None = None
        self._live: set[int] = set()  # ids of running requests
        self._is_open, self._rejects = asyncio.Event(), False
        self._is_open.set()
        self._global_steps: int | None = None
        self._steps_of_version: dict[int, int | None] = {}
        self._has_weights = True  # False after a `sleep` that discards them, until an update

    async def launch(self) -> str:
        """Start the engines and an OpenAI-compatible server. Return the server's address
        "ip:port"."""
        self._llm = AsyncLLM(self._model_path, **engine_fields(self._config, self._replica_rank))
        await self._llm.start()
        await self._llm.serve(ServeConfig(port=0, protocols=("openai",)), blocking=False)
        assert self._llm.serving.address is not None
        host, port = self._llm.serving.address
        return f"{host}:{port}"

    async def shutdown(self) -> None:
        """Stop the engines and the server, if they were started."""
        if self._llm is not None:
            await self._llm.shutdown()

    @property
    def llm(self) -> AsyncLLM:
        assert self._llm is not None, "call launch() first"
        return self._llm

    # ---- generation

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Generate one sample from token ids. `request_id` is ignored. After `abort_all_requests`
        this call waits for `resume_generation`, or returns no tokens. Raises InvalidRequestError
        for images, video, sound and unsupported parameters. Raises RolloutError if the request
        fails."""
        media = {"image_data": image_data, "video_data": video_data, "audio_data": audio_data}
        if names := [name for name, values in media.items() if values]:
            raise InvalidRequestError(
                f"{' and '.join(names)}: images, video and sound are not supported; the engine has "
                "only text models; leave them out"
            )
        prompt = list(prompt_ids)
        params = sampling_params_of(sampling_params, self._config, len(prompt))
        params = self._seeded(params)
        while not self._is_open.is_set():
            if self._rejects:
                return TokenOutput(
                    token_ids=[],
                    stop_reason="aborted",
                    extra_fields={"global_steps": self._global_steps},
                )
            await self._is_open.wait()
        (future,) = self.llm.client.add_groups([(prompt, [params])], priority=priority)[0]
        self._live.add(future.request_id)
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            self.llm.client.abort(future.request_id)
            raise
        finally:
            self._live.discard(future.request_id)
        return self._output(self.llm.request_of(future, prompt, params))

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the seed that `LLM.generate` derives from the given one, or with a
        new seed."""
        self._num_requests += 1
        if params.seed is not None:
            return params_of_sample(params, 0, 0)
        # A resumed job does not repeat the seeds of earlier steps.
        step = -1 if self._global_steps is None else self._global_steps
        return replace(params, seed=mix_seed(self.llm.seed, step, self._num_requests))

    def _output(self, request: DynamicInferenceRequest) -> TokenOutput:
        is_aborted = request.finish_reason == "abort"
        if request.failed() and not is_aborted:
            raise RolloutError(f"the request failed: {request.last_error or request}")
        log_probs = request.generated_log_probs
        return TokenOutput(
            token_ids=list(request.generated_tokens),
            log_probs=None if log_probs is None else [float(value) for value in log_probs],
            routed_experts=self._routed_experts(request),
            stop_reason="aborted" if is_aborted else "completed",
            extra_fields=self._provenance(request),
        )

    def _routed_experts(self, request: DynamicInferenceRequest) -> Any:
        """Return the K experts of each token and layer as int16 [tokens - 1, layers, K]. Return
        None if the config does not request experts or they were not recorded. Unknown rows have K
        different experts."""
        if not self._config.enable_rollout_routing_replay or request.routing_indices is None:
            return None
        return without_unknown(request.routing_indices).numpy()

    def _provenance(self, request: DynamicInferenceRequest) -> dict[str, Any]:
        versions = request.policy_versions.tolist()
        fields: dict[str, Any] = {
            "global_steps": self._global_steps,
            "num_cached_tokens": request.num_cached_tokens,
        }
        known = [self._steps_of_version.get(version) for version in (versions[:1] + versions[-1:])]
        # Versions only grow, so the first and the last token have the lowest and the highest.
        if versions and None not in known:
            fields |= {"min_global_steps": known[0], "max_global_steps": known[-1]}
        return fields

    # ---- aborts

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Abort all running requests, wait for their end, and return their number and ids. Until
        `resume_generation`, new requests wait, or are answered as aborted if `reject_request`."""
        self._is_open.clear()
        self._rejects = reject_request
        request_ids = sorted(self._live)
        for request_id in request_ids:
            self.llm.client.abort(request_id)
        while self._live:
            await asyncio.sleep(0.005)
        return {"aborted_count": len(request_ids), "request_ids": [str(i) for i in request_ids]}

    async def resume_generation(self) -> None:
        self._rejects = False
        self._is_open.set()

    # ---- memory

    async def sleep(self) -> None:
        """Release the memory of KV cache and weights. Does nothing for standalone replicas or
        unless `free_cache_engine` is set. Hybrid replicas discard the weights until the next
        update. Colocated replicas keep a copy on the host."""
        if self._config.free_cache_engine and self._mode is not RolloutMode.STANDALONE:
            discards = self._mode is RolloutMode.HYBRID
            await self._suspend(RESOURCES, discard_weights=discards)
            self._has_weights = self._has_weights and not discards

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Restore the memory of `tags` ("weights", "kv_cache"), or all memory if `tags` is None.
        Does nothing for standalone replicas. Requests run again once all memory is restored and
        discarded weights are replaced."""
        if self._mode is not RolloutMode.STANDALONE:
            await self._restore(tags or RESOURCES)

    async def release_kv_cache(self) -> None:
        """Release the memory of the KV cache. Does nothing for colocated replicas or unless
        `free_cache_engine` is set."""
        if self._config.free_cache_engine and self._mode is not RolloutMode.COLOCATED:
            await self._suspend((KV_CACHE,))

    async def resume_kv_cache(self) -> None:
        """Restore the memory of the KV cache. Does nothing where `release_kv_cache` does
        nothing."""
        if self._config.free_cache_engine and self._mode is not RolloutMode.COLOCATED:
            await self._restore((KV_CACHE,))

    async def clear_kv_cache(self) -> None:
        """Do nothing, because cached prefixes are never used under other weights."""

    async def _suspend(self, release: Sequence[str], *, discard_weights: bool = False) -> None:
        if self.llm.state is EngineState.RUNNING:
            await self.llm.pause()
        await self.llm.suspend("recompute", release, discard_weights)

    async def _restore(self, resources: Sequence[str]) -> None:
        for resource in resources:
            if self.llm.state is EngineState.SUSPENDED:
                await self.llm.resume(resource)
        await self._run_if_ready()

    async def _run_if_ready(self) -> None:
        """Let requests run if all memory is restored and the weights have values."""
        if self._has_weights and self.llm.state is EngineState.PAUSED:
            await self.llm.unpause()

    # ---- weights

    async def update_weights(self, directory: str, global_steps: int | None) -> int:
        """Load the weights in a checkpoint directory into all engines or none. Return their
        version. Running requests continue under the new weights. Raises ModelError if the directory
        cannot be read, and WeightUpdateError if the update fails."""
        checkpoint = Checkpoint.open(Path(directory))
        report = await self.llm.update_weights(
            checkpoint.items(), in_flight=self.llm.state is EngineState.RUNNING
        )
        self._steps_of_version[report.version] = global_steps
        if global_steps is not None:
            self._global_steps = global_steps
        self._has_weights = True
        await self._run_if_ready()
        return report.version

    async def set_global_steps(self, global_steps: int) -> None:
        """Record that the trainer's step `global_steps` made the current weights."""
        self._global_steps = global_steps
        self._steps_of_version[self.llm.weights_version] = global_steps

    async def start_profile(self, **kwargs: Any) -> None:
        """Do nothing, because verl's profilers cannot profile engine processes."""

    async def stop_profile(self) -> None:
        """Do nothing, as `start_profile`."""
