"""ModelRunner: runs StepPlans on the device.

Used by `rollout.worker.worker`. Made by `rollout.worker.loading`. Step executors of
`rollout.backends` call `forward` and `draw`. It writes the KV cache.

Shape letters: T tokens, L logit rows, P scored tokens, S sample rows, Q samples with penalties, E
hidden size, V vocabulary. In TLK, L are the layers with experts and K the experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from rollout.backends.base import Backend
from rollout.backends.forward_batch import ForwardBatch, SamplingBatch
from rollout.backends.ops.logits_processing import sample_processed
from rollout.backends.ops.sampling import concatenated, token_ranks
from rollout.backends.step_tensors import HostArray, StepInputs, StepLayout
from rollout.models.causal_lm import CausalLM
from rollout.parallel.collectives import any_rank
from rollout.step.output import SampleResult, ScoreResult, StepOutput
from rollout.step.plan import StepPlan
from rollout.worker.batch_builder import BatchBuilder
from rollout.worker.kv_cache import KVCache
from rollout.worker.logits_builder import TokenHistories

# Prompt tokens whose logits are made at a time, so that scoring a long prompt with a large
# vocabulary does not need gigabytes at once.
SCORE_CHUNK = 512


class ModelRunner:
    """Runs steps of the model, which write the KV cache. Keeps each row's last token, and the token
    histories of rows with penalties, on the device."""

    def __init__(
        self,
        model: CausalLM,
        backend: Backend,
        kv: KVCache,
        builder: BatchBuilder,
        *,
        records_routing: bool = False,
    ) -> None:
        """`records_routing` adds each token's experts to the outputs. The model must then have
        experts."""
        self._records_routing = records_routing
        self._model, self._backend, self._kv, self._builder = model, backend, kv, builder
        self._last_tokens = torch.zeros(builder.num_rows, dtype=torch.int64, device=backend.device)
        self._histories = TokenHistories(backend.device)
        self._addresses = self._addresses_now()

    def as_current(self) -> AbstractContextManager[object]:
        """Return a context manager that makes the model's device current in this thread."""
        return self._backend.as_current()

    @property
    def overlaps(self) -> bool:
        """Whether the host can prepare a step while the previous one runs."""
        return self._backend.executor.overlaps

    @property
    def num_graph_captures(self) -> int:
        """Number of steps captured so far."""
        return self._backend.executor.num_captures

    def launch(self, plan: StepPlan) -> Callable[[], StepOutput]:
        """Start a step: copy blocks, compute the plan's tokens, sample and score. The returned
        function waits for the result. At most two steps may be in flight."""
        assert self._kv.layers, "the KV cache is released"
        inputs = self._builder.build(plan)
        if len(plan.copy_sources):
            self._kv.copy_tokens(plan.copy_sources, plan.copy_targets, plan.copy_lengths)
        # A new context each time: if an asynchronous exception (a signal) skips its exit, it ends
        # when this frame drops it.
        with torch.inference_mode():
            fetch = self._backend.executor.launch(self, inputs)
        if not self._records_routing:
            return fetch
        return lambda: replace(fetch(), slots_T=inputs.slots_T)

    def warm_up(self) -> int:
        """Capture graphs of steps before requests need them. Returns how many were captured. No
        step may be in flight."""
        assert self._kv.layers, "the KV cache is released"
        with torch.inference_mode():
            return self._backend.executor.warm_up(self)

    def after_suspend(self) -> dict[str, int]:
        """Return unused allocator memory to the system after a release. Returns the bytes still in
        use besides KV cache and weights, by name."""
        self._backend.memory.trim()
        return {
            **self._backend.executor.num_bytes,
            "tables": self._model.num_table_bytes,
            "rows": self._last_tokens.nbytes + self._histories.num_bytes,
        }

    def after_resume(self) -> int:
        """Drop captured steps if restored memory has other addresses on any rank. Returns how many
        steps must be captured again. All ranks must call it."""
        before, self._addresses = self._addresses, self._addresses_now()
        backend, has_moved = self._backend, self._addresses != before
        # All ranks capture again or none: capturing and replaying ranks would block each other.
        has_moved = any_rank(backend.collectives, has_moved, backend.device)
        return backend.executor.after_resume(has_moved=has_moved)

    def _addresses_now(self) -> tuple[int, int]:
        """Return the addresses of the KV cache and of the weights, each of which is one buffer."""
        assert self._kv.layers, "the KV cache is released"
        return self._kv.layers[0].data_ptr(), next(self._model.parameters()).data_ptr()

    def forward(
        self, host: StepInputs[HostArray], inputs: StepInputs[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states of the logit rows [L, E], and the tokens' experts [T, L, K]. The
        experts are None if they are not recorded. Writes K and V of the step's tokens to the KV
        cache. `host` has the same arrays as `inputs`, on the host."""
        layout = inputs.layout
        token_ids_T = self._last_tokens.index_select(0, layout.input_rows_T)
        if not layout.only_decodes:
            token_ids_T = torch.where(layout.input_rows_T > 0, token_ids_T, layout.token_ids_T)
        batch = self._forward_batch(host, inputs, token_ids_T)
        return self._model(batch), batch.routing_TLK

    def draw(
        self, host: StepInputs[HostArray], inputs: StepInputs[Tensor], hidden_LE: Tensor
    ) -> StepOutput[Tensor]:
        """Sample from the first `num_drawn_logits` rows, and score prompt tokens with the remaining
        rows. Each sampled token becomes its row's last token."""
        layout = inputs.layout
        scores = None
        if layout.score_targets_P.shape[0]:
            scores = self._score(layout, hidden_LE[layout.num_drawn_logits :])
            hidden_LE = hidden_LE[: layout.num_drawn_logits]
        return StepOutput(samples=self._sample(host, inputs, hidden_LE), scores=scores)

    def _forward_batch(
        self, host: StepInputs[HostArray], inputs: StepInputs[Tensor], token_ids_T: Tensor
    ) -> ForwardBatch:
        layout = inputs.layout
        return ForwardBatch(
            token_ids_T=token_ids_T,
            positions_T=inputs.positions_T,
            slots_T=inputs.slots_T,
            block_tables_RM=inputs.block_tables_RM,
            query_starts_E=layout.query_starts_E,
            context_lens_R=inputs.context_lens_R,
            query_starts=host.layout.query_starts_E,
            context_lens=host.context_lens_R,
            num_decode_rows=layout.num_decode_rows,
            block_size=self._builder.block_size,
            logit_indices_L=layout.logit_indices_L,
            kv=self._kv.layers,
            routing_TLK=self._new_routing(token_ids_T) if self._records_routing else None,
        )

    def _new_routing(self, token_ids_T: Tensor) -> Tensor:
        """Return an empty array [T, L, K], into which layers with experts write each token's
        experts."""
        spec = self._model.spec
        shape = token_ids_T.shape[0], spec.num_moe_layers, spec.experts_per_token
        return token_ids_T.new_empty(shape, dtype=torch.int16)

    def _sample(
        self, host: StepInputs[HostArray], inputs: StepInputs[Tensor], hidden_LE: Tensor
    ) -> SampleResult[Tensor]:
        """Draw the step's samples, and write each one as its row's last token and to its
        history."""
        layout = inputs.layout
        if not hidden_LE.shape[0]:
            no_ids = layout.sample_rows_S
            return SampleResult(token_ids_S=no_ids, is_finite_S=no_ids > 0)
        logits_SV = self._model.compute_logits(hidden_LE)
        if not layout.draws_in_order:
            logits_SV = logits_SV.index_select(0, layout.draws_S)
        sampling = _sampling_batch(inputs)
        sampled = self._backend.ops.sample(logits_SV, sampling)
        if host.processing is not None and inputs.processing is not None:
            history_QP = self._histories.begin(host.processing, inputs.processing)
            sampled = sample_processed(
                *(self._backend.ops, logits_SV, sampling, sampled), inputs.processing, history_QP
            )
            self._histories.append(inputs.processing, sampled.token_ids_S)
        self._last_tokens.scatter_(0, layout.sample_rows_S, sampled.token_ids_S)
        if layout.flags.any_ranks:
            sampled = replace(sampled, ranks_S=token_ranks(logits_SV, sampled.token_ids_S))
        return sampled

    def _score(self, layout: StepLayout[Tensor], hidden_PE: Tensor) -> ScoreResult[Tensor]:
        parts: list[ScoreResult[Tensor]] = []
        for start in range(0, hidden_PE.shape[0], SCORE_CHUNK):
            part = slice(start, start + SCORE_CHUNK)
            logits_PV = self._model.compute_logits(hidden_PE[part])
            targets_P = layout.score_targets_P[part]
            scores = self._backend.ops.score(logits_PV, targets_P, layout.score_top_n)
            if layout.score_ranks:
                scores = replace(scores, ranks_P=token_ranks(logits_PV, targets_P))
            parts.append(scores)
        return concatenated(parts)


def _sampling_batch(inputs: StepInputs[Tensor]) -> SamplingBatch:
    layout, flags = inputs.layout, inputs.layout.flags
    return SamplingBatch(
        uniforms_S=inputs.uniforms_S,
        temperature_S=layout.temperature_S,
        top_k_S=layout.top_k_S,
        top_p_S=layout.top_p_S,
        min_p_S=layout.min_p_S,
        mode_S=layout.mode_S,
        all_greedy=flags.all_greedy,
        any_greedy=flags.any_greedy,
        any_truncation=flags.any_truncation,
        any_logprobs=flags.any_logprobs,
        top_n=flags.top_n,
    )
