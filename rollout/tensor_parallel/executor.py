"""TensorParallelExecutor: runs each call on all ranks of an engine, from rank 0."""

from __future__ import annotations

import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from itertools import chain
from typing import Any, NoReturn

from torch import Tensor

from rollout.child_process import ChildProcess
from rollout.errors import LockstepError
from rollout.parallel.channel import LeadChannel, raise_first
from rollout.parallel.collectives import CollectiveAbortedError, Collectives
from rollout.parallel.shared_tensors import SharedTensors, write_shared
from rollout.step.output import StepOutput
from rollout.step.plan import StepPlan
from rollout.telemetry import RankUse
from rollout.weights.fingerprints import checksum_of_shares, checksums_of_shares
from rollout.weights.lora import LoraAdapter
from rollout.weights.served import ServedWeights
from rollout.weights.staged import StagedWeights
from rollout.weights.update import NamedTensors, blaming, next_version, streamed
from rollout.worker.kv_cache import BlockIds, KVCache
from rollout.worker.model_runner import ModelRunner
from rollout.worker.worker import MemoryUse, Worker

_BASE = "base: "  # before the names of the weights that an adapter belongs to


class TensorParallelExecutor(Worker):
    """Each verb is sent, then done here, then answered by all ranks, before it returns.

    A verb that a rank refuses is refused: its error is raised, after all ranks have answered, and a
    failed forward pass may be tried again. A rank that is lost, or does not answer in time, ends
    the group: LockstepError, then and at every later verb.

    Steps and memory go through one channel, in the thread that steps. Staging has a channel of its
    own, in whatever thread it is asked for.
    """

    def __init__(
        self,
        runner: ModelRunner,
        kv: KVCache,
        weights: ServedWeights,
        *,
        collectives: Collectives,
        channel: LeadChannel,
        staging: LeadChannel,
        followers: Sequence[ChildProcess],
    ) -> None:
        """`followers`: the other ranks, in their order. They end with this."""
        super().__init__(runner, kv, weights, collectives)
        self._channel, self._staging = channel, staging
        self._followers = followers
        weakref.finalize(self, end_processes, followers)  # if nobody calls `close`
        self._staging_turn = threading.Lock()
        self._num_staged, self._is_closed = 0, False
        self._to_drop: deque[int] = deque()

    @property
    def pids(self) -> list[int]:
        """The processes of the other ranks, in their order."""
        return [follower.pid for follower in self._followers]

    # ---- steps

    def launch(self, plan: StepPlan) -> Callable[[], StepOutput]:
        order = self._send("launch", plan)
        try:
            fetch = super().launch(plan)
        except BaseException as error:
            self._realign(error)

        def wait() -> StepOutput:
            try:
                output = fetch()
                answers = self._answers(order)
                raise_first(answers)
            except BaseException as error:
                self._realign(error)
            self._compare(plan, output, answers)
            return output

        return wait

    def _compare(self, plan: StepPlan, output: StepOutput, answers: Sequence[Any]) -> None:
        """Raise LockstepError if another rank has drawn other tokens. Those that run ahead do not
        say what they drew."""
        own = digest(output)
        for rank, theirs in enumerate(answers, start=1):
            if theirs not in (None, own):
                raise self._lose(
                    f"rank {rank} drew other tokens than rank 0 in step {plan.step_id}"
                )

    def _realign(self, error: BaseException) -> NoReturn:
        """Have all ranks wait for the next order after a verb that has failed somewhere. Raises
        what it failed of: `error`, or what another rank raised before rank 0 was told."""
        if isinstance(error, LockstepError):
            raise self._lose(str(error)) from error
        self._collectives.abort()
        answers = self._answers()
        try:
            self._collectives.reset()
        except LockstepError as lost:
            raise self._lose(str(lost)) from error
        self._send("reset")
        raise_first(self._answers())
        if isinstance(error, CollectiveAbortedError):
            raise_first(answers)
        raise error

    def warm_up(self) -> int:
        num_captured: int = self._together("warm_up", super().warm_up)[0]
        return num_captured

    def after_suspend(self) -> dict[str, int]:
        kept: list[dict[str, int]] = self._together("after_suspend", super().after_suspend)
        return {name: sum(rank[name] for rank in kept) for name in kept[0]}

    def after_resume(self) -> int:
        num_lost: int = self._together("after_resume", super().after_resume)[0]
        return num_lost

    # ---- the KV cache

    def offload_kv(self, block_ids: BlockIds) -> int:
        blocks = [int(block) for block in block_ids]
        return sum(self._together("offload_kv", lambda: self.kv.offload(blocks), blocks))

    def onload_kv(self) -> int:
        return sum(self._together("onload_kv", super().onload_kv))

    def discard_kv(self, block_ids: BlockIds) -> int:
        blocks = [int(block) for block in block_ids]
        return sum(self._together("discard_kv", lambda: self.kv.discard(blocks), blocks))

    def release_kv(self) -> int:
        return sum(self._together("release_kv", super().release_kv))

    def restore_kv(self) -> int:
        return sum(self._together("restore_kv", super().restore_kv))

    # ---- the weights

    def stage_weights(
        self, named_tensors: NamedTensors, check: Callable[[], None], source_checksum: str
    ) -> StagedWeights:
        """All ranks see the whole source, through shared memory, and each stages its part. The
        votes have what each has hashed, of which rank 0 makes the verdict.
        """
        self.weights.require_resident("stage an update")
        with self._staging_turn, self._shared(named_tensors) as (tensors, sent):
            self._num_staged += 1
            key = self._num_staged
            order = self._staging_order("stage", key, *sent, source_checksum)
            try:
                staged = super().stage_weights(tensors, check, source_checksum)
                answers = self._staging_answers(order)
                raise_first(answers)
                self.weights.accept(staged, [staged.share, *answers], source_checksum)
            except BaseException:
                # Also ends the staging of the others: nobody reads the weights after this.
                self._staging_answers(self._staging_order("drop", key))
                raise
        staged.elsewhere = _Elsewhere(key, self._drop)
        self._send_drops()
        return staged

    def _shared(
        self, named_tensors: NamedTensors
    ) -> AbstractContextManager[tuple[NamedTensors, tuple[Any, ...]]]:
        """See `in_shared_memory`."""
        return in_shared_memory(named_tensors)

    def _drop(self, key: int) -> None:
        """Have the others drop what they staged. Whatever thread frees the last reference."""
        self._to_drop.append(key)
        self._send_drops()

    def _send_drops(self) -> None:
        """Send them, unless another thread has the turn, which does so when it ends."""
        while self._to_drop and self._staging_turn.acquire(blocking=False):
            try:
                with suppress(LockstepError, IndexError):
                    self._staging.send("drop", self._to_drop.popleft())
            finally:
                self._staging_turn.release()

    def _staging_order(self, verb: str, *arguments: Any) -> int:
        try:
            return self._staging.send(verb, *arguments)
        except LockstepError as error:
            raise self._lose(str(error)) from error

    def _staging_answers(self, order: int) -> list[Any]:
        try:
            return self._staging.answers(order)
        except LockstepError as error:
            raise self._lose(str(error)) from error

    def commit_weights(self, staged: StagedWeights, version: int | None) -> int:
        """Committed by all ranks, or by none: those that have are made to take it back."""
        version = next_version(self.weights.version, version)
        key, before = staged.elsewhere.key, self.weights.version
        try:
            answers = self._together(
                "commit_weights", lambda: self.weights.commit(staged, version), key, version
            )
        except LockstepError:
            raise
        except BaseException:
            if self.weights.version != before:
                self.weights.undo(staged)
            self._together("undo_commit", lambda: None, key)
            raise
        return sum(answers)

    def set_version(self, version: int) -> None:
        self._together("set_version", lambda: self.weights.set_version(version), version)

    def weights_checksum(self) -> str:
        self.weights.require_resident("compute a checksum")
        self.weights.require_values("compute a checksum")
        shares = self._together("fingerprint_share", self.weights.fingerprint_share)
        return checksum_of_shares(shares)

    def weight_checksums(self, names: Sequence[str]) -> dict[str, str]:
        self.weights.require_resident("compute checksums")
        self.weights.require_values("compute checksums")
        own = lambda: self.weights.fingerprint_share(names)  # noqa: E731
        return checksums_of_shares(self._together("fingerprint_share", own, names))

    def release_weights(self, *, discard: bool) -> int:
        own = lambda: self.weights.release(discard=discard)  # noqa: E731
        return sum(self._together("release_weights", own, discard))

    def restore_weights(self) -> int:
        return sum(self._together("restore_weights", super().restore_weights))

    # ---- all of it

    def check_ranks(self) -> None:
        if self._is_closed:
            return
        try:
            self._channel.check()
        except LockstepError as error:
            raise self._lose(str(error)) from error

    def num_resident_bytes(self, *, of_weights: bool) -> int:
        own = lambda: Worker.num_resident_bytes(self, of_weights=of_weights)  # noqa: E731
        return sum(self._together("num_resident_bytes", own, of_weights))

    def memory_use(self) -> MemoryUse:
        uses: list[MemoryUse] = self._together("memory_use", super().memory_use)
        return sum(uses[1:], start=uses[0])

    def rank_uses(self) -> tuple[RankUse, ...]:
        """() once the engine is shut down: the others have ended."""
        return () if self._is_closed else (*self._together("rank_use", super().rank_use),)

    def close(self) -> None:
        self._channel.close()
        self._staging.close()
        self._is_closed = True
        end_processes(self._followers)
        super().close()
        self._collectives.close()

    # ---- orders and answers

    def _together(self, verb: str, own: Callable[[], Any], *arguments: Any) -> list[Any]:
        """Have all ranks do `verb`, and do it here by `own`. Returns what each has returned.

        Raises an error of this rank or else of another one, when all have answered.
        """
        order = self._send(verb, *arguments)
        try:
            mine = own()
            answers = self._answers(order)
            raise_first(answers)
        except BaseException as error:
            self._realign(error)
        return [mine, *answers]

    def _send(self, verb: str, *arguments: Any) -> int:
        try:
            return self._channel.send(verb, *arguments)
        except LockstepError as error:
            raise self._lose(str(error)) from error

    def _answers(self, order: int | None = None) -> list[Any]:
        try:
            return self._channel.answers(order)
        except LockstepError as error:
            raise self._lose(str(error)) from error

    def _lose(self, reason: str) -> LockstepError:
        """The group has ended: nobody waits for the others any more."""
        self._staging.lose(reason)
        error = self._channel.lose(reason)
        end_processes(self._followers)
        return error


