"""Merges the expert ids that several segments of a request recorded for its tokens.

Used by `rollout.requests.record`, `trainer_hooks.collate` and `trainer_hooks.losses.routing_forms`.

Shape letters: P positions, L layers with experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

UNKNOWN = -1  # stands for the expert ids of a row without a record


def first_known(parts: Iterable[torch.Tensor | None], num_positions: int) -> torch.Tensor | None:
    """Return one routing [P, L, K] from several parts that recorded the same positions.

    Row p of a part belongs to position p; a part may have fewer rows, or more. The result has the
    row of the first part that knows the position, even if the position was computed again later:
    the next token was sampled from that first pass. Rows that no part knows are -1.
    Returns None if all parts are None.
    """
    known = [part for part in parts if part is not None]
    if not known:
        return None
    dtype = torch.promote_types(known[0].dtype, torch.int16)  # -1 must fit
    merged_PLK = torch.full((num_positions, *known[0].shape[1:]), UNKNOWN, dtype=dtype)
    for part_PLK in reversed(known):
        part_PLK = part_PLK[:num_positions]
        is_known_P = is_known(part_PLK)
        merged_PLK[: len(part_PLK)][is_known_P] = part_PLK[is_known_P].to(dtype)
    return merged_PLK


def is_known(routing: torch.Tensor) -> torch.Tensor:
    """Return which rows, the last two dimensions [L, K], have no UNKNOWN expert."""
    return (routing >= 0).flatten(-2).all(dim=-1)
