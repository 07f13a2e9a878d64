"""WeightTransfer: loads a trainer's weights into the engines, from broadcasts or checkpoints.

`rollout.serve.control.state` makes it for the control routes of vLLM and SGLang. Nothing else in a
server updates the engines' weights or labels their versions.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence

from torch import Tensor

from rollout.control.reports import WeightUpdateReport
from rollout.control.state import EngineState
from rollout.errors import EngineStateError, WeightUpdateError
from rollout.serve.control.announcement import ModelTensors, TensorMetadata, tensor_metadata
from rollout.serve.control.checkpoints import CheckpointRoots
from rollout.serve.control.operations import Operations
from rollout.serve.control.pausing import Pausing
from rollout.serve.control.process_group import BroadcastGroup, Chunk, Packing, join_group
from rollout.serve.llm import ServedLLM
from rollout.serve.state import VersionLabels
from rollout.weights.update import NamedTensors

_MAX_WORLD_SIZE = 2**16


class OpenUpdate:
    """The tensors of one update, kept on the host. Each tensor is announced first and then
    received.

    label: the latest label that came with tensors.
    """

    def __init__(self, model: ModelTensors | None, max_bytes: int) -> None:
        """Begin without tensors. `max_bytes` limits the sum of all tensors. If `model` is None,
        tensors are not checked against a model."""
        self._model, self._max_bytes = model, max_bytes
        self.label: str | None = None
        self._num_bytes = 0
        self._tensors: dict[str, Tensor | None] = {}  # None: announced, not yet received

    def announce(self, tensors: Sequence[TensorMetadata]) -> None:
        """Check and record tensors that will be received. Raises WeightUpdateError for a wrong
        tensor. Then the caller must end the update."""
        for tensor in tensors:
            if self._model is not None:
                self._model.check(tensor)
            if tensor.name in self._tensors:
                raise WeightUpdateError(f"{tensor.name!r} comes twice in the update; send it once")
            self._num_bytes += tensor.num_bytes
            if self._num_bytes > self._max_bytes:
                raise WeightUpdateError(
                    f"with {tensor.name!r} the update has {self._num_bytes} bytes, more than the "
                    f"{self._max_bytes} that its model can have"
                )
            self._tensors[tensor.name] = None

    def add(self, named_tensors: Iterable[tuple[str, Tensor]], label: str | None) -> None:
        """Store received tensors. `label` replaces the earlier label unless it is None."""
        self._tensors.update(named_tensors)
        self.label = self.label if label is None else label

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors. Raises WeightUpdateError if there are none or some were not
        received."""
        received = {name: tensor for name, tensor in self._tensors.items() if tensor is not None}
        if len(received) < len(self._tensors) or not received:
            raise WeightUpdateError(
                f"the update cannot end: {len(received)} of {len(self._tensors)} announced tensors "
                "were received"
            )
        return received