def end_processes(children: Sequence[ChildProcess]) -> None:
    """Kill them: they have nothing to clean up, and one that is stopped hears nothing else."""
    for child in children:
        child.kill()
    for child in children:
        child.wait()


class _Elsewhere:
    """What the other ranks have staged under `key`; they drop it when this is freed."""

    def __init__(self, key: int, drop: Callable[[int], None]) -> None:
        self.key, self._drop = key, drop

    def __del__(self) -> None:
        self._drop(self.key)


@contextmanager
def in_shared_memory(named_tensors: NamedTensors) -> Iterator[tuple[NamedTensors, tuple[Any, ...]]]:
    """The tensors of a source in shared memory, and what tells the other ranks where they are.

    They are copied there, unless they lie in such memory already. Raises WeightUpdateError.
    """
    if isinstance(named_tensors, SharedTensors):
        yield named_tensors, (named_tensors.address, named_tensors.places, None)
        return
    adapter = named_tensors if isinstance(named_tensors, LoraAdapter) else None
    stream = streamed(named_tensors)
    try:
        with blaming("copying the weights for the other ranks"):
            tensors = write_shared(chain(stream, _base_of(adapter)))
        shell = None if adapter is None else replace(adapter, tensors={}, base=None)
        yield joined(tensors, shell), (tensors.address, tensors.places, shell)
    finally:
        stream.drain()  # other ranks of a trainer, which gather as well, must not wait


