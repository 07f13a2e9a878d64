"""WeightMemory: where the parameters of a model lie."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from rollout.backends.base import Backend
from rollout.backends.buffers import HostArena
from rollout.backends.cpu.residency import resident_bytes
from rollout.backends.ops.fingerprint import hashed_dtype
from rollout.layers.weight_slot import WeightSlot
from rollout.models.causal_lm import CausalLM
from rollout.models.plain_tensors import is_sharded
from rollout.models.weights import WeightTable
from rollout.weights.update import HOST_COPIES

_BUFFER = "weights"


class WeightMemory:
    """One buffer of the backend's memory with all parameters, which can be released and restored.

    `is_resident` is False while it is released. Persistent buffers lie elsewhere, and stay.
    """

    def __init__(self, model: CausalLM, backend: Backend, *, keeps_values: bool) -> None:
        """Move the parameters there, before anything is packed: with their values, or without."""
        self._model, self._memory = model, backend.memory
        self._arena = backend.create_host_arena()
        self._places = dict(_layout(model))
        self.num_bytes = max(end for _, end in self._places.values())
        self.is_resident, self._has_copy = True, False
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        if backend.device.type == "cpu":
            # Pages of a host take memory only once they are written to.
            buffer = self._memory.allocate(_BUFFER, self.num_bytes)
            self._place_parameters(buffer, keeps_values=keeps_values)
            return
        # A device has no room for the weights twice.
        values = self._taken_from_parameters(keeps_values=keeps_values)
        self._memory.trim()
        self._place_parameters(self._memory.allocate(_BUFFER, self.num_bytes))
        for name, parameter in model.named_parameters():
            if keeps_values:
                parameter.data.copy_(values.pop(name))

    @property
    def bytes_N(self) -> Tensor:
        """The buffer, uint8 [N]: all parameters, while resident. Not to be held: it may move."""
        assert self.is_resident, "the weights' memory is released"
        return self._memory.restore(_BUFFER)

    @property
    def num_resident_bytes(self) -> int:
        """Bytes that take memory now; 0 while released."""
        return resident_bytes(self.bytes_N) if self.is_resident else 0

    @property
    def num_bytes_on_host(self) -> int:
        """Bytes of the host copy that waits for `restore`."""
        return self.num_bytes if self._has_copy else 0

    def release(self, *, keeps_values: bool) -> int:
        """Release the memory, after a copy to the host if `keeps_values`. Returns bytes released;
        a second call does nothing.
        """
        if not self.is_resident:
            return 0
        if keeps_values:
            self._arena.reserve(self.num_bytes).copy_(self.bytes_N)
        self.is_resident, self._has_copy = False, keeps_values
        # Since `__init__` weights may have been repacked, which changes their shapes.
        self._shapes = {name: p.shape for name, p in self._model.named_parameters()}
        self._model.release_packed()
        for parameter in self._model.parameters():
            parameter.data = parameter.data.new_empty(0)
        return self._memory.release(_BUFFER)

    def restore(self) -> int:
        """Reserve the memory again and copy the values back if they were kept.

        Returns the number of bytes copied; a second call does nothing.
        """
        if self.is_resident:
            return 0
        buffer = self._memory.restore(_BUFFER)
        if self._has_copy:
            buffer.copy_(self._arena.reserve(self.num_bytes))
        self._place_parameters(buffer)
        self._model.refresh()
        num_copied = self.num_bytes_on_host
        self.is_resident, self._has_copy = True, False
        return num_copied

    def _taken_from_parameters(self, *, keeps_values: bool) -> dict[str, Tensor]:
        """Leave the parameters without memory. Returns their values on the host, if wanted."""
        values = {}
        for name, parameter in self._model.named_parameters():
            if keeps_values:
                values[name] = parameter.data.cpu()
            parameter.data = parameter.data.new_empty(0)
        return values

    def _place_parameters(self, buffer: Tensor, *, keeps_values: bool = False) -> None:
        """Make each parameter a view of its part of the buffer, one after the other.

        With `keeps_values` its values move there, and its old memory is free before the next one.
        """
        for name, parameter in self._model.named_parameters():
            start, end = self._places[name]
            place = buffer[start:end].view(parameter.dtype).view(self._shapes[name])
            if keeps_values:
                place.copy_(parameter.data)
            parameter.data = place


def _layout(model: CausalLM) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (name, (first byte, end)) of each parameter; tied ones come once."""
    end = 0
    for name, parameter in model.named_parameters():
        start = aligned(end)
        end = start + parameter.nbytes
        yield name, (start, end)


_ALIGNMENT = 64  # bytes, of each place: a cache line, and what vector loads like


