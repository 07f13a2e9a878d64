"""BatchBuilder: keeps each row's lasting state, and turns a StepPlan into the tensors of one step.

Shape letters: T tokens, R compute rows, M blocks per table, S sample rows.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.backends.forward_batch import MODE_CODES, ForwardBatch, SamplingBatch
from rollout.kv.cache import KVCache
from rollout.step.plan import StepPlan
from rollout.step.seeds import uniforms


class BatchBuilder:
    """The only writer of the step's input buffers. Row 0 is scratch."""

    def __init__(
        self, *, num_rows: int, max_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._tables = np.zeros((num_rows + 1, max_blocks), dtype=np.int32)
        self._last_tokens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self._seeds = np.zeros(num_rows + 1, dtype=np.uint64)
        self._temperature = np.zeros(num_rows + 1, dtype=np.float32)
        self._top_k = np.zeros(num_rows + 1, dtype=np.int64)
        self._top_p = np.zeros(num_rows + 1, dtype=np.float32)
        self._min_p = np.zeros(num_rows + 1, dtype=np.float32)
        self._mode = np.zeros(num_rows + 1, dtype=np.int8)
        self._wants_logprobs = np.zeros(num_rows + 1, dtype=np.bool_)
        self._top_n = np.zeros(num_rows + 1, dtype=np.int64)

    def apply_changes(self, plan: StepPlan) -> None:
        """Take in what the plan says of new rows and block tables."""
        for row, sampling in plan.new_rows:
            self._seeds[row] = sampling.seed
            self._temperature[row] = sampling.temperature
            self._top_k[row] = sampling.top_k
            self._top_p[row] = sampling.top_p
            self._min_p[row] = sampling.min_p
            self._mode[row] = MODE_CODES[sampling.logprobs_mode or "raw"]
            self._wants_logprobs[row] = sampling.logprobs_mode is not None
            self._top_n[row] = sampling.top_n
        self._tables[plan.table_rows, plan.table_indices] = plan.table_blocks

    def forward_batch(
        self, plan: StepPlan, kv: KVCache, logit_indices: NDArray[np.int64]
    ) -> ForwardBatch:
        """The step's tokens, where their KV goes, and whose logits are wanted."""
        query_starts = np.zeros(len(plan.rows) + 1, dtype=np.int32)
        np.cumsum(plan.query_lens, out=query_starts[1:])
        row_of_token = np.repeat(np.arange(len(plan.rows)), plan.query_lens)
        first_positions = plan.context_lens - plan.query_lens
        offsets = np.arange(plan.num_tokens) - query_starts[row_of_token]
        positions = first_positions[row_of_token] + offsets
        num_blocks = -(-int(plan.context_lens.max()) // self._block_size)
        tables = self._tables[plan.rows, :num_blocks]
        blocks = tables[row_of_token, positions // self._block_size].astype(np.int64)
        slots = blocks * self._block_size + positions % self._block_size
        decoding = torch.from_numpy(plan.rows[: plan.num_decode_rows].astype(np.int64))
        prefilled = torch.from_numpy(plan.prefill_token_ids.astype(np.int64))
        return ForwardBatch(
            token_ids_T=torch.cat([self._last_tokens[decoding], self._to_device(prefilled)]),
            positions_T=self._to_device(torch.from_numpy(positions)),
            slots_T=self._to_device(torch.from_numpy(slots)),
            block_tables_RM=self._to_device(torch.from_numpy(tables)),
            query_starts_E=self._to_device(torch.from_numpy(query_starts)),
            context_lens_R=self._to_device(torch.from_numpy(plan.context_lens)),
            query_starts=query_starts,
            context_lens=plan.context_lens,
            num_decode_rows=plan.num_decode_rows,
            block_size=self._block_size,
            logit_indices_L=self._to_device(torch.from_numpy(logit_indices)),
            kv=kv.layers,
        )

    def sampling_batch(self, plan: StepPlan) -> SamplingBatch:
        """The parameters of the step's draws; their random numbers depend on seed and position
        alone.
        """
        rows = plan.sample_rows
        temperature, top_k = self._temperature[rows], self._top_k[rows]
        top_p, min_p = self._top_p[rows], self._min_p[rows]
        truncates = (top_k > 0) | ((top_p > 0) & (top_p < 1)) | (min_p > 0)
        draws = uniforms(self._seeds[rows], plan.sample_positions)
        return SamplingBatch(
            uniforms_S=self._to_device(torch.from_numpy(draws)),
            temperature_S=self._to_device(torch.from_numpy(temperature)),
            top_k_S=self._to_device(torch.from_numpy(top_k)),
            top_p_S=self._to_device(torch.from_numpy(top_p)),
            min_p_S=self._to_device(torch.from_numpy(min_p)),
            mode_S=self._to_device(torch.from_numpy(self._mode[rows])),
            all_greedy=bool((temperature == 0).all()),
            any_greedy=bool((temperature == 0).any()),
            any_truncation=bool((truncates & (temperature > 0)).any()),
            any_logprobs=bool(self._wants_logprobs[rows].any()),
            top_n=int(self._top_n[rows].max(initial=0)),
        )

    def keep_last_tokens(self, plan: StepPlan, token_ids_S: torch.Tensor) -> None:
        """Sampled tokens stay on the device as the next step's inputs."""
        rows = torch.from_numpy(plan.sample_rows.astype(np.int64))
        self._last_tokens[self._to_device(rows)] = token_ids_S

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True)