def read_along(named_tensors: NamedTensors) -> None:
    """Read a source as rank 0 does in `in_shared_memory`, which may be a collective, and keep
    nothing of it. Raises WeightUpdateError."""
    adapter = named_tensors if isinstance(named_tensors, LoraAdapter) else None
    stream = streamed(named_tensors)
    try:
        with blaming("reading the weights along with rank 0"):
            deque(chain(stream, _base_of(adapter)), maxlen=0)
    finally:
        stream.drain()


def _base_of(adapter: LoraAdapter | None) -> Iterator[tuple[str, Tensor]]:
    if adapter is not None and adapter.base is not None:
        for name, tensor in streamed(adapter.base):
            yield _BASE + name, tensor


def joined(shared: SharedTensors, shell: LoraAdapter | None) -> NamedTensors:
    """What the other ranks were told of: the tensors by name or, with `shell`, an adapter of
    them."""
    if shell is None:
        return shared
    base = {n.removeprefix(_BASE): t for n, t in shared.items() if n.startswith(_BASE)}
    own = {n: tensor for n, tensor in shared.items() if not n.startswith(_BASE)}
    return replace(shell, tensors=own, base=base or None)


def digest(output: StepOutput) -> int:
    """A number that differs where the drawn tokens do."""
    return zlib.crc32(output.samples.token_ids_S.tobytes())