class WeightTransfer:
    """Holds the trainers' process groups and the open update, and commits updates to the engines.

    An update begins, receives tensors in any number of calls, and is then committed. An error ends
    the update and drops its tensors. Then the engines keep their weights.

    model: the model's tensors, or None if the LLM has no model directory.
    loaded_directory: the checkpoint that was loaded last, at first the model's directory.
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
        """Start without groups. `timeout_s` is the longest time in seconds for joining a group, and
        for the broadcasts of one call. Raises ModelError if the model's config.json is bad."""
        self._llm, self._labels, self._pausing = llm, labels, pausing
        self._operations = operations
        self._roots, self._timeout_s = roots, timeout_s
        directory = llm.model_directory
        self.model = None if directory is None else ModelTensors.of_directory(directory)
        self._max_bytes = _half_of_memory() if self.model is None else self.model.max_bytes
        self._groups: dict[str, BroadcastGroup] = {}
        self._open_update: OpenUpdate | None = None
        self._commit_lock = asyncio.Lock()
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
        """Join a trainer's process group. Replaces an earlier group of the same name and ends an
        open update. Raises WeightUpdateError for an impossible rank or address, or if other ranks
        do not join in time."""
        self.roll_back()
        await _require_rank_and_host(host, port, rank, world_size)
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
        self.leave(name)  # another call may have joined a group of this name meanwhile
        self._groups[name] = group

    def leave(self, name: str) -> bool:
        """Leave a group. Return False if no group has that name."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()
        return group is not None

    def close(self) -> None:
        """Leave all groups and drop the open update."""
        self.roll_back()
        for name in list(self._groups):
            self.leave(name)

    # ---- updates

    @property
    def is_open(self) -> bool:
        """Return whether an update has begun and not ended."""
        return self._open_update is not None

    def begin(self) -> None:
        """Begin an update. If another one is open, end that update and raise WeightUpdateError."""
        if self._open_update is not None:
            self.roll_back()
            raise WeightUpdateError(
                "an update was open already; it is rolled back, and another one can begin"
            )
        self._open_update = OpenUpdate(self.model, self._max_bytes)

    def roll_back(self) -> None:
        """End the open update, if there is one, and drop its tensors."""
        self._open_update = None

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
        """Receive tensors that the trainer broadcasts now, and add them to the open update.

        names, dtypes, shapes: the tensors in order. Empty lists stand for the tensors of the
            previous call.
        packing: how the tensors are split into broadcasts. None takes the group's packing.
        label: label of the version to which the tensors belong.

        Raises WeightUpdateError, which ends the update. If a tensor does not fit the model, its
        broadcasts are still received and dropped, so that the group stays usable.
        """
        group = self._groups.get(group_name)
        if group is None:
            self.roll_back()
            raise WeightUpdateError(f"no group {group_name!r} was joined; join it first")
        update = self._open_update
        try:
            tensors = self._announced(group, names, dtypes, shapes)
            chunks = (packing or group.packing)(tensors)
            try:
                update = _require_open(update)
                update.announce(tensors)
            except WeightUpdateError:
                self._discard(group, chunks)
                raise
            pairs = await group.receive(chunks, self._timeout_s)
            if self._open_update is not update:
                raise WeightUpdateError("the update was rolled back while its tensors came")
            update.add(pairs, label)
        except BaseException:  # a caller that disconnects does not send the missing tensors
            if self._open_update is update:
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
                self.leave(group.name)  # the size of the broadcasts is unknown
                raise
        elif not group.announced:
            raise WeightUpdateError("the update lists no tensors; name each tensor that it sends")
        return group.announced

    def _discard(self, group: BroadcastGroup, chunks: Sequence[Chunk]) -> None:
        """Receive and drop broadcasts that belong to no update. Leave the group if they are too
        large."""
        if sum(tensor.num_bytes for chunk in chunks for tensor in chunk) <= self._max_bytes:
            group.discard(chunks, self._timeout_s)
        else:
            self.leave(group.name)

    async def finish(self, label: str | None = None) -> WeightUpdateReport:
        """End the update, let the engines load its tensors, and return their report. If `label` is
        None, the version gets the label that came with the tensors. Raises WeightUpdateError if no
        update is open, a tensor is missing, or the engines refuse the tensors."""
        update = _require_open(self._open_update)
        self.roll_back()
        return await self.commit(update.tensors(), update.label if label is None else label)

    # ---- versions

    @property
    def label(self) -> str:
        """Return the label of the served weights."""
        return self._labels.of(self._llm.weights_version)

    async def relabel(self, label: str) -> None:
        """Increase the version of the served weights by 1 and label it. Earlier tokens keep their
        version."""
        async with self._commit_lock:
            version = (await self._llm.stats()).weights_version + 1
            self._labels.set(version, label)
            await self._pausing.set_generation_epoch(version)

    async def load(self, directory: str, label: str | None) -> WeightUpdateReport:
        """Commit the weights of the checkpoint in `directory`, and return the engines' report.
        `label` is as in `commit`. Raises WeightUpdateError if the directory is not allowed or the
        engines refuse the weights."""
        checkpoint = await asyncio.to_thread(self._roots.open, directory)

        async def load() -> WeightUpdateReport:  # runs to its end even if the caller is cancelled
            report = await self._commit(checkpoint.items(), label)
            self.loaded_directory = directory
            return report

        return await self._operations.run(load())

    async def commit(self, named_tensors: NamedTensors, label: str | None) -> WeightUpdateReport:
        """Load weights into all engines or none, as the next version, and return the report. If
        `label` is None, the label is the version's number. The update continues if its caller is
        cancelled. Raises WeightUpdateError if the engines refuse the weights."""
        return await self._operations.run(self._commit(named_tensors, label))

    async def _commit(self, named_tensors: NamedTensors, label: str | None) -> WeightUpdateReport:
        async with self._commit_lock:
            stats = await self._llm.stats()
            version = stats.weights_version + 1
            # Set before the first token of this version. A failed update may have left a label.
            self._labels.set(version, str(version) if label is None else label)
            try:
                report = await self._llm.update_weights(
                    named_tensors, version, in_flight=stats.state is EngineState.RUNNING
                )
            except EngineStateError as error:  # the engines refuse weights in this state
                raise WeightUpdateError(str(error)) from error
            await self._pausing.run_after_update()
            return report


async def _require_rank_and_host(host: str, port: int, rank: int, world_size: int) -> None:
    if not 1 <= rank < world_size <= _MAX_WORLD_SIZE:
        raise WeightUpdateError(
            f"rank_offset={rank} with world_size={world_size} is not a rank of a group; give "
            "rank_offset in [1, world_size), as the trainer is rank 0, and world_size of at most "
            f"{_MAX_WORLD_SIZE}"
        )
    try:
        if not host:
            raise ValueError("it is empty")
        await asyncio.get_running_loop().getaddrinfo(host, port)
    except (OSError, ValueError) as error:  # ValueError: NUL, or a name that is too long
        raise WeightUpdateError(
            f"master_address={host!r:.100} has no address ({error}); give the trainer's host"
        ) from error


def _half_of_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _require_open(update: OpenUpdate | None) -> OpenUpdate:
    if update is None:
        raise WeightUpdateError("no update is open; start one. An error ends an open update")
    return update
