"""The checksum of each weight, which all engines of a server have in common."""

from __future__ import annotations

from rollout.serve.errors import ApiError
from rollout.serve.llm import ServedLLM


async def weight_checksums(llm: ServedLLM) -> dict[str, str]:
    """Ask all engines for their weights' checksums, page by page. Returns checksums by weight name.

    Raises ApiError if engines differ, if there is no engine, or if an update came meanwhile.
    """
    found: dict[str, str] = {}
    versions: set[int] = set()
    num_weights = 1
    while len(found) < num_weights:
        pages = await llm.weight_checksums(len(found))
        if not pages:
            raise ApiError(503, "no engine is there to compute checksums")
        (first, page), *others = pages.items()
        for rank, other in others:
            if other != page:
                raise ApiError(500, f"engines {first} and {rank} serve different weights")
        found |= page.checksums
        versions.add(page.version)
        num_weights = page.num_weights
    if len(versions) > 1:
        raise ApiError(409, f"weights of the versions {sorted(versions)} were served meanwhile")
    return found
