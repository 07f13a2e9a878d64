"""Contract of Collectives over real processes: sums, gathers, deadlines and aborts."""

from __future__ import annotations

import zlib
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollout.errors import LockstepError
from rollout.parallel.collectives import ONE_RANK, CollectiveAbortedError, Collectives
from tests.parallel.ranks import KINDS, ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
SHAPES = ((), (1, 896), (3, 5, 7))
# More than a slot of shared memory takes at once.
LARGE = (torch.float32, (1_100_001,))
CASES = [*product(DTYPES, SHAPES), LARGE] * 2  # twice, so that memory is used again


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return numbers of many magnitudes, different on each rank."""
    generator = torch.Generator().manual_seed(rank)
    drawn = torch.empty(shape).normal_(generator=generator)
    return drawn.mul_(1000 if dtype is torch.int64 else 1).to(dtype)


def _bits(x: Tensor) -> int:
    return zlib.crc32(x.contiguous().view(-1).view(torch.uint8).numpy())


def all_cases(collectives: Collectives, pipe: Connection | None = None) -> list[int]:
    """Run sums and gathers of every dtype and shape; return the bits of the sums."""
    results = []
    for dtype, shape in CASES:
        expected = torch.stack([values(rank, shape, dtype) for rank in range(collectives.size)])
        own = expected[collectives.rank].clone()
        gathered = collectives.all_gather(own)
        assert collectives.all_reduce_(own) is own
        assert torch.equal(gathered, expected)
        exact = expected.to(torch.float64).sum(0)
        tolerance = 2e-2 if dtype.itemsize == 2 else 1e-5
        torch.testing.assert_close(own.double(), exact, rtol=tolerance, atol=tolerance)
        results.append(_bits(own))
    return results


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_get_the_sum_and_the_parts_with_the_same_bits(
    kind: str, size: int, tmp_path: Path
) -> None:
    with ranks(kind, tmp_path, all_cases, size=size) as (own, followers):
        mine = all_cases(own)
        for follower in followers:
            assert follower.pipe.recv() == mine


def test_one_rank_sums_to_its_own_values() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert ONE_RANK.all_reduce_(x) is x
    assert torch.equal(ONE_RANK.all_gather(x), x[None])


def half_types_are_rounded_once(collectives: Collectives, pipe: Connection | None = None) -> float:
    # 1 + 2^-8 + 2^-8: in bfloat16, rounding after each term gives 1.
    x = torch.tensor([1.0 if collectives.rank == 0 else 2.0**-8], dtype=torch.bfloat16)
    return collectives.all_reduce_(x).item()


@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_half_types_are_rounded_once(kind: str, tmp_path: Path) -> None:
    with ranks(kind, tmp_path, half_types_are_rounded_once, size=3) as (own, _):
        assert half_types_are_rounded_once(own) == 1.0 + 2.0**-7


def sum_when_told(collectives: Collectives, pipe: Connection) -> float:
    pipe.recv()
    return collectives.all_reduce_(torch.ones(1)).item()


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_rank_is_named_at_the_deadline(kind: str, tmp_path: Path) -> None:
    with (
        ranks(kind, tmp_path, sum_when_told, timeout_s=0.5) as (own, _),
        pytest.raises(LockstepError, match=r"within 0\.5 s"),
    ):
        own.all_reduce_(torch.ones(1))


def abort_then_sum(collectives: Collectives, pipe: Connection) -> str | float:
    pipe.recv()
    collectives.abort()
    pipe.send("aborted")
    pipe.recv()
    collectives.reset()
    return collectives.all_reduce_(torch.ones(1)).item()


def test_abort_raises_in_waiting_ranks_and_the_group_can_be_used_again(
    tmp_path: Path,
) -> None:
    with ranks("shared", tmp_path, abort_then_sum) as (own, [follower]):
        follower.pipe.send("abort")
        with pytest.raises(CollectiveAbortedError):
            own.all_reduce_(torch.ones(1))
        assert follower.pipe.recv() == "aborted"
        own.reset()
        follower.pipe.send("reset")
        assert own.all_reduce_(torch.ones(1)).item() == 2.0
        assert follower.pipe.recv() == 2.0


def test_a_torch_distributed_group_fails_after_an_abort(tmp_path: Path) -> None:
    with ranks("gloo", tmp_path, sum_when_told) as (own, _):
        own.abort()
        with pytest.raises(CollectiveAbortedError):
            own.all_reduce_(torch.ones(1))
        with pytest.raises(LockstepError, match="create a new engine"):
            own.reset()


def test_a_waiting_rank_calls_check(tmp_path: Path) -> None:
    class LostError(Exception):
        pass

    def check() -> None:
        raise LostError

    with ranks("shared", tmp_path, sum_when_told) as (own, _):
        own._check = check  # type: ignore[attr-defined]
        with pytest.raises(LostError):
            own.all_reduce_(torch.ones(1))
