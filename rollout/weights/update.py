"""Weight updates: NamedTensors, the types in which a trainer gives weights, and their checks.

Used by ServedWeights and the other modules of `rollout.weights`, by the weight transports, and by
`trainer_hooks.weight_sync`. All interfaces that take an update import NamedTensors from here: in
`rollout.apis`, `rollout.engine`, `rollout.worker`, `rollout.tensor_parallel`, `rollout.serve`,
`rollout.testing`, `rollout_vllm` and `rollout.coordinator.agent`. Reads and copies tensors, but
changes none.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType, TracebackType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rollout.errors import WeightUpdateError, utf8_text
from rollout.layers.weight_slot import part_of
from rollout.models.plain_tensors import (
    GatherBuffer,
    full_tensor,
    is_sharded,
    named_weights,
    refusal,
)
from rollout.models.weights import WeightTable
from rollout.weights.lora import LoraAdapter

# A module stands for its parameters and persistent buffers. An adapter changes some weights only.
NamedTensors = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | LoraAdapter
_logger = logging.getLogger(__name__)
Fingerprint = Sequence[int]  # (hash, number of non-finite values)


class Origin(NamedTuple):
    """Says that the update's tensor `tensor`, or a part of it, gives the weight `weight` its
    values."""

    weight: str
    tensor: str

    def __str__(self) -> str:
        part = "" if self.weight == self.tensor else f" ({self.weight!r} in it)"
        return f"{self.tensor!r}{part}"


class blaming:
    """A context manager that turns any Exception inside it into a WeightUpdateError. The error says
    "`culprit` failed with ...". A loop can set `culprit` for each tensor. WeightUpdateErrors are
    not changed."""

    __slots__ = ("culprit",)

    def __init__(self, culprit: str = "") -> None:
        self.culprit = culprit

    def __enter__(self) -> blaming:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, WeightUpdateError):
            reason = f"{type(error).__name__}: {error}"
            raise WeightUpdateError(
                f"{self.culprit} failed with {reason}; the serving weights are kept"
            ) from error


# ---- a stream of tensors


class WeightStream(Iterator[tuple[str, Tensor]]):
    """An iterator of (Hugging Face name, whole plain tensor), which is read once.

    If `lasts`, all tensors stay valid. Otherwise a tensor is valid until the next one is read, when
    its memory can be freed or reused. Tensors can require gradients. If tensors are sharded, each
    step is a collective of all ranks. A reader that stops early must then call `drain`, so that the
    other ranks are not blocked.
    """

    def __init__(self, pairs: Iterator[tuple[str, Tensor]], *, lasts: bool) -> None:
        self._pairs = pairs
        self.lasts = lasts

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._pairs)

    def drain(self) -> None:
        """Read and drop the remaining tensors. An error while reading ends the stream and is
        logged. No-op at the end of the stream."""
        try:
            for _ in self._pairs:
                pass
        except Exception as error:  # the reader raises its own error
            _logger.warning("the rest of a trainer's weights could not be gathered: %s", error)


# ---- memory for tensors that may not stay valid


class StagingMemory(Protocol):
    """Host memory for tensors of an update that would not stay valid until its commit. `own_hashes`
    has the hashes of tensors that `keep` has cast, from before the cast, by name."""

    @property
    def own_hashes(self) -> Mapping[str, Tensor]: ...

    def keep(self, name: str, tensor: Tensor, *, is_new: bool = False) -> Tensor:
        """Return the values of `tensor` in host memory that stays valid. The result can have
        another dtype. `name` is the name of the tensor, or of the weight that gets its values. A
        tensor with `is_new` is not copied, because nothing else refers to it."""
        ...

    def released_on_error(self) -> AbstractContextManager[None]:
        """Return a context manager that releases the memory if anything is raised inside it."""
        ...


class HostCopies:
    """`StagingMemory` that gives each tensor its own host memory, and keeps its dtype."""

    own_hashes: Mapping[str, Tensor] = MappingProxyType({})

    def keep(self, name: str, tensor: Tensor, *, is_new: bool = False) -> Tensor:
        return (tensor if is_new else lasting(tensor)).cpu()

    def released_on_error(self) -> AbstractContextManager[None]:
        return nullcontext()


HOST_COPIES = HostCopies()


def lasting(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor from an iterator, which can reuse the tensor's memory. Parameters,
    which stay valid, and tensors that cannot be read are returned themselves."""
    return tensor if _lasts(tensor) else tensor.detach().clone()


