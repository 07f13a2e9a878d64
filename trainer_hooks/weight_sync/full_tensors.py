"""full_tensors: the part of a rank in gathering sharded weights."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from rollout.errors import WeightUpdateError
from rollout.models.plain_tensors import full_tensor, refusal
from rollout.runner.weight_update import NamedTensors, by_name


def full_tensors(named_parameters: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """Each weight whole, in the order of names: shards are gathered when their turn comes.

    A push gathers in the same order, so a rank without an engine takes part in the push of another
    with `for _ in full_tensors(policy): pass`, which holds one whole tensor at a time. The sources
    of all ranks have the same names. Raises WeightUpdateError naming what cannot be read.
    """
    tensors = by_name(named_parameters)
    for name in sorted(tensors):
        if reason := refusal(tensors[name]):
            raise WeightUpdateError(f"{name!r} {reason}")
        yield name, full_tensor(tensors[name])
