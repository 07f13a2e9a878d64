"""`check_integrity` finds every kind of contradiction between the parts of an engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from rollout import SamplingParams
from rollout.errors import IntegrityError
from rollout.scheduling.sequence import Phase, Sequence
from tests.inspected_engine import InspectedEngine, running_ahead
from tests.tiny_models import BLOCK_SIZE, drain, prompt_of, tiny_engine, tiny_model

PARAMS = SamplingParams(num_tokens_to_generate=30, temperature=0.0, return_log_probs=True)


@cache
def model() -> Any:
    return tiny_model()


def busy_engine(**config: Any) -> InspectedEngine:
    """Two requests run, over a cached prefix, and one waits."""
    engine = tiny_engine(
        model(), num_blocks=16, max_requests=2, enable_prefix_caching=True, **config
    )
    for length in (3 * BLOCK_SIZE, 5, 7):
        engine.add_request(prompt_of(length), PARAMS)
    for _ in range(3):
        engine.step()
    return engine


def running(engine: InspectedEngine, index: int = 0) -> Sequence:
    return list(engine.scheduler.running)[index]


def waiting(engine: InspectedEngine) -> Sequence:
    (sequence,) = engine.scheduler.waiting
    return sequence


def blocks(engine: InspectedEngine) -> Any:
    return engine.scheduler.kv_cache_manager


def record(engine: InspectedEngine) -> Any:
    return engine._outputs._unfinished[running(engine).request_id]


def _count_user(engine: InspectedEngine) -> None:
    blocks(engine)._num_users[running(engine).table.blocks[0]] += 1


def _lose_block(engine: InspectedEngine) -> None:
    blocks(engine).free_blocks.pop()


def _free_twice(engine: InspectedEngine) -> None:
    blocks(engine).free_blocks.append(blocks(engine).free_blocks[0])


def _free_used(engine: InspectedEngine) -> None:
    blocks(engine).free_blocks[0] = running(engine).table.blocks[0]


def _name_unknown_block(engine: InspectedEngine) -> None:
    running(engine).table.blocks.append(99)


def _share_row(engine: InspectedEngine) -> None:
    running(engine).table.row = running(engine, 1).table.row


def _lose_row(engine: InspectedEngine) -> None:
    blocks(engine)._free_rows.append(3)


def _queue_running(engine: InspectedEngine) -> None:
    engine.scheduler.waiting.add(running(engine))


def _lose_request(engine: InspectedEngine) -> None:
    engine.scheduler.waiting.remove(waiting(engine))


def _run_unknown(engine: InspectedEngine) -> None:
    del engine.scheduler.requests[running(engine).request_id]


def _lose_record(engine: InspectedEngine) -> None:
    del engine._outputs._unfinished[running(engine).request_id]


def _end_unended(engine: InspectedEngine) -> None:
    engine._outputs._ended[running(engine).request_id] = record(engine).record


def _change_phase(engine: InspectedEngine) -> None:
    running(engine).phase = Phase.FINISHED


def _change_phase_of_waiting(engine: InspectedEngine) -> None:
    waiting(engine).phase = Phase.RUNNING


def _change_order(engine: InspectedEngine) -> None:
    engine.scheduler.running._sequences.reverse()


def _wait_with_row(engine: InspectedEngine) -> None:
    waiting(engine).table.row = 1


def _wait_with_kv(engine: InspectedEngine) -> None:
    waiting(engine).kv_spans.append(1, 0)


def _wait_in_flight(engine: InspectedEngine) -> None:
    waiting(engine).num_in_flight = 1


def _shorten_table(engine: InspectedEngine) -> None:
    running(engine).table.blocks.pop()


def _fly(engine: InspectedEngine) -> None:
    running(engine).num_in_flight += 1


def _forget_kv_version(engine: InspectedEngine) -> None:
    sequence = running(engine)
    sequence.kv_spans = sequence.kv_spans.slice(0, len(sequence.kv_spans) - 1)


def _add_kv_version(engine: InspectedEngine) -> None:
    running(engine).kv_spans.append(1, 0)


def _count_token(engine: InspectedEngine) -> None:
    running(engine).num_tokens += 1


def _add_policy_version(engine: InspectedEngine) -> None:
    record(engine).policy_spans.append(1, 0)


def _lose_log_prob(engine: InspectedEngine) -> None:
    record(engine).requested["log_probs"].pop()


def _count_entry(engine: InspectedEngine) -> None:
    blocks(engine).prefix_index.num_entries += 1


def _lose_predecessor(engine: InspectedEngine) -> None:
    index, first = blocks(engine).prefix_index, running(engine).table.blocks[0]
    index._remove_key(index._by_block[first])


def _mix_versions(engine: InspectedEngine) -> None:
    index, first = blocks(engine).prefix_index, running(engine).table.blocks[0]
    index._by_block[first].spans.append(1, 5)


def _unlist_unused(engine: InspectedEngine) -> None:
    blocks(engine).prefix_index.unused.num_blocks += 1


def _release_weights(engine: InspectedEngine) -> None:
    suspension: Any = engine._suspension
    suspension._to_restore.append("weights")


BROKEN: list[tuple[Callable[[InspectedEngine], None], str]] = [
    (_count_user, r"block \d+ counts 2 users, and 1 tables name it"),
    (_lose_block, r"blocks \[\d+\] are neither free nor in use"),
    (_free_twice, r"blocks \[\d+\] are free twice"),
    (_free_used, r"blocks \[\d+\] are free and in use"),
    (_name_unknown_block, r"tables name blocks \[99\], which are not in the pool"),
    (_share_row, r"rows \[2\] are held by two requests"),
    (_lose_row, "2 rows are held and 1 are free, of 2"),
    (_queue_running, r"requests \[0\] wait in the queue and have rows"),
    (_lose_request, r"requests \[2\] neither wait in the queue nor have rows"),
    (_run_unknown, r"requests \[0\] wait or have rows and are not the scheduler's"),
    (_lose_record, r"requests \[0\] are in only one of scheduler and records"),
    (_end_unended, r"requests \[0\] have ended and have not"),
    (_change_phase, "request 0 has a row in phase finished"),
    (_change_phase_of_waiting, "request 2 waits in the queue in phase running"),
    (_change_order, "the running requests are not in order"),
    (_wait_with_row, "request 2 waits in the queue and holds blocks or a row"),
    (_wait_with_kv, "request 2 waits in the queue and has computed tokens"),
    (_wait_in_flight, "request 2 waits in the queue and is in flight"),
    (_shorten_table, r"request 0 has 26 computed tokens, 32 writable positions, and blocks for 24"),
    (_fly, "request 0 is in 0 steps in flight, not as counted"),
    (_forget_kv_version, "request 0 has 26 computed tokens and 25 versions"),
    (_add_kv_version, "request 0 has more versions or tokens committed than planned"),
    (_count_token, "request 0 counts 28 tokens and has 27"),
    (_add_policy_version, "request 0 has 24 prompt tokens, 3 generated ones, and 28 policy"),
    (_lose_log_prob, "request 0 has columns of another length than its tokens"),
    (_count_entry, "3 blocks can be found, and 4 are counted"),
    (_lose_predecessor, r"block \d+ can be found without block \d+ before it"),
    (_mix_versions, "a block with KV of two versions is in the prefix index"),
    (_unlist_unused, "the list of unused blocks is inconsistent"),
    (_release_weights, r"the engine runs, and \['weights'\] are released"),
]


@pytest.mark.parametrize(("break_it", "message"), BROKEN, ids=[each.__name__ for each, _ in BROKEN])
def test_check_integrity_names_what_is_violated(
    break_it: Callable[[InspectedEngine], None], message: str
) -> None:
    engine = busy_engine()
    engine.check_integrity()
    break_it(engine)
    with pytest.raises(IntegrityError, match=f"the engine is inconsistent: .*{message}"):
        engine.check_integrity()


def test_check_integrity_lists_all_violations_at_once() -> None:
    engine = busy_engine()
    _lose_block(engine)
    _wait_in_flight(engine)
    with pytest.raises(IntegrityError, match=r"is in flight; .* neither free nor in use"):
        engine.check_integrity()


def test_check_integrity_reports_a_step_in_flight_unless_may_be_in_flight() -> None:
    engine = busy_engine(change_backend=running_ahead)
    assert engine.num_steps_in_flight
    engine.check_integrity(may_be_in_flight=True)
    with pytest.raises(IntegrityError, match="1 steps are in flight"):
        engine.check_integrity()
    engine.pause()
    engine.check_integrity()
    engine.unpause()
    drain(engine)
    engine.check_integrity()
