"""BatchBuilder: inputs of rows that decode step after step, and of rows that change."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollout import SamplingParams
from rollout.backends.step_tensors import HostArray, StepInputs
from rollout.step.plan import NewRow, StepPlan
from rollout.step.seeds import uniforms
from rollout.worker.batch_builder import BatchBuilder

BLOCK_SIZE = 4


def ints(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


def builder() -> BatchBuilder:
    """Row r has block 10 r first, then 10 r + 1, and so on."""
    made = BatchBuilder(num_rows=3, max_blocks=4, block_size=BLOCK_SIZE)
    for row in (1, 2, 3):
        made.build(prefill(row, num_tokens=3, temperature=0.5 * row))
    return made


def prefill(row: int, *, num_tokens: int, temperature: float) -> StepPlan:
    params = SamplingParams(temperature=temperature)
    return StepPlan(
        step_id=0,
        weights_version=0,
        rows=ints(row),
        query_lens=ints(num_tokens),
        context_lens=ints(num_tokens),
        prefill_token_ids=ints(*range(num_tokens)),
        new_rows=(NewRow(row=row, sampling_params=params, seed=row, num_prompt=num_tokens),),
        table_rows=ints(row, row, row, row),
        table_indices=ints(0, 1, 2, 3),
        table_blocks=ints(*range(10 * row, 10 * row + 4)),
        sample_sources=ints(num_tokens - 1),
        sample_rows=ints(row),
        sample_positions=ints(num_tokens),
    )


def decode(rows: list[int], context_lens: list[int]) -> StepPlan:
    return StepPlan(
        step_id=0,
        weights_version=0,
        num_decode_rows=len(rows),
        rows=ints(*rows),
        query_lens=ints(*[1] * len(rows)),
        context_lens=ints(*context_lens),
        sample_sources=ints(*range(len(rows))),
        sample_rows=ints(*rows),
        sample_positions=ints(*context_lens),
    )


def temperatures(inputs: StepInputs[HostArray]) -> list[float]:
    return inputs.layout.temperature_S.tolist()


def test_build_gives_decoding_rows_new_positions_and_random_numbers() -> None:
    made, layouts = builder(), set()
    for step in range(9):
        lens = [4 + step, 6 + step]
        inputs = made.build(decode([1, 3], lens))
        layouts.add(id(inputs.layout))
        positions = [length - 1 for length in lens]
        blocks = [10 + positions[0] // BLOCK_SIZE, 30 + positions[1] // BLOCK_SIZE]
        places = [position % BLOCK_SIZE for position in positions]
        slots = [block * BLOCK_SIZE + at for block, at in zip(blocks, places, strict=True)]
        assert inputs.positions_T.tolist() == positions
        assert inputs.slots_T.tolist() == slots
        expected = uniforms(np.array([1, 3], dtype=np.uint64), ints(*lens))
        assert inputs.uniforms_S.tolist() == expected.tolist()
    assert len(layouts) == 1


def test_build_gathers_rows_again_when_they_change() -> None:
    made = builder()
    for rows in ([1, 2], [1], [1, 2], [2, 1], [1, 2, 3]):
        inputs = made.build(decode(rows, [4] * len(rows)))
        assert temperatures(inputs) == [0.5 * row for row in rows]
        assert inputs.layout.input_rows_T.tolist() == rows


def test_build_uses_the_sampling_params_of_a_rows_new_request() -> None:
    made = builder()
    made.build(decode([1, 2], [4, 4]))
    made.build(prefill(2, num_tokens=5, temperature=0.0))
    inputs = made.build(decode([1, 2], [5, 6]))
    assert temperatures(inputs) == [0.5, 0.0]
    assert inputs.layout.flags.any_greedy


def test_build_lists_the_tokens_of_a_prompt_beside_decoding_rows() -> None:
    made = builder()
    made.build(decode([1], [4]))
    alone = prefill(2, num_tokens=2, temperature=1.0)
    mixed = StepPlan(
        step_id=0,
        weights_version=0,
        num_decode_rows=1,
        rows=ints(1, 2),
        query_lens=ints(1, 2),
        context_lens=ints(5, 2),
        prefill_token_ids=ints(7, 8),
        new_rows=alone.new_rows,
        sample_sources=ints(0, 2),
        sample_rows=ints(1, 2),
        sample_positions=ints(5, 2),
    )
    inputs = made.build(mixed)
    assert not inputs.layout.only_decodes
    assert inputs.layout.token_ids_T.tolist() == [0, 7, 8]
    assert inputs.layout.input_rows_T.tolist() == [1, 0, 0]
    assert inputs.positions_T.tolist() == [4, 0, 1]
    assert inputs.slots_T.tolist() == [11 * BLOCK_SIZE, 20 * BLOCK_SIZE, 20 * BLOCK_SIZE + 1]
