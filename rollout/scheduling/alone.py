"""A step of one request and no other: how a request is found that makes steps fail."""

from __future__ import annotations

from rollout.scheduling.context import Context
from rollout.scheduling.plan_builder import PlanBuilder
from rollout.scheduling.sequence import Phase, Sequence


def plan_alone(
    context: Context, sequence: Sequence, builder: PlanBuilder, max_tokens: int
) -> tuple[list[Sequence], list[Sequence]]:
    """Plan a step of `sequence`, whatever its place in the queue, with no plan in flight.

    It takes no hit and forks nobody. If others hold what it needs, they are queued again.
    Returns (those admitted, those evicted).
    """
    admitted = [sequence] if sequence.phase is Phase.WAITING else []
    evicted: list[Sequence] = []
    span = sequence.num_computed, sequence.num_tokens
    has_row = not admitted or context.blocks.num_free_rows > 0
    if not has_row or context.blocks.reserve(sequence.blocks, *span) is None:
        evicted = context.requeue(s for s in context.active if s is not sequence)
        context.blocks.reserve(sequence.blocks, *span)
    if admitted:
        context.activate(sequence)
    if sequence.is_decoding:
        builder.add_decode(sequence)
    else:
        builder.add_prefill(sequence, min(sequence.num_uncomputed, max_tokens))
    return admitted, evicted
