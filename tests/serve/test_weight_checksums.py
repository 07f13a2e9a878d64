"""weight_checksums: the checksums of all weights, joined from the engines' pages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rollout.control.reports import WeightChecksums
from rollout.serve.errors import ApiError
from rollout.serve.vllm.control import weight_checksums

ALL = {f"w{i}": f"{i:016x}" for i in range(5)}


class Engines:
    """Engines with pages of two weights. `versions`: the version of each page."""

    def __init__(
        self, engines: Sequence[Mapping[str, str]], versions: Sequence[int] = (1,) * 3
    ) -> None:
        self._engines, self._versions = engines, iter(versions)

    async def weight_checksums(self, start: int) -> dict[int, WeightChecksums]:
        version = next(self._versions)
        return {
            rank: WeightChecksums(
                checksums=dict(list(weights.items())[start : start + 2]),
                num_weights=len(weights),
                version=version,
            )
            for rank, weights in enumerate(self._engines)
        }


def asked(*engines: Mapping[str, str], versions: Sequence[int] = (1,) * 3) -> dict[str, str]:
    llm: Any = Engines(engines, versions)
    return asyncio.run(weight_checksums(llm))


def test_weight_checksums_join_all_pages() -> None:
    assert asked(ALL) == asked(ALL, ALL) == ALL


@pytest.mark.parametrize("name", ALL)
def test_weight_checksums_refuse_engines_that_differ(name: str) -> None:
    with pytest.raises(ApiError, match="engines 0 and 1 serve different weights") as fault:
        asked(ALL, {**ALL, name: "f" * 16})
    assert fault.value.status == 500


def test_weight_checksums_of_two_versions_are_not_mixed() -> None:
    with pytest.raises(ApiError, match=r"versions \[1, 2\]") as fault:
        asked(ALL, versions=(1, 1, 2))
    assert fault.value.status == 409


def test_weight_checksums_need_an_engine() -> None:
    with pytest.raises(ApiError, match="no engine") as fault:
        asked()
    assert fault.value.status == 503
