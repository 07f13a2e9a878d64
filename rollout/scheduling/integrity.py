"""Checks the invariants of a scheduler's queue, rows and KV blocks.

`rollout.scheduling.scheduler` calls it in `violations`, for `Engine.check_integrity`. It takes
O(requests + blocks) time, so it runs in tests and when a bug is suspected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise

from rollout.blocks.kv_cache_manager import KVCacheManager
from rollout.scheduling.planned_step import PlannedStep
from rollout.scheduling.sequence import Phase, Sequence


def find_violations(
    requests: Mapping[int, Sequence],
    waiting: Collection[Sequence],
    running: Collection[Sequence],
    in_flight: Iterable[PlannedStep],
    kv: KVCacheManager,
) -> list[str]:
    """Return the violated invariants, one sentence each. Changes nothing."""
    planned = [sequence for step in in_flight for sequence in step.sequences()]
    # Ended sequences keep row and blocks while a step in flight uses them.
    holders = list({id(s): s for s in (*running, *planned) if s.table.row}.values())
    users = Counter(block for sequence in holders for block in sequence.table.blocks)
    return [
        *_of_phases(requests, waiting, running),
        *_of_waiting(waiting),
        *_of_rows(holders, kv),
        *_of_tables(running, Counter(map(id, planned)), kv),
        *_of_blocks(users, kv),
        *_of_index(running, users, kv),
    ]


def _of_phases(
    requests: Mapping[int, Sequence], waiting: Collection[Sequence], running: Collection[Sequence]
) -> Iterator[str]:
    queued, active = {s.request_id for s in waiting}, {s.request_id for s in running}
    if both := sorted(queued & active):
        yield f"requests {both} wait in the queue and have rows"
    if len(queued) + len(active) != len(waiting) + len(running):
        yield "a request is in the queue, or has a row, twice"
    if lost := sorted(requests.keys() - queued - active):
        yield f"requests {lost} neither wait in the queue nor have rows"
    if unknown := sorted((queued | active) - requests.keys()):
        yield f"requests {unknown} wait or have rows and are not the scheduler's"
    for sequence in running:
        if sequence.phase not in (Phase.RUNNING, Phase.PAUSED):
            yield f"request {sequence.request_id} has a row in phase {sequence.phase.value}"
    orders = [sequence.order for sequence in running]
    if orders != sorted(orders):
        yield "the running requests are not in order"


def _of_waiting(waiting: Iterable[Sequence]) -> Iterator[str]:
    for sequence in waiting:
        name = f"request {sequence.request_id}"
        if sequence.phase is not Phase.WAITING:
            yield f"{name} waits in the queue in phase {sequence.phase.value}"
        if sequence.table.blocks or sequence.table.row:
            yield f"{name} waits in the queue and holds blocks or a row"
        if sequence.num_computed or len(sequence.kv_spans):
            yield f"{name} waits in the queue and has computed tokens"
        if sequence.num_in_flight:
            yield f"{name} waits in the queue and is in flight"


def _of_rows(holders: Collection[Sequence], kv: KVCacheManager) -> Iterator[str]:
    rows = Counter(sequence.table.row for sequence in holders)
    if shared := sorted(row for row, count in rows.items() if count > 1):
        yield f"rows {shared} are held by two requests"
    if len(rows) + kv.num_free_rows != kv.num_rows:
        yield f"{len(rows)} rows are held and {kv.num_free_rows} are free, of {kv.num_rows}"


def _of_tables(
    running: Iterable[Sequence], num_planned: Mapping[int, int], kv: KVCacheManager
) -> Iterator[str]:
    for sequence in running:
        name = f"request {sequence.request_id}"
        num_slots = len(sequence.table.blocks) * kv.block_size
        if num_slots < max(sequence.num_computed, sequence.writable_end):
            yield (
                f"{name} has {sequence.num_computed} computed tokens, {sequence.writable_end} "
                f"writable positions, and blocks for {num_slots}"
            )
        if sequence.num_in_flight != num_planned.get(id(sequence), 0):
            yield f"{name} is in {num_planned.get(id(sequence), 0)} steps in flight, not as counted"
        num_versions, num_known = len(sequence.kv_spans), len(sequence.tokens)
        if num_versions > sequence.num_computed or num_known > sequence.num_tokens:
            yield f"{name} has more versions or tokens committed than planned"
        if not sequence.num_in_flight and num_versions != sequence.num_computed:
            yield f"{name} has {sequence.num_computed} computed tokens and {num_versions} versions"
        if not sequence.num_in_flight and num_known != sequence.num_tokens:
            yield f"{name} counts {sequence.num_tokens} tokens and has {num_known}"


def _of_blocks(users: Mapping[int, int], kv: KVCacheManager) -> Iterator[str]:
    blocks = range(1, kv.num_blocks + 1)
    for block in blocks:
        if kv.num_users(block) != users.get(block, 0):
            yield (
                f"block {block} counts {kv.num_users(block)} users, and {users.get(block, 0)} "
                "tables name it"
            )
    if unknown := sorted(users.keys() - set(blocks)):
        yield f"tables name blocks {unknown}, which are not in the pool"
    without_user = Counter([*kv.free_blocks, *kv.prefix_index.unused])
    if twice := sorted(block for block, count in without_user.items() if count > 1):
        yield f"blocks {twice} are free twice"
    if both := sorted(without_user.keys() & users.keys()):
        yield f"blocks {both} are free and in use"
    if lost := sorted(set(blocks) - without_user.keys() - users.keys()):
        yield f"blocks {lost} are neither free nor in use"
    if kv.num_used_blocks + kv.num_free_blocks != kv.num_blocks or (
        kv.num_used_blocks != len(users)
    ):
        yield (
            f"{kv.num_free_blocks} blocks are free or cached and {len(users)} in use, of "
            f"{kv.num_blocks}"
        )


def _of_index(
    running: Iterable[Sequence], users: Mapping[int, int], kv: KVCacheManager
) -> Iterator[str]:
    """Yield violations of the prefix index: its counts, its unused blocks, its chains. If a block
    can be found, its predecessors are in the index and are released after it."""
    index = kv.prefix_index
    entries, unused = index.entries(), list(index.unused)
    by_block = {entry.block: entry for entry in entries}
    if len(by_block) != len(entries):
        yield "a block has two keys in the prefix index"
    if missing := sorted(b for b in by_block if not users.get(b) and b not in index.unused):
        yield f"blocks {missing} are in the prefix index, free, and not listed as unused"
    if len(unused) != index.unused.num_blocks or (unused and not index.keeps_unused):
        yield "the list of unused blocks is inconsistent"
    current = {entry.block for entry in entries if index.is_current(entry)}
    if len(current) != index.num_entries:
        yield f"{len(current)} blocks can be found, and {index.num_entries} are counted"
    if dropped := sorted(current.intersection(unused[: index.num_dropped])):
        yield f"blocks {dropped} were dropped and can be found"
    if not kv.reuse_across_versions and any(len(list(e.spans)) != 1 for e in entries):
        yield "a block with KV of two versions is in the prefix index"
    ranks = {block: rank for rank, block in enumerate(unused)}
    for sequence in running:
        cached = sequence.table.blocks[: sequence.table.num_cached]
        for first, second in pairwise(cached):
            is_younger = second in current and (
                first not in by_block
                or by_block[first].oldest_version < by_block[second].oldest_version
            )
            if is_younger or ranks.get(first, len(ranks)) < ranks.get(second, -1):
                yield f"block {second} can be found without block {first} before it"
