"""Merges the expert ids that several segments of a request recorded for its tokens.

Used by `rollout.requests.record`, `trainer_hooks.collate` and `trainer_hooks.losses.routing_forms`.

Shape letters: P positions, L layers with experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

UNKNOWN = -1  # in place of the expert ids that were not recorded


def first_known(parts: Iterable[torch.Tensor | None], num_positions: int) -> torch.Tensor | None:
    """Merge several recordings of the same positions into one routing [P, L, K].

    Row p of each part belongs to position p. A part may have fewer or more rows than
    `num_positions`. Each result row comes from the first part that recorded the position. Rows that
    no part recorded are -1. Returns None if all parts are None.
    """
    # The first recording counts, because the next token was sampled from that pass.
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
    """Return which rows have no UNKNOWN expert. The last two dimensions of `routing` are [L, K]."""
    return (routing >= 0).flatten(-2).all(dim=-1)