class HostRoom:
    """Host memory for one copy of a device's weights, page-locked once and used again.

    One user has it at a time. Who comes while it is in use gets memory of its own. Updates may be
    staged in one thread and committed in another.
    """

    def __init__(self, create_arena: Callable[[], HostArena]) -> None:
        self._create_arena, self._arena = create_arena, create_arena()
        self._user: Callable[[], object | None] = lambda: None
        self._turn = threading.Lock()

    def taken_by(self, user: object) -> HostArena:
        """Return the arena, which is the user's as long as it lives or until `give_back`."""
        with self._turn:
            if self._user() is not None:
                self._arena = self._create_arena()
            self._user = weakref.ref(user)
            return self._arena

    def give_back(self, user: object) -> None:
        """Let others have what `user` has, who does not use it any more."""
        with self._turn:
            if self._user() is user:
                self._user = lambda: None


class HostStage:
    """Implements `Holder`: one arena with a place for each weight of an update, in its own dtype.

    What it has no place for is held beside it: a weight that came under its other name before, what
    the model does not use or know. `own_hashes`: of floating tensors that were cast, as they came,
    if `hash_own` was given.
    """

    def __init__(
        self,
        room: HostRoom,
        table: WeightTable,
        slots: Mapping[str, WeightSlot],
        piece_bytes: int,
        hash_own: Callable[[Tensor, torch.dtype], Tensor] | None = None,
    ) -> None:
        """`slots`: of the weights that may change. `piece_bytes`: how much is copied at once."""
        self._room, self._table, self._slots = room, table, slots
        self._piece_bytes, self._hash_own = piece_bytes, hash_own
        self._arena: HostArena | None = None
        self._free_N = torch.empty(0, dtype=torch.uint8)  # of the arena, from its first free byte
        self._places: dict[str, Tensor] = {}
        self.own_hashes: dict[str, Tensor] = {}

    @torch.no_grad()
    def hold(self, name: str, tensor: Tensor, *, is_new: bool = False) -> Tensor:
        """See `Holder`. Raises ConfigError if the memory is not to be had."""
        if is_sharded(tensor) or not self._is_for_model(name, tensor):
            return HOST_COPIES.hold(name, tensor, is_new=is_new)
        dtype = self._table.form(name)[1]
        if self._hash_own is not None and dtype != tensor.dtype:
            self.own_hashes[name] = self._hash_own(tensor, hashed_dtype(tensor.dtype))
        place = self._place_of(name, tensor.shape, dtype)
        copy_by_rows(place, tensor.detach(), self._piece_bytes)
        return place

    def has_any_of(self, values: Mapping[str, Tensor]) -> bool:
        """Whether it holds one of them."""
        own = self._own_storages()
        return any(_storage(tensor) in own for tensor in values.values())

    def settled(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Hold those that others hold, too, so that all of `values` may be written to."""
        own = self._own_storages()
        return {
            name: tensor if _storage(tensor) in own else self.hold(name, tensor)
            for name, tensor in values.items()
        }

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """See `Holder`."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let others have the room: what is held here is not used any more."""
        self._room.give_back(self)

    def _own_storages(self) -> set[int]:
        return {_storage(place) for place in self._places.values()}

    def _is_for_model(self, name: str, tensor: Tensor) -> bool:
        """Whether the model may take its weight from this tensor: any other dtype is refused."""
        is_known = name in self._table.slots or name in self._table.aliases
        return is_known and not self._table.is_passed_over(name) and tensor.is_floating_point()

    def _place_of(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A place for what comes under `name`: the one from before, if it came already."""
        place = self._places.get(name)
        if place is None or (place.shape, place.dtype) != (shape, dtype):
            place = self._places[name] = self._new_place(shape, dtype)
        return place.view(shape)

    def _new_place(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if self._arena is None:
            self._arena = self._room.taken_by(self)
            self._free_N = self._arena.reserve(_bytes_of(self._slots))
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > len(self._free_N):
            return torch.empty(shape, dtype=dtype)
        place = self._free_N[:num_bytes]
        self._free_N = self._free_N[aligned(num_bytes) :]
        return place.view(dtype).view(shape)


def copy_by_rows(target: Tensor, source: Tensor, num_bytes: int) -> None:
    """Copy values to where they have the same shape, so many bytes at once.

    A cast, or a source without order, makes torch copy to memory of its own before, on either side:
    of one piece then.
    """
    target, source = torch.atleast_1d(target), torch.atleast_1d(source)
    num_rows = rows_within(num_bytes, source)
    for place, rows in zip(target.split(num_rows), source.split(num_rows), strict=True):
        place.copy_(rows)


def rows_within(num_bytes: int, values: Tensor) -> int:
    """How many rows of `values` are at most so many bytes; 1 if one row has more."""
    return max(1, num_bytes * max(1, len(values)) // max(1, values.numel() * values.itemsize))


def _bytes_of(slots: Mapping[str, WeightSlot]) -> int:
    """Of places for what is kept of all weights, tied ones once."""
    sizes = {slot.address: _kept_bytes(slot) for slot in slots.values()}
    return sum(map(aligned, sizes.values()))


def _kept_bytes(slot: WeightSlot) -> int:
    shape = slot.shape if slot.cut is None else slot.cut.kept_shape
    return math.prod(shape) * slot.dtype.itemsize


def aligned(num_bytes: int) -> int:
    """Room for so many bytes, after which values of any dtype may follow."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
