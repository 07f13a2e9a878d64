"""Memory of weights: one buffer for the served weights, and reused host memory for staged updates.

Used by ServedWeights, and by the backups and exchanges in `rollout.weights.staged`. WeightMemory
moves the model's parameters into its buffer.
"""

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
_PACKED_ROWS = 64
_ALIGNMENT = 64  # bytes between possible starts of tensors: a cache line, good for vector loads


# ---- the served weights


class WeightMemory:
    """One buffer of backend memory with all parameters of a model, which can be released and
    restored. `is_resident` is False while the buffer is released. Persistent buffers of the model
    are not moved or released."""

    def __init__(self, model: CausalLM, backend: Backend, *, keeps_values: bool) -> None:
        """Allocate the buffer and move the parameters into it. Call this before any weight is
        packed. If `keeps_values` is False, the parameters' values are undefined afterwards."""
        self._model, self._memory = model, backend.memory
        self._arena = backend.create_host_arena()
        self._ranges = dict(_layout(model))
        self.num_bytes = max(end for _, end in self._ranges.values())
        self.is_resident, self._has_copy = True, False
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        if backend.device.type == "cpu":
            # A CPU's pages take memory only when they are written to.
            buffer = self._memory.allocate(_BUFFER, self.num_bytes)
            self._place_parameters(buffer, keeps_values=keeps_values)
            return
        # A device may lack memory for two copies of the weights: values wait on the host.
        values = {}
        for name, parameter in model.named_parameters():
            if keeps_values:
                values[name] = parameter.data.cpu()
            parameter.data = parameter.data.new_empty(0)
        self._memory.trim()
        self._place_parameters(self._memory.allocate(_BUFFER, self.num_bytes))
        for name, parameter in model.named_parameters():
            if keeps_values:
                parameter.data.copy_(values.pop(name))

    @property
    def bytes_N(self) -> Tensor:
        """The buffer with all parameters, uint8 [N], while resident. Read it anew each time:
        `restore` can move the buffer."""
        assert self.is_resident, "the weights' memory is released"
        return self._memory.restore(_BUFFER)

    @property
    def num_resident_bytes(self) -> int:
        """Bytes of the buffer that take memory now; 0 while released."""
        return resident_bytes(self.bytes_N) if self.is_resident else 0

    @property
    def num_bytes_on_host(self) -> int:
        """Bytes of the host copy from which `restore` copies; 0 without a copy."""
        return self.num_bytes if self._has_copy else 0

    def release(self, *, keeps_values: bool) -> int:
        """Release the buffer and all packed copies. If `keeps_values`, first copy the buffer to the
        host. Returns the number of bytes released; 0 if the buffer was released before."""
        if not self.is_resident:
            return 0
        if keeps_values:
            self._arena.reserve(self.num_bytes).copy_(self.bytes_N)
        self.is_resident, self._has_copy = False, keeps_values
        # Weights may have been repacked since `__init__`, which changes their shapes.
        self._shapes = {name: p.shape for name, p in self._model.named_parameters()}
        self._model.release_packed()
        for parameter in self._model.parameters():
            parameter.data = parameter.data.new_empty(0)
        return self._memory.release(_BUFFER)

    def restore(self) -> int:
        """Allocate the buffer again, copy kept values back and pack the weights. Returns the number
        of bytes copied back; 0 if no values were kept or the buffer is resident."""
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

    def _place_parameters(self, buffer: Tensor, *, keeps_values: bool = False) -> None:
        """Make each parameter a view of its range of the buffer. If `keeps_values`, copy the
        parameter's values there."""
        for name, parameter in self._model.named_parameters():
            start, end = self._ranges[name]
            view = buffer[start:end].view(parameter.dtype).view(self._shapes[name])
            if keeps_values:
                view.copy_(parameter.data)
            parameter.data = view


