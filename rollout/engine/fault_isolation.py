"""FaultIsolation: finds the request that makes forward passes fail, so that all others go on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollout.step.plan import EMPTY, StepPlan

# Failed steps of a request, with too few tokens between them, until it runs alone.
_FAILURES_UNTIL_ALONE = 2
# One that its prefill samples and one by a decode step: either may be what fails.
_TOKENS_TO_CLEAR = 2


@dataclass(slots=True)
class _Suspect:
    num_failures: int = 0
    num_tokens_left: int = _TOKENS_TO_CLEAR


class FaultIsolation:
    """The requests of failed steps. Each is a suspect until it has sampled two tokens since.

    A suspect whose step fails again runs alone until it is cleared. If its step fails even then,
    the fault is the request's own.
    """

    def __init__(self) -> None:
        self._suspects: dict[int, _Suspect] = {}

    def next_alone(self) -> int | None:
        """The request that must run alone in the next step, None if all may run together."""
        for request_id, suspect in self._suspects.items():
            if suspect.num_failures >= _FAILURES_UNTIL_ALONE:
                return request_id
        return None

    def suspects(self) -> list[int]:
        """The requests of failed steps that are not cleared."""
        return list(self._suspects)

    def add_failure(self, request_ids: Sequence[int]) -> int | None:
        """A step of these requests failed. Returns the one whose own fault it is, if any."""
        for request_id in request_ids:
            suspect = self._suspects.setdefault(request_id, _Suspect())
            suspect.num_failures += 1
            suspect.num_tokens_left = _TOKENS_TO_CLEAR
        if len(request_ids) != 1:
            return None
        (request_id,) = request_ids
        ran_alone_again = self._suspects[request_id].num_failures >= _FAILURES_UNTIL_ALONE
        return request_id if ran_alone_again else None

    def add_tokens(self, request_ids: Iterable[int]) -> None:
        """These requests have sampled one token each."""
        for request_id in request_ids if self._suspects else ():
            suspect = self._suspects.get(request_id)
            if suspect is not None:
                suspect.num_tokens_left -= 1
                if not suspect.num_tokens_left:
                    del self._suspects[request_id]

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        self._suspects.pop(request_id, None)


def scratch_plans(weights_version: int) -> tuple[StepPlan, StepPlan]:
    """A prefill and a decode step of one token in the scratch row, which no request has part in."""
    zero, one = np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.int32)
    prefill = StepPlan(
        step_id=0,
        weights_version=weights_version,
        rows=zero,
        query_lens=one,
        context_lens=one,
        prefill_token_ids=zero,
        sample_sources=zero,
        sample_rows=zero,
        sample_positions=one,
    )
    return prefill, replace(prefill, num_decode_rows=1, prefill_token_ids=EMPTY)


def drop_frames(error: BaseException) -> None:
    """Forget the frames of `error` and of its causes: they hold the tensors of the failed step."""
    chain: list[BaseException | None] = [error]
    seen: set[int] = set()
    while chain:
        link = chain.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            chain += [link.__cause__, link.__context__]
