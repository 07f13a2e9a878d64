"""follow: the main loop of a rank that does what rank 0 says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rollout.engine.lead_muscle import digest, joined
from rollout.engine.muscle import Muscle
from rollout.errors import LockstepError, WeightUpdateError
from rollout.models.lora import LoraAdapter
from rollout.parallel.channel import FollowerChannel
from rollout.parallel.collectives import Collectives
from rollout.parallel.shared_tensors import Place, SharedTensors
from rollout.runner.staged_weights import StagedWeights
from rollout.step.output import StepOutput
from rollout.step.plan import StepPlan

Verbs = Mapping[str, Callable[..., Any]]


def follow(
    muscle: Muscle, collectives: Collectives, channel: FollowerChannel, staging: FollowerChannel
) -> None:
    """Do each order of rank 0 and answer it, until rank 0 ends. Orders to stage weights are done in
    a thread of their own, beside steps.

    What an order raises is its answer; the others, which may wait in a sum, are told first.
    """
    staged: dict[int, StagedWeights] = {}
    steps = _Steps(muscle)
    verbs: Verbs = {
        "launch": steps.launch,
        "reset": partial(_reset, steps, collectives),
        "commit_weights": lambda key, version: muscle.commit_weights(staged[key], version),
        "undo_commit": lambda key: _undo(muscle, staged[key]),
        "release_weights": lambda discard: muscle.release_weights(discard=discard),
        "num_resident_bytes": lambda of_weights: muscle.num_resident_bytes(of_weights=of_weights),
        "fingerprint_share": lambda: muscle.weights.fingerprint_share(),
        **{name: getattr(muscle, name) for name in _PLAIN_VERBS},
    }
    stager = _Stager(muscle, staging, staged)
    staging_verbs: Verbs = {
        "stage": stager.stage,
        "drop": lambda key: staged.pop(key, None) and None,
    }
    thread = threading.Thread(
        target=_serve, args=(staging, staging_verbs), name="weight-staging", daemon=True
    )
    thread.start()
    _serve(channel, verbs, on_error=collectives.abort)


_PLAIN_VERBS = (
    *("after_resume", "offload_kv", "onload_kv", "discard_kv", "release_kv", "restore_kv"),
    *("set_version", "restore_weights", "memory_use"),
)


def _serve(
    channel: FollowerChannel, verbs: Verbs, on_error: Callable[[], object] = lambda: None
) -> None:
    """Answer orders until rank 0 is gone."""
    while True:
        try:
            verb, arguments = channel.order()
        except LockstepError:
            return
        try:
            answer = verbs[verb](*arguments)
        except Exception as error:  # whatever it is, it is the order's answer
            on_error()
            answer = error
        try:
            channel.answer(answer)
        except LockstepError:
            return


class _Steps:
    """Launches plans; at most two are outstanding, as at rank 0."""

    def __init__(self, muscle: Muscle) -> None:
        self._muscle = muscle
        self._in_flight: list[Callable[[], StepOutput]] = []

    def launch(self, plan: StepPlan) -> int | None:
        """Launch it. Returns the digest of its result where that is there already; where steps run
        ahead, rank 0 must not wait for what this rank has drawn."""
        if len(self._in_flight) == 2:
            self._in_flight.pop(0)()
        fetch = self._muscle.launch(plan)
        if not self._muscle.overlaps:
            return digest(fetch())
        self._in_flight.append(fetch)
        return None

    def forget(self) -> None:
        """Rank 0 has given up what is in flight."""
        self._in_flight.clear()


class _Stager:
    def __init__(
        self, muscle: Muscle, channel: FollowerChannel, staged: dict[int, StagedWeights]
    ) -> None:
        self._muscle, self._channel, self._staged = muscle, channel, staged

    def stage(
        self,
        key: int,
        address: str,
        places: Mapping[str, Place],
        shell: LoraAdapter | None,
        source_checksum: str,
    ) -> Any:
        """Stage this rank's part of the tensors there. Returns the vote: its share of the
        fingerprints."""
        tensors = joined(SharedTensors(address, places), shell)
        self._staged[key] = self._muscle.stage_weights(tensors, self._check, source_checksum)
        return self._staged[key].share

    def _check(self) -> None:
        # Rank 0 waits for the vote, and says nothing before unless it drops the update.
        if self._channel.has_order:
            raise WeightUpdateError("the staging of these weights was cancelled")


def _reset(steps: _Steps, collectives: Collectives) -> None:
    steps.forget()
    collectives.reset()


def _undo(muscle: Muscle, staged: StagedWeights) -> None:
    if staged.is_spent:
        muscle.weights.undo(staged)
