"""ServedWeights: the weights that an engine serves: their memory, values and version."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rollout.backends.base import Backend
from rollout.backends.memory.mapping import trim_heap
from rollout.errors import EngineStateError, WeightUpdateError
from rollout.models.causal_lm import CausalLM
from rollout.models.lora import LoraAdapter
from rollout.models.weights import is_computed
from rollout.runner.lora_merge import (
    AdaptedWeights,
    adapt_given,
    adapt_served,
    check_targets,
    gathered,
)
from rollout.runner.weight_memory import WeightMemory
from rollout.runner.weight_update import (
    Fingerprint,
    NamedTensors,
    Piece,
    blaming,
    by_name,
    check_checksum,
    check_finite,
    checked_origins,
    checked_source,
    checksum_of,
    hashed_dtype,
    next_version,
    pieces_of,
)

Key = TypeVar("Key")


class WeightBackup:
    """A copy of the weights that serve now, from which they are restored if replacing them fails.

    It copies only what no packed copy holds: less than all weights where the backend packs them. A
    weight that is packed in its own memory leaves its old values in what was staged for it.
    """

    @torch.no_grad()
    def __init__(self, model: CausalLM) -> None:
        self._layers = list(model.linear_layers().values())
        packed = {
            layer.weight.data_ptr()
            for layer in self._layers
            if layer.packed is not None or layer.repacked is not None
        }
        self._plain = [
            (parameter, parameter.detach().clone())
            for parameter in (*model.parameters(), *model.persistent_buffers().values())
            if parameter.data_ptr() not in packed
        ]
        self._packed: list[tuple[Any, Any]] = []

    def keep_packed(self, staged: Sequence[Any]) -> None:
        """Keep the packed copies that serve now, which `staged` is about to replace."""
        served = [layer.packed for layer in self._layers]
        self._packed = list(zip(served, staged, strict=True))

    @torch.no_grad()
    def restore(self) -> None:
        """Write all weights back, and their packed copies."""
        for parameter, values in self._plain:
            parameter.detach().copy_(values)
        for layer, (packed, staged) in zip(self._layers, self._packed, strict=True):
            layer.restore(packed, staged)


@dataclass(slots=True, kw_only=True)
class StagedWeights:
    """A verified update, which can be committed once. Only ServedWeights changes it.

    `tensors` are the source tensors that a commit copies, tied ones once; the others are there as
    `packed`, what the backend packed for each linear layer. `backup` holds the weights that were
    served after `num_writes` writes. `num_bytes` is the size of the weights that change: all, but
    under an adapter. `bases` has what adapted weights are without it. `follows_served`: it is an
    adapter on the weights that were served. `started_at` is when staging began, on the clock of
    time.perf_counter; `seconds` is how long it took. `is_spent`: a commit has begun and was not
    undone.
    """

    tensors: Mapping[str, Tensor]
    packed: Sequence[Any]
    backup: WeightBackup
    num_writes: int
    num_bytes: int
    bases: Mapping[str, Tensor]
    follows_served: bool
    is_spent: bool = False
    checksum: str
    started_at: float
    seconds: float


class ServedWeights:
    """The only writer of the model's weights and of their version.

    They lie in a WeightMemory; a weight that one packed product serves alone lies there packed, and
    in no other form. An update is staged first and then committed in place, so captured graphs stay
    valid. `has_values` is False while the bytes are not those of one set of weights: they were
    discarded, or an update could not be undone.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: Backend,
        *,
        version: int,
        reject_non_finite: bool,
        fill: Callable[[], None] | None = None,
    ) -> None:
        """Move the parameters of `model` into the backend's memory, before anything is packed.

        `fill` then writes the values of a model that has none yet; with None, its values are moved.
        """
        self._model, self._ops = model, backend.ops
        self._memory = WeightMemory(model, backend, keeps_values=fill is None)
        self._reject_non_finite = reject_non_finite
        self._num_writes = 0
        self._bases: Mapping[str, Tensor] = {}  # of the weights that an adapter has changed
        self.version, self.has_values = version, True
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
        self.require_resident("compute a checksum")
        self.require_values("compute a checksum")
        slots = self._model.weight_slots()
        # One weight at a time: what a slot reads may be a copy.
        queued = {n: self._ops.fingerprint(slot.read(), slot.dtype) for n, slot in slots.items()}
        return checksum_of(_fetch(queued))

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
        """Check names, shapes, dtypes and values, pack, and back up; the model is not changed.

        The host waits for each device once. Sharded tensors are gathered, in the order of their
        names, which is a collective of all ranks that hold a part. `check` is called before each
        tensor, and may raise to end staging. `source_checksum` is what `checksum_of` must give for
        the tensors as they arrive; "" skips that check. Raises WeightUpdateError naming the tensor
        at fault and what was expected of it, EngineStateError while the memory is released, and for
        an adapter without a base while the values are missing.
        """
        self.require_resident("stage an update")
        start, num_writes = time.perf_counter(), self._num_writes
        table, adapted = self._model.weight_table(), AdaptedWeights()
        if isinstance(named_tensors, LoraAdapter):
            adapted = self._adapt(named_tensors, check, source_checksum)
            named_tensors, source_checksum = adapted.tensors, ""
        slots, given = table.slots, by_name(named_tensors)
        pieces = pieces_of(checked_source(given, table), table)
        dtypes = {piece: slots[piece.weight].dtype for piece in pieces}
        fingerprints = self._fingerprints(pieces, dtypes, check)
        if source_checksum:
            own = self._own_fingerprints(given, fingerprints, dtypes, check)
            check_checksum(own, source_checksum)
        origins = checked_origins(slots, fingerprints, reject_non_finite=self._reject_non_finite)
        chosen = {p.weight: pieces[p] for p in dict.fromkeys(origins.values())}
        for name in adapted.unchanged & chosen.keys():
            del chosen[name]
        return StagedWeights(
            tensors={n: values for n, values in chosen.items() if not slots[n].is_repacked},
            packed=self._pack(
                {slots[name].address: pieces[origin] for name, origin in origins.items()}, check
            ),
            backup=WeightBackup(self._model),
            num_writes=num_writes,
            num_bytes=sum(slots[n].shape.numel() * slots[n].dtype.itemsize for n in chosen),
            bases=adapted.bases,
            follows_served=adapted.follows_served,
            checksum=checksum_of({name: fingerprints[o] for name, o in origins.items()}),
            started_at=start,
            seconds=time.perf_counter() - start,
        )

    def commit(self, staged: StagedWeights, version: int | None) -> int:
        """Write a staged update in place and serve it as `version`; None means the next one.

        Returns the number of bytes written. If anything is raised, weights and version are those
        from before: the commit restores the backup made while staging, or one made now if another
        update was written since. Raises WeightUpdateError.
        """
        new_version = next_version(self.version, version)
        if staged.is_spent:
            raise WeightUpdateError(
                "these staged weights were committed before; stage the update again"
            )
        before, had_values = self.version, self.has_values
        is_current = staged.num_writes == self._num_writes
        if staged.follows_served:
            self.require_values("commit an adapter")
            if not is_current:
                raise WeightUpdateError(
                    "other weights were committed after this adapter was staged; stage it again"
                )
        backup = staged.backup if is_current else WeightBackup(self._model)
        backup.keep_packed(staged.packed)
        try:
            staged.is_spent = True
            self.has_values = False  # stays so if the restore fails, too
            self._write(staged)
            self.version, self.has_values, self._bases = new_version, True, staged.bases
            self._num_writes += 1
        except BaseException:
            backup.restore()
            self.version, self.has_values = before, had_values
            staged.is_spent = False
            raise
        return staged.num_bytes

    @torch.no_grad()
    def _write(self, staged: StagedWeights) -> None:
        """Copy tensors in place, exchange repacked weights, and swap in packed copies."""
        slots = self._model.weight_slots()
        for name, tensor in staged.tensors.items():
            with blaming(f"copying {name!r}"):
                slots[name].write(tensor)
        with blaming("taking the packed copies"):
            self._model.refresh(staged.packed)

    def _adapt(
        self, adapter: LoraAdapter, check: Callable[[], None], source_checksum: str
    ) -> AdaptedWeights:
        """Return all weights under `adapter`, once its own tensors have been checked."""
        table = self._model.weight_table()
        check_targets(adapter.pairs(), self._model)
        with blaming("gathering the adapter"):
            adapter = replace(adapter, tensors=gathered(adapter.tensors))
        pieces = {Piece(name, name): tensor for name, tensor in adapter.tensors.items()}
        dtypes = {piece: hashed_dtype(tensor.dtype) for piece, tensor in pieces.items()}
        fingerprints = self._fingerprints(pieces, dtypes, check)
        if source_checksum:
            check_checksum({p.tensor: f for p, f in fingerprints.items()}, source_checksum)
        if self._reject_non_finite:
            check_finite(fingerprints, dtypes)
        if adapter.base is None:
            self.require_values("stage an adapter")
            return adapt_served(adapter.pairs(), table.slots, self._bases, check)
        pieces = pieces_of(checked_source(adapter.base, table), table)
        base = {piece.weight: values for piece, values in pieces.items()}
        return adapt_given(adapter.pairs(), table.slots, base, check)

    def _pack(self, by_address: Mapping[int, Tensor], check: Callable[[], None]) -> list[Any]:
        """Return what each linear layer packs of its new weights, while the old ones serve.

        `by_address` has the tensor for each address of a weight slot.
        """
        packed = []
        for path, layer in self._model.linear_layers().items():
            check()
            with blaming(f"packing {path!r}"):
                slots = layer.weight_slots()
                parts = [by_address[slots[f"{part}.weight"].address] for part in layer.parts]
                packed.append(layer.stage(parts))
        return packed

    def _own_fingerprints(
        self,
        source: Mapping[str, Tensor],
        known: Mapping[Piece, Fingerprint],
        dtypes: Mapping[Piece, torch.dtype],
        check: Callable[[], None],
    ) -> dict[str, Fingerprint]:
        """Return the fingerprints of the tensors as they came, of which `known` has some.

        Only those that the model casts, takes apart or does not use are read again.
        """
        fingerprints: dict[str, Fingerprint] = {}
        unknown: dict[Piece, Tensor] = {}
        for name, tensor in source.items():
            if is_computed(name):
                continue
            piece = Piece(name, name)
            if dtypes.get(piece) == hashed_dtype(tensor.dtype):
                fingerprints[name] = known[piece]
            else:
                unknown[piece] = tensor
        own = {piece: hashed_dtype(tensor.dtype) for piece, tensor in unknown.items()}
        read = self._fingerprints(unknown, own, check)
        return fingerprints | {piece.tensor: read[piece] for piece in read}

    def _fingerprints(
        self,
        pieces: Mapping[Piece, Tensor],
        dtypes: Mapping[Piece, torch.dtype],
        check: Callable[[], None] = lambda: None,
    ) -> dict[Piece, Fingerprint]:
        """Return the fingerprint of each piece, cast to its dtype in `dtypes`.

        Each is computed on the tensor's device, which need not be the model's. Raises
        WeightUpdateError naming the tensor.
        """
        queued: dict[Piece, Tensor] = {}
        for piece, tensor in pieces.items():
            check()
            with blaming(f"checking {piece}"):
                queued[piece] = self._ops.fingerprint(tensor, dtypes[piece])
        return _fetch(queued)

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


def _fetch(queued: Mapping[Key, Tensor]) -> dict[Key, Fingerprint]:
    """Return the numbers of fingerprints, with one copy to the host for each device."""
    by_device: dict[torch.device, dict[Key, Tensor]] = {}
    for key, fingerprint in queued.items():
        by_device.setdefault(fingerprint.device, {})[key] = fingerprint
    fetched: dict[Key, Fingerprint] = {}
    for device, rows in by_device.items():
        with blaming(f"checking the tensors on {device}"):
            values = torch.stack([*rows.values()]).cpu().tolist()
        fetched |= zip(rows, values, strict=True)
    return fetched
