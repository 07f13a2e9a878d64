"""RoutingRecord: rows follow the cache in the order of results, while steps are planned ahead."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollout.blocks.routing_record import RoutingRecord
from rollout.step.plan import EMPTY

SIZE = 2  # of a block


def record_of(num_experts: int = 8) -> RoutingRecord:
    return RoutingRecord(
        num_blocks=6, block_size=SIZE, num_layers=2, top_k=1, num_experts=num_experts
    )


def rows(*ids: int) -> NDArray[np.int16]:
    """A row of two layers for each id."""
    return np.array([[[i], [i + 1]] for i in ids], dtype=np.int16)


def blocks(*ids: int) -> NDArray[np.int32]:
    return np.array(ids, dtype=np.int32)


def step(record: RoutingRecord, slots: list[int], *ids: int) -> None:
    record.launch(EMPTY, EMPTY)
    record.commit(np.array(slots), rows(*ids))


def test_rows_are_read_in_the_order_of_the_requests_blocks() -> None:
    record = record_of()
    step(record, [10, 11, 4], 1, 2, 3)  # block 5, then block 2
    assert np.array_equal(record.read([5, 2], 3), rows(1, 2, 3))
    assert np.array_equal(record.read([5, 2], 1), rows(1))
    assert record.read([5, 2], 0).shape == (0, 2, 1)


def test_ids_beyond_a_byte_are_kept() -> None:
    record = record_of(num_experts=1000)
    step(record, [2], 998)
    assert np.array_equal(record.read([1], 1), rows(998))


def test_a_block_that_is_copied_takes_its_rows_along() -> None:
    record = record_of()
    step(record, [2, 3], 1, 2)
    record.launch(blocks(1), blocks(4))
    record.commit(np.array([9, 3]), rows(7, 5))  # each goes on in a block of its own
    assert np.array_equal(record.read([4], 2), rows(1, 7))
    assert np.array_equal(record.read([1], 2), rows(1, 5))


def test_read_takes_rows_of_a_copy_in_flight_from_its_source() -> None:
    """The parent's step, which wrote to the shared block, is not even committed at its launch."""
    record = record_of()
    record.launch(EMPTY, EMPTY)
    record.launch(blocks(1), blocks(4))
    record.launch(blocks(4), blocks(5))
    record.commit(np.array([2]), rows(1))
    assert np.array_equal(record.read([4], 1), rows(1))
    assert np.array_equal(record.read([5], 1), rows(1))


def test_kept_rows_are_not_mixed_with_rows_of_the_next_request() -> None:
    record = record_of()
    record.launch(EMPTY, EMPTY)
    record.launch(EMPTY, EMPTY)  # it writes to the blocks of a request that is ended by the first
    record.commit(np.array([2, 3]), rows(1, 2))
    record.keep(request_id=7, blocks=[1], num_positions=2)
    record.commit(np.array([2, 3]), rows(5, 6))
    assert np.array_equal(record.take(7), rows(1, 2))
    assert record.take(7) is None


def test_steps_that_failed_leave_no_copy() -> None:
    record = record_of()
    step(record, [2, 3], 1, 2)
    step(record, [8, 9], 3, 4)
    record.launch(blocks(1), blocks(4))
    assert np.array_equal(record.read([4], 2), rows(1, 2))
    record.abandon()
    assert np.array_equal(record.read([4], 2), rows(3, 4))
    step(record, [6], 9)
    assert np.array_equal(record.read([3], 1), rows(9))
