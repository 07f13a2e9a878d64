"""WeightTransfer: loads a trainer's weights into the engines, by broadcasts or from directories."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from rollout.control.reports import WeightUpdateReport
from rollout.control.state import EngineState
from rollout.errors import EngineStateError, WeightUpdateError
from rollout.serve.control.announcement import ModelTensors, TensorMetadata, tensor_metadata
from rollout.serve.control.checkpoints import CheckpointRoots
from rollout.serve.control.operations import Operations
from rollout.serve.control.pausing import Pausing
from rollout.serve.control.process_group import BroadcastGroup, Chunk, Packing, join_group
from rollout.serve.control.update_round import UpdateRound
from rollout.serve.labels import VersionLabels
from rollout.serve.llm import ServedLLM
from rollout.weights.update import NamedTensors

_MAX_WORLD_SIZE = 2**16


class WeightTransfer:
    """Owns the groups that trainers made, the one round of an update that may be open, and commits.

    A round begins, receives its tensors in any number of calls, and is committed as one update of
    the engines. Any error ends it: its tensors are dropped, the engines keep their weights, and
    another round may begin. A trainer that joins ends the round of the previous trainer.
    """

    def __init__(
        self,
        llm: ServedLLM,
        labels: VersionLabels,
        pausing: Pausing,
        operations: Operations,
        roots: CheckpointRoots,
        timeout_s: float,
    ) -> None:
        """timeout_s: how long joining a group, and the broadcasts of one call, may take."""
        self._llm, self._labels, self._pausing = llm, labels, pausing
        self._operations = operations
        self._roots, self._timeout_s = roots, timeout_s
        directory = llm.model_directory
        self.model = None if directory is None else ModelTensors.of_directory(directory)
        self._max_bytes = _half_of_memory() if self.model is None else self.model.max_bytes
        self._groups: dict[str, BroadcastGroup] = {}
        self._round: UpdateRound | None = None
        self._commit_lock = asyncio.Lock()
        # The checkpoint that was loaded last; at first the directory of the model.
        self.loaded_directory = directory

    # ---- groups

    async def join(
        self,
        name: str,
        *,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        packing: Packing,
        backend: str = "gloo",
    ) -> None:
        """Join a trainer's group, in place of an earlier one of that name. Raises
        WeightUpdateError at once for a rank or an address that cannot be, and after the time limit
        if the other ranks do not come.
        """
        self.roll_back()
        await _require_place(host, port, rank, world_size)
        self.leave(name)
        group = await join_group(
            host=host,
            port=port,
            rank=rank,
            world_size=world_size,
            name=name,
            packing=packing,
            backend=backend,
            timeout_s=self._timeout_s,
        )
        self.leave(name)  # one that was joined meanwhile
        self._groups[name] = group

    def leave(self, name: str) -> bool:
        """Leave a group. Returns False if no group has that name."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()
        return group is not None

    def close(self) -> None:
        """Leave all groups, and drop the open round."""
        self.roll_back()
        for name in list(self._groups):
            self.leave(name)

    # ---- rounds

    @property
    def is_open(self) -> bool:
        """Whether a round has begun and not ended."""
        return self._round is not None

    def begin(self) -> None:
        """Open a round. Raises WeightUpdateError, and ends the open one, if there is one."""
        if self._round is not None:
            self.roll_back()
            raise WeightUpdateError(
                "an update was open already; it is rolled back, and another one can begin"
            )
        self._round = UpdateRound(self.model, self._max_bytes)

    def roll_back(self) -> None:
        """End the open round, if there is one, and drop its tensors."""
        self._round = None

    async def receive(
        self,
        group_name: str,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        packing: Packing | None = None,
        label: str | None = None,
    ) -> None:
        """Receive tensors that the trainer broadcasts now, and keep them in the open round. Empty
        lists announce the tensors of the previous call. packing: None takes the group's. label:
        name of the version that the tensors belong to.

        A failure ends the round and raises WeightUpdateError, at once for a tensor that does not
        fit the model. Its broadcasts are received and dropped, so that the group stays usable.
        """
        group = self._groups.get(group_name)
        if group is None:
            self.roll_back()
            raise WeightUpdateError(f"no group {group_name!r} was joined; join it first")
        round_ = self._round
        try:
            tensors = self._announced(group, names, dtypes, shapes)
            chunks = (packing or group.packing)(tensors)
            try:
                round_ = _require_open(round_)
                round_.announce(tensors)
            except WeightUpdateError:
                self._discard(group, chunks)
                raise
            pairs = await group.receive(chunks, self._timeout_s)
            if self._round is not round_:
                raise WeightUpdateError("the update was rolled back while its tensors came")
            round_.add(pairs, label)
        except BaseException:  # a caller that goes away does not send the rest, either
            if self._round is round_:
                self.roll_back()
            raise

    def _announced(
        self,
        group: BroadcastGroup,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
    ) -> Sequence[TensorMetadata]:
        if names:
            try:
                group.announced = tensor_metadata(names, dtypes, shapes)
            except WeightUpdateError:
                self.leave(group.name)  # nobody knows what will be broadcast
                raise
        elif not group.announced:
            raise WeightUpdateError("no tensors were announced; name at least one")
        return group.announced

    def _discard(self, group: BroadcastGroup, chunks: Sequence[Chunk]) -> None:
        """Take broadcasts that do not belong to the update; leave the group if they are too
        large."""
        if sum(tensor.num_bytes for chunk in chunks for tensor in chunk) <= self._max_bytes:
            group.discard(chunks, self._timeout_s)
        else:
            self.leave(group.name)

    async def finish(self, label: str | None = None) -> WeightUpdateReport:
        """End the round: the engines take all its tensors, under `label` or the last one that came
        with them. Raises WeightUpdateError if they do not fit, or no round is open.
        """
        round_ = _require_open(self._round)
        self.roll_back()
        return await self.commit(round_.tensors(), round_.label if label is None else label)

    # ---- versions

    @property
    def label(self) -> str:
        """The clients' name of the weights that are served."""
        return self._labels.of(self._llm.weights_version)

    async def relabel(self, label: str) -> None:
        """Serve the same weights as the next version, which clients know by `label`. Tokens so far
        keep theirs.
        """
        async with self._commit_lock:
            version = (await self._llm.stats()).weights_version + 1
            self._labels.set(version, label)
            await self._pausing.set_generation_epoch(version)

    async def load(self, directory: str, label: str | None) -> WeightUpdateReport:
        """Commit the weights of a checkpoint. Raises WeightUpdateError."""
        checkpoint = await asyncio.to_thread(self._roots.open, directory)
        return await self._operations.run(self._load(directory, checkpoint.items(), label))

    async def _load(
        self, directory: str, named_tensors: NamedTensors, label: str | None
    ) -> WeightUpdateReport:
        report = await self._commit(named_tensors, label)
        self.loaded_directory = directory
        return report

    async def commit(self, named_tensors: NamedTensors, label: str | None) -> WeightUpdateReport:
        """Let all engines or none take these weights as the next version, which clients know by
        `label`; None: by its number. Goes on when its caller is cancelled.
        """
        return await self._operations.run(self._commit(named_tensors, label))

    async def _commit(self, named_tensors: NamedTensors, label: str | None) -> WeightUpdateReport:
        async with self._commit_lock:
            stats = await self._llm.stats()
            version = stats.weights_version + 1
            # Before the first token of this version, and in place of a failed update's label.
            self._labels.set(version, str(version) if label is None else label)
            try:
                report = await self._llm.update_weights(
                    named_tensors, version, in_flight=stats.state is EngineState.RUNNING
                )
            except EngineStateError as error:  # the engines cannot take weights in this state
                raise WeightUpdateError(str(error)) from error
            await self._pausing.weights_came()
            return report


async def _require_place(host: str, port: int, rank: int, world_size: int) -> None:
    """Raise WeightUpdateError unless `host` has an address and the ranks are those of a group."""
    if not 1 <= rank < world_size <= _MAX_WORLD_SIZE:
        raise WeightUpdateError(
            f"rank_offset={rank} with world_size={world_size} is no rank of a group: the trainer "
            f"is rank 0, the server one of the others, of at most {_MAX_WORLD_SIZE} in all"
        )
    try:
        if not host:
            raise ValueError("it is empty")
        await asyncio.get_running_loop().getaddrinfo(host, port)
    except (OSError, ValueError) as error:  # the second for NUL and names that are too long
        raise WeightUpdateError(
            f"master_address={host!r:.100} has no address ({error}); give the trainer's host"
        ) from error


def _half_of_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _require_open(round_: UpdateRound | None) -> UpdateRound:
    if round_ is None:
        raise WeightUpdateError("no update is open: it was not started, or a fault has ended it")
    return round_
