"""LLM: generation and control in a few lines, stepping the engine in the caller's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from rollout.apis.groups import GroupBook
from rollout.apis.progress import progress_bar
from rollout.apis.prompts import Prompt, as_batch, per_sample
from rollout.apis.rollout_group import RolloutGroup
from rollout.apis.text_output import finished_request
from rollout.apis.turn_lock import TurnLock
from rollout.config import InferenceConfig, KVCacheManagementMode
from rollout.engine.build import DynamicInferenceEngine
from rollout.engine.reports import EngineStats, ResumeReport, SuspendReport
from rollout.engine.state import EngineState
from rollout.errors import EngineStateError, InvalidRequestError
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.runner.weight_update import NamedTensors, WeightUpdateReport
from rollout.sampling_params import SamplingParams
from rollout.text import Tokenizer, as_tokenizer

SamplingArgument = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model and its engine, in this process. A context manager: leaving it shuts the engine down.

    `model` is a Hugging Face directory, a transformers model, or one of rollout.models. `tokenizer`
    may be a Tokenizer, a transformers or `tokenizers` one; without it prompts are token ids (a
    directory's own is found). Raises ConfigError and ModelError.

    One thread generates. Any other may call the control verbs meanwhile: they take effect between
    two steps, and an update is verified and prepared while steps go on.
    """

    def __init__(
        self,
        model: str | Path | nn.Module | Any,
        tokenizer: Tokenizer | Any | None = None,
        inference_config: InferenceConfig | None = None,
        *,
        weights_version: int = 0,
    ) -> None:
        if tokenizer is None and isinstance(model, str | Path):
            tokenizer = model if (Path(model) / "tokenizer.json").is_file() else None
        self.tokenizer = None if tokenizer is None else as_tokenizer(tokenizer)
        self.engine = DynamicInferenceEngine.from_model(
            model, inference_config, self.tokenizer, weights_version
        )
        self._groups = GroupBook()
        # Held for each step, and for each command.
        self._turn = TurnLock()
        # Held while an update is staged, which needs the weights in place; always taken first.
        self._weights_turn = TurnLock()

    # ---- generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingArgument = None,
        n: int = 1,
        progress: bool = False,
    ) -> DynamicInferenceRequest | list[DynamicInferenceRequest]:
        """Run prompts to their end. One prompt with n = 1 gives one request, else a flat list.

        The list is prompt-major, in input order. `progress` shows a live bar. Raises
        InvalidRequestError for a malformed prompt, before anything is queued; a request that cannot
        run here comes back FAILED with its error event.
        """
        batch, is_single = as_batch(prompts)
        group_ids = self._submit(batch, sampling_params, n)
        with progress_bar(progress, len(batch) * n) as advance:
            self._step_until(lambda: self._groups.are_finished(group_ids), on_finished=advance)
        requests = [r for group_id in group_ids for r in self._groups.take(group_id).requests]
        return requests[0] if is_single and n == 1 else requests

    def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingArgument = None,
        n: int = 1,
    ) -> list[int]:
        """Queue n samples of each prompt and return at once, with one group id per prompt."""
        return self._submit(as_batch(prompts)[0], sampling_params, n)

    def collect(
        self, num_groups: int | None = None, timeout_s: float | None = None
    ) -> list[RolloutGroup]:
        """Step until `num_groups` submitted groups are finished (None: all), and hand those out.

        In the order of their completion; the rest stays in the engine, through suspend, update and
        resume. After `timeout_s` seconds it returns what there is.
        """
        if num_groups is not None and num_groups < 0:
            raise InvalidRequestError(f"num_groups={num_groups} must be 0 or more, or None for all")
        wanted = self._groups.num_submitted if num_groups is None else num_groups
        wanted = min(wanted, self._groups.num_submitted)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._step_until(lambda: self._groups.num_finished >= wanted, deadline=deadline)
        return self._groups.take_finished(wanted)

    def abort(self, group_ids: Sequence[int]) -> list[RolloutGroup]:
        """End groups now, in any state; their requests come back with the tokens they had."""
        group_ids = list(dict.fromkeys(group_ids))
        unfinished = [
            i for group_id in group_ids for i in self._groups.unfinished_requests(group_id)
        ]
        for request_id in unfinished:
            with self._turn:
                self._note_finished([self.engine.abort_request(request_id)])
        return [self._groups.take(group_id) for group_id in group_ids]

    def _submit(self, batch: list[Prompt], sampling_params: SamplingArgument, n: int) -> list[int]:
        groups = per_sample(sampling_params, len(batch), n)
        if any(params.streaming for group in groups for params in group):
            raise InvalidRequestError(
                "streaming=True needs a coordinator; LLM returns whole requests"
            )
        with self._turn:
            added = self.engine.add_groups(list(zip(batch, groups, strict=True)))
            return [self._groups.open(request_ids) for request_ids in added]

    def _step_until(
        self,
        is_done: Callable[[], bool],
        *,
        deadline: float | None = None,
        on_finished: Callable[[int], None] = lambda count: None,
    ) -> None:
        while not is_done() and (deadline is None or time.monotonic() < deadline):
            with self._turn:
                records = self._step()
                self._note_finished(records)
            on_finished(len(records))

    def _step(self) -> list[DynamicInferenceRequestRecord]:
        if self.state is EngineState.RUNNING and not self.engine.has_unfinished_requests():
            raise EngineStateError(
                "a group can no longer finish: some of its requests were taken from llm.engine "
                "directly; use llm.abort and llm.collect for what llm.submit queued"
            )
        return self.engine.step()

    def _note_finished(self, records: Sequence[DynamicInferenceRequestRecord]) -> None:
        for record in records:
            self._groups.note_finished(finished_request(record, self.tokenizer))

    # ---- control

    @property
    def state(self) -> EngineState:
        return self.engine.state

    @property
    def weights_version(self) -> int:
        return self.engine.weights_version

    def pause(self) -> None:
        """Stop at the next step edge."""
        with self._turn:
            self.engine.pause()

    def unpause(self) -> None:
        """Let generation go on."""
        with self._turn:
            self.engine.unpause()

    def suspend(
        self,
        mode: KVCacheManagementMode | str | None = None,
        release: Sequence[str] = ("kv_cache",),
        discard_weights: bool = False,
    ) -> SuspendReport:
        """Give memory back; unfinished requests stay. The engine must be paused.

        See Engine.suspend.
        """
        with self._weights_turn, self._turn:
            return self.engine.suspend(mode, release, discard_weights)

    def resume(self, only: str | None = None) -> ResumeReport:
        """Have the memory again, or that of `only`; once all is back the engine is paused."""
        with self._weights_turn, self._turn:
            return self.engine.resume(only)

    def update_weights(
        self, named_tensors: NamedTensors, version: int | None = None, in_flight: bool = False
    ) -> WeightUpdateReport:
        """Replace all weights in place, or nothing, from any thread. See Engine.update_weights.

        Only the copies themselves keep steps waiting.
        """
        with self._weights_turn:
            with self._turn:
                self.engine.check_update(version, in_flight)
            staged = self.engine.stage_weights(named_tensors)
            with self._turn:
                return self.engine.commit_weights(staged, version, in_flight)

    def stats(self) -> EngineStats:
        """Counters and state of the engine."""
        with self._turn:
            return self.engine.stats()

    def shutdown(self) -> None:
        """Stop the engine and free its KV memory. Twice is fine."""
        with self._turn:
            self.engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()