def _layout(model: CausalLM) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the name of each parameter, tied ones once, and its (start, end) in the buffer in
    bytes."""
    end = 0
    for name, parameter in model.named_parameters():
        start = aligned(end)
        end = start + parameter.nbytes
        yield name, (start, end)


# ---- host memory for an update


class PackedMemory:
    """A zeroed block of memory for all packed copies of a staged update."""

    def __init__(self, create_arena: Callable[[], HostArena], num_bytes: int) -> None:
        """`num_bytes` is the size of the block, which the first `allocate` reserves."""
        self._create_arena, self._num_bytes = create_arena, num_bytes
        self._free_N: Tensor | None = None

    def allocate(self, num_bytes: int) -> Tensor:
        """Return the next `num_bytes` of the block. Raises ConfigError if there is no memory for
        it."""
        if self._free_N is None:
            # The system gives huge pages to a block this large, but not to each small copy.
            self._free_N = self._create_arena().reserve(self._num_bytes)
        bytes_N, self._free_N = self._free_N[:num_bytes], self._free_N[aligned(num_bytes) :]
        assert len(bytes_N) == num_bytes, "more packed copies than weights"
        return bytes_N


class ReusedArena:
    """Host memory for one copy of a device's weights, page-locked once and reused. The arena has
    one user at a time. A second user gets a new arena. Thread-safe: updates can be staged in one
    thread and committed in another."""

    def __init__(self, create_arena: Callable[[], HostArena]) -> None:
        self._create_arena, self._arena = create_arena, create_arena()
        self._user: Callable[[], object | None] = lambda: None
        self._lock = threading.Lock()

    def acquire(self, user: object) -> HostArena:
        """Return an arena for `user` alone, until `release(user)` or until `user` is freed."""
        with self._lock:
            if self._user() is not None:
                self._arena = self._create_arena()
            self._user = weakref.ref(user)
            return self._arena

    def release(self, user: object) -> None:
        """Let another user acquire the arena. No-op unless `user` acquired the arena last."""
        with self._lock:
            if self._user() is user:
                self._user = lambda: None


class StagingArena:
    """`StagingMemory` in one arena, which has room for each weight in the model's dtype.

    Weights are cast to the model's dtype and copied to the arena. A tensor for which the arena has
    no room, such as a weight under a second name, gets new memory. Sharded tensors, non-floating
    tensors and tensors that the model does not use are kept as by HostCopies, without a cast.
    """

    def __init__(
        self,
        arenas: ReusedArena,
        table: WeightTable,
        slots: Mapping[str, WeightSlot],
        chunk_bytes: int,
        hash_own: Callable[[Tensor, torch.dtype], Tensor] | None = None,
    ) -> None:
        """`slots` has the weights that can change. `chunk_bytes` is how many bytes are copied at
        once. `hash_own` computes `own_hashes`, the hashes of cast tensors from before the cast."""
        self._arenas, self._table, self._slots = arenas, table, slots
        self._chunk_bytes, self._hash_own = chunk_bytes, hash_own
        self._arena: HostArena | None = None
        self._free_N = torch.empty(0, dtype=torch.uint8)  # the unused end of the arena
        self._tensors: dict[str, Tensor] = {}
        self.own_hashes: dict[str, Tensor] = {}

    @torch.no_grad()
    def keep(self, name: str, tensor: Tensor, *, is_new: bool = False) -> Tensor:
        """Copy a tensor as `StagingMemory.keep` says. The first call acquires the arena. Raises
        ConfigError if the arena cannot be allocated."""
        if is_sharded(tensor) or not self._may_become_weight(name, tensor):
            return HOST_COPIES.keep(name, tensor, is_new=is_new)
        dtype = self._table.form(name)[1]
        if self._hash_own is not None and dtype != tensor.dtype:
            self.own_hashes[name] = self._hash_own(tensor, hashed_dtype(tensor.dtype))
        kept = self._tensors.get(name)  # reuse the memory of an earlier tensor of this name
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, dtype):
            kept = self._tensors[name] = self._allocate(tensor.shape, dtype)
        copy_by_rows(kept, tensor.detach(), self._chunk_bytes)
        return kept

    def has_any_of(self, values: Mapping[str, Tensor]) -> bool:
        """Return whether one of these tensors is in memory that `keep` allocated for a weight."""
        own = self._own_storages()
        return any(_storage(tensor) in own for tensor in values.values())

    def writable(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `values` in memory that can be overwritten. Tensors outside of this memory are
        copied."""
        own = self._own_storages()
        return {
            name: tensor if _storage(tensor) in own else self.keep(name, tensor)
            for name, tensor in values.items()
        }

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Release the arena if anything is raised inside the context."""
        try:
            yield
        except BaseException:  # its traceback can outlive the update
            self.release()
            raise

    def release(self) -> None:
        """Let another update acquire the arena. The arena's tensors are invalid afterwards."""
        self._arenas.release(self)

    def _own_storages(self) -> set[int]:
        return {_storage(tensor) for tensor in self._tensors.values()}

    def _may_become_weight(self, name: str, tensor: Tensor) -> bool:
        """Return whether the model has a weight or alias `name` and `tensor` is floating."""
        is_known = name in self._table.slots or name in self._table.aliases
        return is_known and not self._table.is_passed_over(name) and tensor.is_floating_point()

    def _allocate(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if self._arena is None:
            self._arena = self._arenas.acquire(self)
            # By address, so that tied weights count once.
            sizes = {slot.address: _kept_bytes(slot) for slot in self._slots.values()}
            self._free_N = self._arena.reserve(sum(map(aligned, sizes.values())))
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > len(self._free_N):
            return torch.empty(shape, dtype=dtype)
        bytes_N, self._free_N = self._free_N[:num_bytes], self._free_N[aligned(num_bytes) :]
        return bytes_N.view(dtype).view(shape)


def copy_by_rows(target: Tensor, source: Tensor, num_bytes: int) -> None:
    """Copy `source` to `target`, of the same shape, in ranges of rows of about `num_bytes` bytes.
    This keeps torch's temporary copies, such as for casts, small."""
    target, source = torch.atleast_1d(target), torch.atleast_1d(source)
    num_rows = rows_within(num_bytes, source)
    for to_rows, from_rows in zip(target.split(num_rows), source.split(num_rows), strict=True):
        to_rows.copy_(from_rows)


def rows_within(num_bytes: int, values: Tensor) -> int:
    """Return how many rows of `values` fit into `num_bytes` bytes, at least 1. Results above 64 are
    multiples of 64."""
    # Backends that pack rows write whole groups of 64 faster.
    num_rows = num_bytes * max(1, len(values)) // max(1, values.numel() * values.itemsize)
    return num_rows // _PACKED_ROWS * _PACKED_ROWS or max(1, num_rows)


def aligned(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to a multiple of 64, where values of any dtype can start."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _kept_bytes(slot: WeightSlot) -> int:
    shape = slot.shape if slot.cut is None else slot.cut.kept_shape
    return math.prod(shape) * slot.dtype.itemsize


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