def _lasts(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or refusal(tensor) is not None


# ---- the tensors of an update

_REMEDY = "pass the module, module.named_parameters() or a mapping of names to tensors"


def by_name(named_tensors: NamedTensors, memory: StagingMemory = HOST_COPIES) -> dict[str, Tensor]:
    """Return the tensors of an update by name.

    Tensors of an iterator are copied to `memory`. Parameters, and tensors of a WeightStream whose
    `lasts` is True, are not copied. Raises WeightUpdateError for a value of another type, an
    invalid name, a name that comes twice, and if reading fails.
    """
    if isinstance(named_tensors, nn.Module):
        return named_weights(named_tensors)
    if isinstance(named_tensors, LoraAdapter):
        return dict(named_tensors.tensors)
    if isinstance(named_tensors, Mapping):
        for name in named_tensors:
            _require_name(name)
        return dict(named_tensors)
    if isinstance(named_tensors, str | Tensor) or not isinstance(named_tensors, Iterable):
        raise WeightUpdateError(f"named_tensors is a {type(named_tensors).__name__}; {_REMEDY}")
    is_read_once = isinstance(named_tensors, Iterator)
    copies = is_read_once and not (isinstance(named_tensors, WeightStream) and named_tensors.lasts)
    tensors: dict[str, Tensor] = {}
    with blaming() as blame:
        for name, tensor in _Pairs(named_tensors):
            blame.culprit = f"copying {name!r}"
            kept = memory.keep(name, tensor) if copies and not _lasts(tensor) else tensor
            if tensors.setdefault(name, kept) is not kept:
                raise WeightUpdateError(f"{name!r} comes twice in the update; send it once")
    return tensors


def streamed(named_tensors: NamedTensors) -> WeightStream:
    """Return the tensors of an update as a stream, in the same order on all ranks of a trainer.

    A module, mapping, adapter or list is read in the order of names, and an iterator in its own
    order. Sharded tensors are gathered when they are read. A WeightStream is returned itself.
    Reading raises WeightUpdateError for a tensor that cannot be read and for a name that comes
    twice.
    """
    if isinstance(named_tensors, WeightStream):
        return named_tensors
    if isinstance(named_tensors, Iterator):
        return WeightStream(_whole_in_turn(named_tensors), lasts=False)
    tensors = by_name(named_tensors)
    is_gathered = any(map(is_sharded, tensors.values()))
    return WeightStream(_whole_by_name(tensors, is_gathered), lasts=not is_gathered)


def _whole_in_turn(pairs: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    names: set[str] = set()
    buffer = GatherBuffer()

    def whole(pair: tuple[str, Tensor]) -> tuple[str, Tensor]:
        name, tensor = pair
        if name in names:
            raise WeightUpdateError(f"{name!r} comes twice in the update; send it once")
        names.add(name)
        _require_readable(name, tensor)
        with blaming(f"gathering {name!r}"):
            return name, buffer.whole(tensor)

    return map(whole, _Pairs(pairs))  # a loop would refer to a tensor while the next is gathered


def _whole_by_name(
    tensors: Mapping[str, Tensor], is_gathered: bool
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():  # before the first collective
        _require_readable(name, tensor)
    buffer = GatherBuffer()
    for name in sorted(tensors):
        with blaming(f"gathering {name!r}"):
            whole = buffer.whole(tensors[name]) if is_gathered else full_tensor(tensors[name])
        yield name, whole


def _require_readable(name: str, tensor: Tensor) -> None:
    if reason := refusal(tensor):
        raise WeightUpdateError(f"{name!r} {reason}")


def _require_name(name: object) -> None:
    if not isinstance(name, str) or utf8_text(name) != name:
        raise WeightUpdateError(
            f"the name {name!r:.200} of a weight must be a string that UTF-8 can carry; {_REMEDY}"
        )


class _Pairs(Iterator[tuple[str, Tensor]]):
    """An iterator over checked (name, tensor) pairs. It keeps no reference to a returned tensor.
    Raises WeightUpdateError for any other item. If reading fails, the error names the last tensor
    read."""

    def __init__(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        self._pairs, self._last = iter(pairs), "no tensor at all"

    def __next__(self) -> tuple[str, Tensor]:
        try:
            pair = next(self._pairs)
        except (StopIteration, WeightUpdateError):
            raise
        except Exception as error:
            with blaming(f"the source, after {self._last},"):
                raise error
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise WeightUpdateError(
                f"named_tensors yields a {type(pair).__name__}, not (name, tensor); {_REMEDY}"
            )
        _require_name(pair[0])
        self._last = repr(pair[0])
        return pair


# ---- checks of names, shapes and dtypes


def checked_source(
    named_tensors: NamedTensors, table: WeightTable, memory: StagingMemory
) -> dict[str, Tensor]:
    """Return an update's tensors by name, whole, after a check of names, shapes and dtypes.

    Sharded tensors are gathered in the order of their names, a collective of all ranks of their
    mesh, and kept in `memory`. Tensors that the model computes itself or does not use are left out.
    Raises WeightUpdateError for tensors that do not fit `table`, and for missing tensors.
    """
    given = by_name(named_tensors, memory)
    source = {name: tensor for name, tensor in given.items() if not table.is_passed_over(name)}
    _check_names(source, table)
    with blaming() as blame:
        for name, tensor in source.items():
            blame.culprit = f"checking {name!r}"
            _check_form(name, tensor, table)
        whole: dict[str, Tensor] = {}
        for name in sorted(source):
            blame.culprit = f"gathering {name!r}"
            tensor = source[name]
            whole[name] = full_tensor(tensor)
            if whole[name] is not tensor and (is_sharded(tensor) or tensor.is_neg()):
                whole[name] = memory.keep(name, whole[name], is_new=True)
    return {name: whole[name] for name in source}


def parts_by_origin(source: Mapping[str, Tensor], table: WeightTable) -> dict[Origin, Tensor]:
    """Return views of each weight's values in the tensors `source` of an update."""
    return {
        Origin(weight, name): part_of(tensor, index)
        for name, tensor in source.items()
        for weight, index in table.parts(name).items()
    }


def _check_names(source: Mapping[str, Tensor], table: WeightTable) -> None:
    if extra := table.unknown(source.keys()):
        raise WeightUpdateError(
            f"the update has {len(extra)} tensors that the model lacks ({_listing(extra)}); "
            "send the parameters of the same architecture under their Hugging Face names. To leave "
            "out a buffer of the trainer's own, push a mapping, not the module. For an adapter "
            "push LoraAdapter.from_peft(model)"
        )
    if missing := table.missing(source.keys()):
        remedy = "send all parameters at once"
        if table.buffers.issuperset(missing):
            remedy = (
                "these are buffers, which named_parameters() leaves out: send state_dict(), or the "
                "module itself"
            )
        raise WeightUpdateError(
            f"the update lacks {len(missing)} of the model's tensors ({_listing(missing)}); "
            f"{remedy}"
        )


def _check_form(name: str, tensor: Tensor, table: WeightTable) -> None:
    _require_readable(name, tensor)
    shape, dtype = table.form(name)
    if tensor.shape != shape:
        raise WeightUpdateError(
            f"{name!r} has shape {list(tensor.shape)}, but the model's is {list(shape)}"
        )
    if tensor.dtype != dtype and not tensor.is_floating_point():
        raise WeightUpdateError(
            f"{name!r} has dtype {tensor.dtype}, which cannot become the model's {dtype}; "
            "send a floating dtype"
        )


def _listing(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")


# ---- checks of values, by fingerprint


def check_finite(
    fingerprints: Mapping[Origin, Fingerprint], dtypes: Mapping[Origin, torch.dtype]
) -> None:
    """Raise WeightUpdateError naming a tensor with NaN or infinity, by the count in its
    fingerprint. `dtypes` has the dtype in which each fingerprint was taken."""
    for origin, (_, num_bad) in fingerprints.items():
        if num_bad:
            raise WeightUpdateError(
                f"{origin} holds NaN or infinity (as {dtypes[origin]}); the serving weights are "
                "kept. reject_non_finite_weights=False accepts it"
            )


def origins_of(table: WeightTable, origins: Iterable[Origin]) -> dict[str, Origin]:
    """Return, by the weight's name, the first of `origins` that gives a weight its values. Tied
    weights have the same origin."""
    addresses = table.addresses()
    chosen: dict[int, Origin] = {}
    for origin in origins:
        chosen.setdefault(addresses[origin.weight], origin)
    return {name: chosen[address] for name, address in addresses.items()}


def check_values(
    table: WeightTable,
    fingerprints: Mapping[Origin, Fingerprint],
    origins: Mapping[str, Origin],
    *,
    reject_non_finite: bool,
) -> None:
    """Check the values of a full update by their fingerprints in the model's dtypes. `origins` is
    the result of `origins_of`. Raises WeightUpdateError if the update gives two different values to
    a weight or to tied weights, and for NaN or infinity if `reject_non_finite`."""
    if reject_non_finite and any(num_bad for _, num_bad in fingerprints.values()):
        check_finite(fingerprints, {each: table.slots[each.weight].dtype for each in fingerprints})
    for origin, fingerprint in fingerprints.items():
        first = origins[origin.weight]
        if fingerprint != fingerprints[first]:
            same = "the same weight" if first.weight == origin.weight else "tied in this model"
            raise WeightUpdateError(
                f"{origin} and {first} are {same}, but the update gives them "
                "different values; send one of them, or equal ones"
            )


def check_checksum(fingerprints: Mapping[str, Fingerprint], announced: str) -> None:
    checksum = checksum_of(fingerprints)
    if checksum != announced:
        raise WeightUpdateError(
            f"the tensors that arrived have the checksum {checksum}, not {announced} as announced; "
            "the serving weights are kept"
        )


def checksum_of(fingerprints: Mapping[str, Fingerprint]) -> str:
    """Return a checksum of tensors: BLAKE2b over their sorted names and hashes, 16 hex digits."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(fingerprints):
        digest.update(f"{name}\0{fingerprints[name][0]}\n".encode())
    return digest.hexdigest()
