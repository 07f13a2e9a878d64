"""The routing of a request, by position: which experts computed its tokens.

Shape letters: P positions, L layers with experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

UNKNOWN = -1  # in place of an expert id: no record of this row


def first_known(parts: Iterable[torch.Tensor | None], num_positions: int) -> torch.Tensor | None:
    """Return one routing [P, L, K] of what several parts know of the same positions.

    Row p of a part is that of position p; a part may have fewer rows, or more. The result has the
    first known row of each position: the token after it was drawn from that pass, and its log-prob
    is kept, also if the position was computed again later. -1 where nobody knows. None if no part
    is there.
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
    """Return where the last two dimensions, layers and experts, are a whole row."""
    return (routing >= 0).flatten(-2).all(dim=-1)
