"""ServedWeights: the weights that an engine serves: their memory, values and version."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollout.backends.base import Backend
from rollout.backends.cpu.mapping import trim_heap
from rollout.backends.ops.fingerprint import hashed_dtype
from rollout.errors import EngineStateError, WeightUpdateError
from rollout.models.causal_lm import CausalLM
from rollout.weights.fingerprints import (
    PartHasher,
    SourceParts,
    WeightShare,
    checksum_of_shares,
    fetched,
    hashed_pieces,
    hashed_wholes,
    read_source,
    sum_of,
)
from rollout.weights.lora import LoraAdapter
from rollout.weights.lora_merge import (
    AdaptedWeights,
    adapt_given,
    adapt_served,
    check_targets,
    gathered,
)
from rollout.weights.memory import HostRoom, HostStage, WeightMemory
from rollout.weights.staged import (
    BackupKeeper,
    Exchange,
    Overwriting,
    PackedCopies,
    Replaced,
    Replacement,
    StagedWeights,
)
from rollout.weights.update import (
    HOST_COPIES,
    Fingerprint,
    Holder,
    NamedTensors,
    Piece,
    blaming,
    by_name,
    check_checksum,
    check_finite,
    checked_origins,
    checked_source,
    checksum_of,
    next_version,
    origins_of,
)

# Each half takes half a millisecond to or from a host, beside which starting a copy is nothing.
BUCKET_BYTES = 64 << 20


class ServedWeights:
    """The only writer of the model's weights and of their version.

    They lie in a WeightMemory; a weight that one packed product serves alone lies there packed, and
    in no other form. An update is staged first and then committed in place, so captured graphs stay
    valid. `has_values` is False while the bytes are not those of one set of weights: they were
    discarded, or an update could not be undone.

    Of ranks that share the model, each stages its parts of the whole update, and hashes them. Rank
    0 accepts it with the shares of all, which then commit it; those that did undo it if one failed.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: Backend,
        *,
        version: int,
        reject_non_finite: bool,
        fill: Callable[[], None] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Move the parameters of `model` into the backend's memory, before anything is packed.

        `fill` then writes the values of a model that has none yet; with None, its values are moved.
        `bucket_bytes`: of a device's memory, for an update beside the weights.
        """
        self._model, self._piece_bytes = model, bucket_bytes // 2
        self._hasher = PartHasher(backend.ops, model.spec.shard)
        self._memory = WeightMemory(model, backend, keeps_values=fill is None)
        self._reject_non_finite = reject_non_finite
        is_host = backend.device.type == "cpu"
        self._room = None if is_host else HostRoom(backend.create_host_arena)
        self._backups = BackupKeeper(model, self._memory, self._room)
        # Of the write that serves, which may not be the latest one: an undo goes back.
        self._num_writes = self._latest_write = 0
        self._bases: Mapping[str, Tensor] = {}  # of the weights that an adapter has changed
        self.version, self.has_values = version, True
        self.is_finite = True  # as far as it is known: an update's weights are looked at
        if fill is not None:
            fill()
        trim_heap()  # what drawing or moving the values has freed

    # ---- what may be done now

    def require_resident(self, what: str) -> None:
        """Raise EngineStateError while the weights' memory is released."""
        if not self.is_resident:
            raise EngineStateError(
                f"cannot {what}: the weights' memory is released; resume(only='weights') first"
            )

    def require_values(self, what: str) -> None:
        """Raise EngineStateError while the weights' values are missing."""
        if not self.has_values:
            raise EngineStateError(
                f"cannot {what}: the weights were discarded, or an update of them was cut off; "
                "commit a full update first"
            )

    def checksum(self) -> str:
        """Return a hash of names and bits of all weights, which is equal on every device.

        Raises EngineStateError while the weights are not there.
        """
        return checksum_of_shares([self.fingerprint_share()])

    @property
    def names(self) -> list[str]:
        """The Hugging Face names of all weights, sorted."""
        return sorted(self._model.weight_slots())

    def fingerprint_share(self, names: Sequence[str] | None = None) -> WeightShare:
        """Return what `checksum_of_shares` needs of this rank, or of these weights alone. Raises as
        `checksum` does."""
        self.require_resident("compute a checksum")
        self.require_values("compute a checksum")
        wanted = self._model.weight_slots() if names is None else names
        return WeightShare(pieces=self._hashed_served(wanted))

    def _hashed_served(
        self, names: Iterable[str], check: Callable[[], None] = lambda: None
    ) -> dict[Piece, Fingerprint]:
        """Return this rank's addend of the fingerprint of each of these weights that serve now.

        One weight at a time: what a slot reads may be a copy.
        """
        queued: dict[Piece, Tensor] = {}
        for name in names:
            check()
            slot = self._model.weight_slots()[name]
            queued[Piece(name, name)] = self._hasher.of_kept(slot, slot.read(), slot.dtype)
        return fetched(queued)

    def data_ptrs(self) -> dict[str, int]:
        """Return the address of each weight by its Hugging Face name."""
        return {name: slot.address for name, slot in self._model.weight_slots().items()}

    # ---- versions and updates

    def set_version(self, version: int) -> None:
        """Serve the same weights as `version`. Raises WeightUpdateError unless it is above the
        current one, EngineStateError while the values are missing.
        """
        self.require_values("set the generation epoch")
        self.version = next_version(self.version, version)

    @torch.no_grad()
    def stage(
        self,
        named_tensors: NamedTensors,
        check: Callable[[], None] = lambda: None,
        source_checksum: str = "",
    ) -> StagedWeights:
        """Check names, shapes, dtypes and values, pack, and back up what is not to be exchanged;
        the model is not changed.

        A rank of a group takes its parts, and leaves the checks of values to `accept`. The host
        waits for each device once. Sharded tensors are gathered, in the order of their names, which
        is a collective of all ranks that hold a part. `check` is called before each tensor, and may
        raise to end staging. `source_checksum` is what `checksum_of` must give for the tensors as
        they arrive; "" skips that check. Raises WeightUpdateError naming the tensor at fault and
        what was expected of it, EngineStateError while the memory is released, and for an adapter
        without a base while the values are missing.
        """
        self.require_resident("stage an update")
        start, num_writes = time.perf_counter(), self._num_writes
        holder = self._holder(named_tensors, hashes_own=bool(source_checksum))
        with holder.released_on_error():
            source, adapted = self._read(
                named_tensors, check, holder, wants_own=bool(source_checksum)
            )
            slots = self._model.weight_slots()
            origins = origins_of(slots, source.share.pieces)
            is_alone = self._model.spec.shard.size == 1
            checksum, is_finite = "", True
            if is_alone:
                checksum, is_finite = self._accepted([source.share], source_checksum)
            # Those that lack here are served already.
            given = {p: source.pieces[p] for p in origins.values() if p in source.pieces}
            chosen = {piece.weight: values for piece, values in given.items()}
            by_address = {slots[n].address: given[p] for n, p in origins.items() if p in given}
            return StagedWeights(
                packed=self._pack(by_address, check),
                replacement=self._replacement(chosen, holder),
                num_writes=num_writes,
                num_bytes=sum(v.numel() * slots[n].dtype.itemsize for n, v in chosen.items()),
                bases=adapted.bases,
                follows_served=adapted.follows_served,
                share=source.share,
                checksum=checksum,
                is_finite=is_finite,
                started_at=start,
                seconds=time.perf_counter() - start,
            )

    def _holder(self, named_tensors: NamedTensors, *, hashes_own: bool) -> Holder:
        """What holds the values of an update that do not last: for a device, in the room that its
        weights have on the host."""
        if self._room is None:
            return HOST_COPIES
        table = self._model.weight_table()
        slots = table.slots
        if isinstance(named_tensors, LoraAdapter) and named_tensors.base is None:
            adapted = {f"{module}.weight" for module in named_tensors.pairs()} | self._bases.keys()
            slots = {name: slot for name, slot in slots.items() if name in adapted}
        hash_own = partial(self._hasher.of_whole, turn=0) if hashes_own else None
        return HostStage(self._room, table, slots, self._piece_bytes, hash_own)

    def _replacement(self, chosen: Mapping[str, Tensor], holder: Holder) -> Replacement:
        """What is to replace the weights that are not repacked, by their new values."""
        slots = self._model.weight_slots()
        tensors = {name: values for name, values in chosen.items() if not slots[name].is_repacked}
        if isinstance(holder, HostStage):
            if holder.has_any_of(tensors):
                device = next(self._model.parameters()).device
                return Exchange(slots, holder, holder.settled(tensors), self._piece_bytes, device)
            holder.release()
        # What serves now, which an update that was committed meanwhile may have brought.
        return Overwriting(slots, tensors, self._backups, self._num_writes, self._piece_bytes)

    def accept(
        self, staged: StagedWeights, shares: Sequence[WeightShare], source_checksum: str = ""
    ) -> None:
        """Check the values of an update that all ranks have staged, by the shares of all in order.

        `source_checksum` is that of `stage`. Raises WeightUpdateError as `stage` does where a
        process has the model alone, which has no use for this.
        """
        staged.checksum, staged.is_finite = self._accepted(shares, source_checksum)

    def _accepted(self, shares: Sequence[WeightShare], source_checksum: str) -> tuple[str, bool]:
        """Return the checksum of all weights, and whether all are finite, once the sums of `shares`
        have passed all checks."""
        total = sum_of(shares)
        if source_checksum:
            check_checksum(total.own, source_checksum)
        if self._reject_non_finite:
            check_finite(total.adapter, total.adapter_dtypes)
        origins = checked_origins(
            self._model.weight_slots(), total.pieces, reject_non_finite=self._reject_non_finite
        )
        served = {name: total.pieces[origin] for name, origin in origins.items()}
        return checksum_of(served), not any(num_bad for _, num_bad in served.values())

    @torch.no_grad()
    def commit(self, staged: StagedWeights, version: int | None) -> int:
        """Write a staged update in place and serve it as `version`; None means the next one.

        Returns the number of bytes written. If anything is raised, weights and version are those
        from before: the commit takes an exchange back, or restores the backup made while staging,
        or one made now if another update was written since. Raises WeightUpdateError,
        EngineStateError while the memory is released.
        """
        self.require_resident("commit an update")
        new_version = next_version(self.version, version)
        if staged.is_spent:
            raise WeightUpdateError(
                "these staged weights were committed before; stage the update again"
            )
        before, had_values = self.version, self.has_values
        if staged.follows_served:
            self.require_values("commit an adapter")
            if staged.num_writes != self._num_writes:
                raise WeightUpdateError(
                    "other weights were committed after this adapter was staged; stage it again"
                )
        staged.replacement.prepare(self._num_writes)
        packed = PackedCopies(self._model, staged.packed)
        try:
            staged.is_spent = True
            self.has_values = False  # stays so if the restore fails, too
            staged.replacement.replace()
            with blaming("taking the packed copies"):
                self._model.refresh(staged.packed)
            staged.replaced = Replaced(
                num_writes=self._latest_write + 1,
                num_writes_before=self._num_writes,
                packed=packed,
                version=before,
                had_values=had_values,
                was_finite=self.is_finite,
                bases=self._bases,
            )
            self.version, self.has_values, self._bases = new_version, True, staged.bases
            self.is_finite = staged.is_finite
            self._num_writes = self._latest_write = self._latest_write + 1
        except BaseException:
            staged.replacement.restore()
            packed.restore()
            self.version, self.has_values = before, had_values
            staged.is_spent = False
            raise
        return staged.num_bytes

    @torch.no_grad()
    def undo(self, staged: StagedWeights) -> None:
        """Take back `commit(staged)`, since which no other update was written: another rank failed.

        It can be committed again.
        """
        replaced = staged.replaced
        assert replaced is not None, "undo of an update that was not committed"
        assert self._num_writes == replaced.num_writes, "another update was written since"
        self.has_values = False  # stays so if the restore fails
        staged.replacement.restore()
        replaced.packed.restore()
        self.version, self.has_values = replaced.version, replaced.had_values
        self.is_finite, self._bases = replaced.was_finite, replaced.bases
        self._num_writes = replaced.num_writes_before
        staged.is_spent, staged.replaced = False, None

    def _read(
        self,
        named_tensors: NamedTensors,
        check: Callable[[], None],
        holder: Holder,
        *,
        wants_own: bool,
    ) -> tuple[SourceParts, AdaptedWeights]:
        """Return what this rank keeps of a source, and what an adapter makes of it."""
        if isinstance(named_tensors, LoraAdapter):
            return self._adapted(named_tensors, check, holder, wants_own=wants_own)
        given, table = by_name(named_tensors, holder), self._model.weight_table()
        source = read_source(given, table, self._hasher, check, holder, wants_own=wants_own)
        return source, AdaptedWeights()

    def _adapted(
        self, adapter: LoraAdapter, check: Callable[[], None], holder: Holder, *, wants_own: bool
    ) -> tuple[SourceParts, AdaptedWeights]:
        """Return what this rank keeps of all weights under `adapter`, and which they are."""
        table = self._model.weight_table()
        check_targets(adapter.pairs(), self._model)
        with blaming("gathering the adapter"):
            adapter = replace(adapter, tensors=gathered(adapter.tensors))
        of_adapter = hashed_wholes(adapter.tensors, self._hasher, check)
        if adapter.base is None:
            self.require_values("stage an adapter")
            adapted = adapt_served(adapter.pairs(), table.slots, self._bases, check, holder)
        else:
            base = checked_source(adapter.base, table, holder)
            adapted = adapt_given(adapter.pairs(), table, base, check, holder)
        pieces = {Piece(name, name): kept for name, kept in adapted.tensors.items()}
        unchanged = table.slots.keys() - adapted.tensors.keys() if adapted.follows_served else set()
        share = WeightShare(
            pieces=hashed_pieces(pieces, table, self._hasher, check)
            | self._hashed_served(sorted(unchanged), check),
            own=of_adapter if wants_own else {},
            adapter={Piece(name, name): found for name, found in of_adapter.items()},
            adapter_dtypes={
                Piece(name, name): hashed_dtype(tensor.dtype)
                for name, tensor in adapter.tensors.items()
            },
        )
        return SourceParts(pieces=pieces, share=share), adapted

    def _pack(self, by_address: Mapping[int, Tensor], check: Callable[[], None]) -> list[Any]:
        """Return what each linear layer packs of its new weights, while the old ones serve.

        `by_address` has the tensor for each address of a weight slot that changes.
        """
        packed = []
        for path, layer in self._model.linear_layers().items():
            check()
            with blaming(f"packing {path!r}"):
                slots = [layer.weight_slots()[f"{part}.weight"] for part in layer.parts]
                changed = [by_address.get(slot.address) for slot in slots]
                parts = [
                    slot.read() if values is None else values
                    for slot, values in zip(slots, changed, strict=True)
                ]
                packed.append(layer.stage(parts))
        return packed

    # ---- memory

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory of all parameters, whether it is released or not."""
        return self._memory.num_bytes

    @property
    def is_resident(self) -> bool:
        """Whether the memory is there and not released."""
        return self._memory.is_resident

    @property
    def num_resident_bytes(self) -> int:
        """Bytes of the weights that take memory now; 0 while released."""
        return self._memory.num_resident_bytes

    @property
    def num_bytes_on_host(self) -> int:
        """Bytes of the host copy that waits for `restore`."""
        return self._memory.num_bytes_on_host

    @property
    def num_base_bytes(self) -> int:
        """Bytes, on the host, of what the adapted weights are without their adapter."""
        return sum(base.nbytes for base in self._bases.values())

    def release(self, *, discard: bool) -> int:
        """Release the memory, after a copy to the host unless `discard`. Returns bytes released."""
        if not self.is_resident:
            return 0
        self.has_values = self.has_values and not discard
        if not self.has_values:
            self._bases = {}
        return self._memory.release(keeps_values=self.has_values)

    def restore(self) -> int:
        """Reserve the memory again and copy the values back if they were kept.

        Returns the number of bytes copied.
        """
        return self._memory.restore()
