"""What a rank other than 0 does: the orders of rank 0, in a loop or one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rollout.errors import LockstepError, WeightUpdateError
from rollout.parallel.channel import FollowerChannel
from rollout.parallel.collectives import Collectives
from rollout.parallel.shared_tensors import Place, SharedTensors
from rollout.step.output import StepOutput
from rollout.step.plan import StepPlan
from rollout.tensor_parallel.executor import digest, joined
from rollout.weights.lora import LoraAdapter
from rollout.weights.staged import StagedWeights
from rollout.worker.loading import EngineSizes, LoadedModel, runner_of
from rollout.worker.worker import Worker

Verbs = Mapping[str, Callable[..., Any]]


def follow(
    worker: Worker, collectives: Collectives, channel: FollowerChannel, staging: FollowerChannel
) -> None:
    """Do each order of rank 0 and answer it, until rank 0 ends. Orders to stage weights are done in
    a thread of their own, beside steps.
    """
    staged: dict[int, StagedWeights] = {}
    verbs = verbs_of(worker, collectives, staged)
    staging_verbs = staging_verbs_of(worker, staging, staged)
    thread = threading.Thread(
        target=_serve, args=(staging, staging_verbs), name="weight-staging", daemon=True
    )
    thread.start()
    _serve(channel, verbs, on_error=collectives.abort)


def verbs_of(
    worker: Worker, collectives: Collectives, staged: Mapping[int, StagedWeights]
) -> Verbs:
    """What rank 0 may order of `worker`, but for staging. `staged`: by the keys of rank 0."""
    steps = _Steps(worker)
    return {
        "launch": steps.launch,
        "reset": partial(_reset, steps, collectives),
        "commit_weights": lambda key, version: worker.commit_weights(staged[key], version),
        "undo_commit": lambda key: _undo(worker, staged[key]),
        "release_weights": lambda discard: worker.release_weights(discard=discard),
        "num_resident_bytes": lambda of_weights: worker.num_resident_bytes(of_weights=of_weights),
        "fingerprint_share": lambda names=None: worker.weights.fingerprint_share(names),
        **{name: getattr(worker, name) for name in _PLAIN_VERBS},
    }


def staging_verbs_of(
    worker: Worker, channel: FollowerChannel, staged: dict[int, StagedWeights]
) -> Verbs:
    """What rank 0 may order of updates that are to come; they lie in `staged`."""
    return {
        "stage": _Stager(worker, channel, staged).stage,
        "drop": lambda key: staged.pop(key, None) and None,
    }


_PLAIN_VERBS = (
    *("after_resume", "offload_kv", "onload_kv", "discard_kv", "release_kv", "restore_kv"),
    *("set_version", "restore_weights", "memory_use", "rank_use", "warm_up", "after_suspend"),
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
            channel.answer(answer_to(verb, arguments, verbs, on_error))
        except LockstepError:
            return


def answer_to(
    verb: str, arguments: Sequence[Any], verbs: Verbs, on_error: Callable[[], object]
) -> Any:
    """Do an order. What it raises is its answer; the others, which may wait in a sum, are told
    first, by `on_error`.
    """
    try:
        return verbs[verb](*arguments)
    except Exception as error:
        on_error()
        return error


class _Steps:
    """Launches plans; at most two are outstanding, as at rank 0."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._in_flight: list[Callable[[], StepOutput]] = []

    def launch(self, plan: StepPlan) -> int | None:
        """Launch it. Returns the digest of its result where that is there already; where steps run
        ahead, rank 0 must not wait for what this rank has drawn."""
        if len(self._in_flight) == 2:
            self._in_flight.pop(0)()
        fetch = self._worker.launch(plan)
        if not self._worker.overlaps:
            return digest(fetch())
        self._in_flight.append(fetch)
        return None

    def forget(self) -> None:
        """Rank 0 has given up what is in flight."""
        self._in_flight.clear()


class _Stager:
    def __init__(
        self, worker: Worker, channel: FollowerChannel, staged: dict[int, StagedWeights]
    ) -> None:
        self._worker, self._channel, self._staged = worker, channel, staged

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
        self._staged[key] = self._worker.stage_weights(tensors, self._check, source_checksum)
        return self._staged[key].share

    def _check(self) -> None:
        # Rank 0 waits for the vote, and says nothing before unless it drops the update.
        if self._channel.has_order:
            raise WeightUpdateError("the staging of these weights was cancelled")


def _reset(steps: _Steps, collectives: Collectives) -> None:
    steps.forget()
    collectives.reset()


def _undo(worker: Worker, staged: StagedWeights) -> None:
    if staged.is_spent:
        worker.weights.undo(staged)


# ---- the start


def prepared_worker(
    channel: FollowerChannel, loaded: LoadedModel, timeout_s: float | None = None
) -> Worker:
    """Prepare the model and its memory as `prepare_ranks` of rank 0 says. Returns the worker.

    `timeout_s`: for each order. Raises what fails here, when rank 0 has been told.
    """
    answer_next(channel, lambda: _prepare(loaded), timeout_s=timeout_s)
    worker: Worker = answer_next(
        channel, lambda sizes: _begin(loaded, sizes), tells=False, timeout_s=timeout_s
    )
    return worker


def _prepare(loaded: LoadedModel) -> int:
    """Prepare the model. Returns the blocks that fit here."""
    loaded.model.prepare(loaded.backend)
    return loaded.sizes.num_blocks


def _begin(loaded: LoadedModel, sizes: EngineSizes) -> Worker:
    return Worker(*runner_of(loaded, sizes), loaded.weights, loaded.backend.collectives)


def answer_next(
    channel: FollowerChannel,
    work: Callable[..., Any],
    *,
    tells: bool = True,
    timeout_s: float | None = None,
) -> Any:
    """Do the next order, and answer it with what it gives if it `tells` that, or with its error,
    which is raised here, too."""
    _, arguments = channel.order(timeout_s)
    try:
        result = work(*arguments)
    except Exception as error:  # rank 0 waits for it
        channel.answer(error)
        raise
    channel.answer(result if tells else None)
    return result
