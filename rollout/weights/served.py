"""ServedWeights: memory, values and version of the weights that one rank of an engine serves.

`rollout.worker.loading` creates ServedWeights, Worker and the executors update it, and Engine reads
its state. ServedWeights is the only writer of the model's weights and of their version.
"""

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
    KeptParts,
    PartHasher,
    WeightShare,
    checksum_of_shares,
    fetched,
    hashed_parts,
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
from rollout.weights.memory import PackedMemory, ReusedArena, StagingArena, WeightMemory
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
    NamedTensors,
    Origin,
    StagingMemory,
    blaming,
    by_name,
    check_checksum,
    check_finite,
    check_values,
    checked_source,
    checksum_of,
    origins_of,
)
from rollout.weights.version import next_version

# Copying half a bucket to or from the host takes 0.5 ms, much longer than starting a copy.
BUCKET_BYTES = 64 << 20


class ServedWeights:
    """The weights of one rank, and the only writer of them and of their version.

    An update is staged first and then committed in place, so captured CUDA graphs stay valid.
    `has_values` is False while the memory does not hold one complete set of weights. Values are
    missing after weights were discarded, and after an update that could not be rolled back.
    `is_finite` is False if the served update has NaN or infinity.

    Under tensor parallelism each rank stages and hashes its parts of the update. Rank 0 verifies
    the update with the shares of all ranks. Then all ranks commit, and roll back if one of them
    fails.
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
        """Move the parameters of `model` into the backend's memory. Call this before any weight is
        packed.

        `fill` writes the values after the move. If `fill` is None, the model's values are kept.
        `version` is the first version. `bucket_bytes` is how much device memory an update can use
        temporarily.
        """
        self._model, self._chunk_bytes = model, bucket_bytes // 2
        self._hasher = PartHasher(backend.ops, model.spec.shard)
        self._memory = WeightMemory(model, backend, keeps_values=fill is None)
        self._reject_non_finite = reject_non_finite
        is_host = backend.device.type == "cpu"
        self._create_arena = backend.create_host_arena
        self._arenas = None if is_host else ReusedArena(self._create_arena)
        self._backups = BackupKeeper(model, self._memory, self._arenas)
        # The number of the served write, which is below the latest number after a rollback.
        self._num_writes = self._latest_write = 0
        self._bases: Mapping[str, Tensor] = {}  # served weights without their adapter, by name
        self.version, self.has_values = version, True
        self.is_finite = True  # assumed of the first weights; only updates are checked
        if fill is not None:
            fill()
        trim_heap()  # return memory freed by loading

    # ---- checks of the state

    def require_resident(self, what: str) -> None:
        """Raise EngineStateError "cannot `what`: ..." while the memory is released."""
        if not self.is_resident:
            raise EngineStateError(
                f"cannot {what}: the weights' memory is released; resume(only='weights') first"
            )

    def require_values(self, what: str) -> None:
        """Raise EngineStateError "cannot `what`: ..." while the values are missing."""
        if not self.has_values:
            raise EngineStateError(
                f"cannot {what}: the weights were discarded, or an update of them was cut off; "
                "commit a full update first"
            )

    # ---- checksums

    @property
    def names(self) -> list[str]:
        """The Hugging Face names of all weights, sorted."""
        return sorted(self._model.weight_slots())

    def checksum(self) -> str:
        """Return the checksum of names and values of all weights, equal on every device. Call this
        on an engine of one rank only. Raises EngineStateError while the memory is released or the
        values are missing."""
        return checksum_of_shares([self.fingerprint_share()])

    def fingerprint_share(self, names: Sequence[str] | None = None) -> WeightShare:
        """Return this rank's part of the fingerprints of the weights `names`, or of all weights.
        `checksum_of_shares` adds the parts of all ranks. Raises EngineStateError while the memory
        is released or the values are missing."""
        self.require_resident("compute a checksum")
        self.require_values("compute a checksum")
        wanted = self._model.weight_slots() if names is None else names
        return WeightShare(pieces=self._hashed_served(wanted))

    def _hashed_served(
        self, names: Iterable[str], check: Callable[[], None] = lambda: None
    ) -> dict[Origin, Fingerprint]:
        """Return this rank's part of the fingerprints of served weights. `check` is called before
        each weight, and can raise to cancel."""
        queued: dict[Origin, Tensor] = {}
        for name in names:  # one at a time, because a slot may return a copy
            check()
            slot = self._model.weight_slots()[name]
            queued[Origin(name, name)] = self._hasher.of_kept(slot, slot.read(), slot.dtype)
        return fetched(queued)

    def data_ptrs(self) -> dict[str, int]:
        """Return the address of each weight by its Hugging Face name."""
        return self._model.weight_table().addresses()

    # ---- versions and updates

    def set_version(self, version: int) -> None:
        """Change the version of the served weights. Raises WeightUpdateError unless `version` is
        above the current version, and EngineStateError while the values are missing."""
        self.require_values("set the generation epoch")
        self.version = next_version(self.version, version)

    @torch.no_grad()
    def stage(
        self,
        named_tensors: NamedTensors,
        check: Callable[[], None] = lambda: None,
        source_checksum: str = "",
    ) -> StagedWeights:
        """Check names, shapes, dtypes and values of an update, and pack the update for `commit`.

        The served weights do not change. They are backed up if the commit will overwrite them by
        copying. While values are missing, nothing is packed or backed up, and the commit writes the
        tensors in place. Under tensor parallelism a rank stages its parts, and `verify` checks the
        values. Sharded tensors are gathered in the order of their names, a collective of all ranks
        of their mesh. `check` is called before each tensor, and can raise to cancel.
        `source_checksum` is the expected checksum of the tensors as they arrive. "" skips that
        check.

        Raises WeightUpdateError naming the tensor at fault and the expected form. Raises
        EngineStateError while the memory is released, and for an adapter without a base while the
        values are missing.
        """
        self.require_resident("stage an update")
        start, num_writes = time.perf_counter(), self._num_writes
        memory = self._staging_memory(named_tensors, hashes_own=bool(source_checksum))
        with memory.released_on_error():
            kept, adapted = self._read(
                named_tensors, check, memory, wants_own=bool(source_checksum)
            )
            origins = origins_of(self._model.weight_table(), kept.share.pieces)
            checksum, is_finite = "", True
            if self._model.spec.shard.size == 1:
                checksum, is_finite = self._verified(kept.share, origins, source_checksum)
            # Weights that an adapter does not change have an origin, but no new values.
            values = {
                origin.weight: kept.tensors[origin]
                for origin in origins.values()
                if origin in kept.tensors
            }
            slots = self._model.weight_slots()
            fills_missing = not self.has_values
            return StagedWeights(
                packed=[] if fills_missing else self._pack(origins, values, check),
                replacement=self._replacement(values, memory, fills_missing=fills_missing),
                num_writes=num_writes,
                num_bytes=sum(v.numel() * slots[n].dtype.itemsize for n, v in values.items()),
                bases=adapted.bases,
                follows_served=adapted.follows_served,
                fills_missing=fills_missing,
                share=kept.share,
                checksum=checksum,
                is_finite=is_finite,
                started_at=start,
                seconds=time.perf_counter() - start,
            )

    def _staging_memory(self, named_tensors: NamedTensors, *, hashes_own: bool) -> StagingMemory:
        """Return the memory for the update's tensors: an arena for a GPU's model, else
        HOST_COPIES."""
        if self._arenas is None:
            return HOST_COPIES
        table = self._model.weight_table()
        slots = table.slots
        if isinstance(named_tensors, LoraAdapter) and named_tensors.base is None:
            adapted = {f"{module}.weight" for module in named_tensors.pairs()} | self._bases.keys()
            slots = {name: slot for name, slot in slots.items() if name in adapted}
        hash_own = partial(self._hasher.of_whole, index=0) if hashes_own else None
        return StagingArena(self._arenas, table, slots, self._chunk_bytes, hash_own)

    def _replacement(
        self, values: Mapping[str, Tensor], memory: StagingMemory, *, fills_missing: bool
    ) -> Replacement:
        """Return an Exchange if some of `values` are in the arena, else an Overwriting. Repacked
        weights are left out, because their staged copies replace them. If `fills_missing`, repacked
        weights are included, and no backup is made."""
        slots = self._model.weight_slots()
        tensors = {
            name: tensor
            for name, tensor in values.items()
            if fills_missing or not slots[name].is_repacked
        }
        if isinstance(memory, StagingArena):
            if memory.has_any_of(tensors):
                device = next(self._model.parameters()).device
                writable = memory.writable(tensors)
                return Exchange(slots, memory, writable, self._chunk_bytes, device)
            memory.release()
        # Another update may have been committed since staging began: back up the present weights.
        backups = None if fills_missing else self._backups
        return Overwriting(slots, tensors, backups, self._num_writes, self._chunk_bytes)

    def verify(
        self, staged: StagedWeights, shares: Sequence[WeightShare], source_checksum: str = ""
    ) -> None:
        """Check the values of an update that all ranks have staged, by their shares in rank order.

        Sets the checksum and `is_finite` of `staged`. `source_checksum` is as in `stage`. Raises
        WeightUpdateError for wrong values. An engine of one rank need not call `verify`, because
        `stage` checks the values there.
        """
        total = sum_of(shares)
        origins = origins_of(self._model.weight_table(), total.pieces)
        staged.checksum, staged.is_finite = self._verified(total, origins, source_checksum)

    def _verified(
        self, total: WeightShare, origins: Mapping[str, Origin], source_checksum: str
    ) -> tuple[str, bool]:
        """Check the fingerprints of an update. Return the checksum of all weights, and whether all
        weights are finite. Raises WeightUpdateError."""
        if source_checksum:
            check_checksum(total.own, source_checksum)
        if self._reject_non_finite:
            check_finite(total.adapter, total.adapter_dtypes)
        table = self._model.weight_table()
        check_values(table, total.pieces, origins, reject_non_finite=self._reject_non_finite)
        served = {name: total.pieces[origin] for name, origin in origins.items()}
        return checksum_of(served), not any(num_bad for _, num_bad in served.values())

    @torch.no_grad()
    def commit(self, staged: StagedWeights, version: int | None) -> int:
        """Write a staged update in place and serve it as `version`; None means the current version
        + 1.

        Returns the size in bytes of the weights written. If writing fails, the commit is rolled
        back. Raises WeightUpdateError if writing fails, for a version that is not above the present
        one, and for an update that cannot be committed any more. Raises EngineStateError while the
        memory is released, and for an adapter on the served weights while their values are missing.
        """
        self.require_resident("commit an update")
        new_version = next_version(self.version, version)
        if staged.is_spent:
            raise WeightUpdateError(
                "these staged weights were committed before; stage the update again"
            )
        if staged.follows_served:
            self.require_values("commit an adapter")
            if staged.num_writes != self._num_writes:
                raise WeightUpdateError(
                    "other weights were committed after this adapter was staged; stage it again"
                )
        if staged.fills_missing and self.has_values:
            raise WeightUpdateError(
                "other weights were committed after this update was staged, when the weights' "
                "values were missing; stage it again"
            )
        staged.replacement.reserve(self._num_writes)
        staged.replaced = replaced = Replaced(
            num_writes=self._latest_write + 1,
            num_writes_before=self._num_writes,
            packed=PackedCopies(self._model, staged.packed),
            version=self.version,
            had_values=self.has_values,
            was_finite=self.is_finite,
            bases=self._bases,
        )
        try:
            staged.is_spent = True
            self.has_values = False  # stays False if the rollback also fails
            staged.replacement.replace()
            with blaming("refreshing the packed copies"):
                self._model.refresh(staged.packed)
            self.version, self.has_values, self._bases = new_version, True, staged.bases
            self.is_finite = staged.is_finite
            self._num_writes = self._latest_write = replaced.num_writes
        except BaseException:
            self._restore(staged, replaced)
            raise
        return staged.num_bytes

    @torch.no_grad()
    def roll_back(self, staged: StagedWeights) -> None:
        """Undo `commit(staged)`, after another rank has failed. No update may have been written
        since. `staged` can be committed again."""
        replaced = staged.replaced
        assert replaced is not None, "rollback of an update that was not committed"
        assert self._num_writes == replaced.num_writes, "another update was written since"
        self.has_values = False  # stays False if the rollback fails
        self._restore(staged, replaced)

    def _restore(self, staged: StagedWeights, replaced: Replaced) -> None:
        staged.replacement.roll_back()
        if not staged.fills_missing:
            replaced.packed.restore()
        self.version, self.has_values = replaced.version, replaced.had_values
        self.is_finite, self._bases = replaced.was_finite, replaced.bases
        self._num_writes = replaced.num_writes_before
        staged.is_spent, staged.replaced = False, None

    def _read(
        self,
        named_tensors: NamedTensors,
        check: Callable[[], None],
        memory: StagingMemory,
        *,
        wants_own: bool,
    ) -> tuple[KeptParts, AdaptedWeights]:
        """Return this rank's parts of an update, and what a LoraAdapter changes."""
        if isinstance(named_tensors, LoraAdapter):
            return self._adapted(named_tensors, check, memory, wants_own=wants_own)
        given, table = by_name(named_tensors, memory), self._model.weight_table()
        kept = read_source(given, table, self._hasher, check, memory, wants_own=wants_own)
        return kept, AdaptedWeights()

    def _adapted(
        self,
        adapter: LoraAdapter,
        check: Callable[[], None],
        memory: StagingMemory,
        *,
        wants_own: bool,
    ) -> tuple[KeptParts, AdaptedWeights]:
        table = self._model.weight_table()
        check_targets(adapter.pairs(), self._model)
        with blaming("gathering the adapter"):
            adapter = replace(adapter, tensors=gathered(adapter.tensors))
        of_adapter = hashed_wholes(adapter.tensors, self._hasher, check)
        if adapter.base is None:
            self.require_values("stage an adapter")
            adapted = adapt_served(adapter.pairs(), table.slots, self._bases, check, memory)
        else:
            base = checked_source(adapter.base, table, memory)
            adapted = adapt_given(adapter.pairs(), table, base, check, memory)
        tensors = {Origin(name, name): kept for name, kept in adapted.tensors.items()}
        unchanged = table.slots.keys() - adapted.tensors.keys() if adapted.follows_served else set()
        share = WeightShare(
            pieces=hashed_parts(tensors, table, self._hasher, check)
            | self._hashed_served(sorted(unchanged), check),
            own=of_adapter if wants_own else {},
            adapter={Origin(name, name): found for name, found in of_adapter.items()},
            adapter_dtypes={
                Origin(name, name): hashed_dtype(tensor.dtype)
                for name, tensor in adapter.tensors.items()
            },
        )
        return KeptParts(tensors=tensors, share=share), adapted

    def _pack(
        self,
        origins: Mapping[str, Origin],
        values: Mapping[str, Tensor],
        check: Callable[[], None],
    ) -> list[Any]:
        """Return the packed copies that each linear layer staged. The old weights stay in use."""
        addresses = self._model.weight_table().addresses()
        new = {
            addresses[name]: values[origin.weight]
            for name, origin in origins.items()
            if origin.weight in values
        }
        packed = []
        allocate = PackedMemory(self._create_arena, self.num_bytes).allocate
        with blaming() as blame:
            for path, layer in self._model.linear_layers().items():
                check()
                blame.culprit = f"packing {path!r}"
                slots = layer.weight_slots()
                parts = []
                for part in layer.parts:
                    slot = slots[f"{part}.weight"]
                    changed = new.get(slot.address)
                    parts.append(slot.read() if changed is None else changed)
                packed.append(layer.stage(parts, allocate))
        return packed

    # ---- memory

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory for all parameters, resident or released."""
        return self._memory.num_bytes

    @property
    def is_resident(self) -> bool:
        return self._memory.is_resident

    @property
    def num_resident_bytes(self) -> int:
        """Bytes of the parameters' memory in use now; 0 while released."""
        return self._memory.num_resident_bytes

    @property
    def num_bytes_on_host(self) -> int:
        """Bytes of the host copy from which `restore` copies; 0 without a copy."""
        return self._memory.num_bytes_on_host

    @property
    def num_base_bytes(self) -> int:
        """Bytes of host memory for the adapted weights without their adapter."""
        return sum(base.nbytes for base in self._bases.values())

    def release(self, *, discard: bool) -> int:
        """Release the parameters' memory. Copy it to the host first, unless `discard` or values are
        missing. `discard` sets `has_values` to False. Returns the bytes released; 0 if the memory
        was released before."""
        if not self.is_resident:
            return 0
        self.has_values = self.has_values and not discard
        if not self.has_values:
            self._bases = {}
        return self._memory.release(keeps_values=self.has_values)

    def restore(self) -> int:
        """Allocate the memory again and copy kept values back. Returns the number of bytes copied
        back; 0 if none were kept or the memory is resident."""
        return self._memory.restore()
