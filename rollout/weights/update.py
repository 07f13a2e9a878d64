"""What a weight update is, and the stateless checks that its tensors must pass."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rollout.errors import WeightUpdateError
from rollout.layers.weight_slot import WeightSlot, part_of
from rollout.models.plain_tensors import (
    GatherBuffer,
    full_tensor,
    is_sharded,
    named_weights,
    refusal,
)
from rollout.models.weights import WeightTable
from rollout.weights.lora import LoraAdapter
from rollout.weights.stream import WeightStream

MAX_VERSION = 2**31 - 1
# A module gives its parameters and persistent buffers. An adapter changes some weights only.
NamedTensors = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | LoraAdapter
Fingerprint = Sequence[int]  # hash, number of non-finite values


class Piece(NamedTuple):
    """One of the model's weights in a source: the whole tensor of its name, or a part of one."""

    weight: str
    tensor: str

    def __str__(self) -> str:
        part = "" if self.weight == self.tensor else f" ({self.weight!r} in it)"
        return f"{self.tensor!r}{part}"


def next_version(current: int, version: int | None) -> int:
    """Return the version that an update gets: `version`, or current + 1 if that is None.

    Raises WeightUpdateError unless it is above the current one.
    """
    if version is None:
        version = current + 1
    if isinstance(version, bool) or not isinstance(version, int) or version > MAX_VERSION:
        raise WeightUpdateError(
            f"version={version!r} must be an integer of at most {MAX_VERSION}, for tensors of "
            "versions are int32; count updates rather than time"
        )
    if version <= current:
        raise WeightUpdateError(
            f"version={version} must be above the serving version {current}: a number never names "
            "two different weights"
        )
    return version


# ---- the tensors of a source


class Holder(Protocol):
    """Has memory for the values of an update that no place of their own keeps until its commit.

    `own_hashes`: of tensors that it has cast, as they came.
    """

    @property
    def own_hashes(self) -> Mapping[str, Tensor]: ...

    def hold(self, name: str, tensor: Tensor, *, is_new: bool = False) -> Tensor:
        """Return the values of a tensor that came as `name`, or belong to the weight of this name,
        in memory of the host that lasts; perhaps in the model's dtype already. `is_new`: nobody
        else has the tensor.
        """
        ...

    def released_on_error(self) -> AbstractContextManager[None]:
        """Let others have the memory if anything is raised inside: the error may live on."""
        ...


class HostCopies:
    """Implements `Holder` with memory of its own for each tensor, in the dtype that it has."""

    own_hashes: Mapping[str, Tensor] = MappingProxyType({})

    def hold(self, name: str, tensor: Tensor, *, is_new: bool = False) -> Tensor:
        return (tensor if is_new else lasting(tensor)).cpu()

    def released_on_error(self) -> AbstractContextManager[None]:
        return nullcontext()


HOST_COPIES = HostCopies()
_REMEDY = "pass the module, module.named_parameters() or a mapping of names to tensors"


def _require_name(name: object) -> None:
    if not isinstance(name, str):
        raise WeightUpdateError(f"the name {name!r:.200} of a weight must be a string; {_REMEDY}")


def by_name(named_tensors: NamedTensors, holder: Holder = HOST_COPIES) -> dict[str, Tensor]:
    """Return the tensors of a source by name, unchanged.

    What an iterator yields is given to `holder`, unless it is a parameter, which lasts. Raises
    WeightUpdateError where reading the source fails, or if a name comes twice.
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
    source: dict[str, Tensor] = {}
    for name, tensor in _BlamedPairs(named_tensors):
        with blaming(f"copying {name!r}"):
            held = holder.hold(name, tensor) if copies and not _lasts(tensor) else tensor
        if source.setdefault(name, held) is not held:
            raise WeightUpdateError(f"{name!r} comes twice in the update; send it once")
    return source


def streamed(named_tensors: NamedTensors) -> WeightStream:
    """Return the tensors of a source as a stream, in an order that all ranks of a trainer share.

    A module, a mapping, an adapter or a list comes in the order of names, and sharded tensors are
    gathered when their turn comes; an iterator comes in its own order, and is not read ahead. A
    stream is returned as it is. Reading it raises WeightUpdateError naming a tensor that cannot be
    read, or whose name comes twice.
    """
    if isinstance(named_tensors, WeightStream):
        return named_tensors
    if isinstance(named_tensors, Iterator):
        return WeightStream(_whole_in_turn(named_tensors), lasts=False)
    tensors = by_name(named_tensors)
    is_gathered = any(map(is_sharded, tensors.values()))
    return WeightStream(_whole_by_name(tensors), lasts=not is_gathered)


def _whole_in_turn(pairs: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    names: set[str] = set()
    gathered = GatherBuffer()

    def whole(pair: tuple[str, Tensor]) -> tuple[str, Tensor]:
        name, tensor = pair
        if name in names:
            raise WeightUpdateError(f"{name!r} comes twice in the update; send it once")
        names.add(name)
        return name, _whole(name, tensor, gathered)

    return map(whole, _BlamedPairs(pairs))  # a loop would hold a tensor while the next is gathered


def _whole_by_name(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():  # before the first one is gathered
        if reason := refusal(tensor):
            raise WeightUpdateError(f"{name!r} {reason}")
    gathered = GatherBuffer()
    for name in sorted(tensors):
        yield name, _whole(name, tensors[name], gathered)


def _whole(name: str, tensor: Tensor, gathered: GatherBuffer) -> Tensor:
    if reason := refusal(tensor):
        raise WeightUpdateError(f"{name!r} {reason}")
    with blaming(f"gathering {name!r}"):
        return gathered.whole(tensor)


def lasting(tensor: Tensor) -> Tensor:
    """Return a copy of what a stream yields, which may use its memory again for the next one.

    A parameter lasts by itself, and what cannot be read is returned as it is.
    """
    return tensor if _lasts(tensor) else tensor.detach().clone()


def _lasts(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or refusal(tensor) is not None


class _BlamedPairs(Iterator[tuple[str, Tensor]]):
    """The pairs of a source, none of which it holds.

    Where reading fails, it raises WeightUpdateError naming the last one before.
    """

    def __init__(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        self._pairs, self._last = iter(pairs), "no tensor at all"

    def __next__(self) -> tuple[str, Tensor]:
        with blaming(f"the source, after {self._last},"):
            pair = next(self._pairs, None)
        if pair is None:
            raise StopIteration
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise WeightUpdateError(
                f"named_tensors yields a {type(pair).__name__}, not (name, tensor); {_REMEDY}"
            )
        _require_name(pair[0])
        self._last = repr(pair[0])
        return pair


def checked_source(
    named_tensors: NamedTensors, table: WeightTable, holder: Holder
) -> dict[str, Tensor]:
    """Return the whole tensors of a source whose names, shapes and dtypes fit the model's `table`.

    Sharded tensors are gathered in the order of their names, a collective of all ranks that hold a
    part, and given to `holder`. What the model computes itself, or does not use, is left out.
    Raises WeightUpdateError naming the tensor.
    """
    given = by_name(named_tensors, holder)
    source = {name: tensor for name, tensor in given.items() if not table.is_passed_over(name)}
    _check_names(source, table)
    for name, tensor in source.items():
        with blaming(f"checking {name!r}"):
            _check_form(name, tensor, table)
    full: dict[str, Tensor] = {}
    for name in sorted(source):
        with blaming(f"gathering {name!r}"):
            full[name] = _whole_and_held(name, source[name], holder)
    return {name: full[name] for name in source}


def _whole_and_held(name: str, tensor: Tensor, holder: Holder) -> Tensor:
    whole, is_new = full_tensor(tensor), is_sharded(tensor) or tensor.is_neg()
    return holder.hold(name, whole, is_new=True) if is_new else whole


def pieces_of(source: Mapping[str, Tensor], table: WeightTable) -> dict[Piece, Tensor]:
    """Return the values of each of the model's weights in the tensors of a source: views."""
    return {
        Piece(weight, name): part_of(tensor, index)
        for name, tensor in source.items()
        for weight, index in table.parts(name).items()
    }


def _check_names(source: Mapping[str, Tensor], table: WeightTable) -> None:
    if extra := table.unknown(source.keys()):
        raise WeightUpdateError(
            f"the update has {len(extra)} tensors that the model lacks ({_listing(extra)}); "
            "send the parameters of the same architecture under their Hugging Face names. A buffer "
            "that is the trainer's own: leave it out, pushing a mapping instead of the module. An "
            "adapter: push LoraAdapter.from_peft(model)"
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
    """Refuse a tensor that cannot become the model's, whatever its own values are."""
    if reason := refusal(tensor):
        raise WeightUpdateError(f"{name!r} {reason}")
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


@contextmanager
def blaming(culprit: str) -> Iterator[None]:
    """Turn any failure inside into a WeightUpdateError that names `culprit`."""
    try:
        yield
    except WeightUpdateError:
        raise
    except Exception as error:
        raise WeightUpdateError(
            f"{culprit} failed with {type(error).__name__}: {error}; the serving weights are kept"
        ) from error


# ---- their values, by fingerprint


def check_finite(
    fingerprints: Mapping[Piece, Fingerprint], dtypes: Mapping[Piece, torch.dtype]
) -> None:
    """Raise WeightUpdateError naming a piece that holds NaN or infinity in its dtype."""
    for piece, (_, num_bad) in fingerprints.items():
        if num_bad:
            raise WeightUpdateError(
                f"{piece} holds NaN or infinity (as {dtypes[piece]}); the serving weights are "
                "kept. reject_non_finite_weights=False would let it pass"
            )


def origins_of(slots: Mapping[str, WeightSlot], pieces: Iterable[Piece]) -> dict[str, Piece]:
    """Return, for each of the model's weights, the piece of the source that becomes it: the first.

    Tied weights have the same one.
    """
    chosen: dict[int, Piece] = {}
    for piece in pieces:
        chosen.setdefault(slots[piece.weight].address, piece)
    return {name: chosen[slot.address] for name, slot in slots.items()}


def checked_origins(
    slots: Mapping[str, WeightSlot],
    fingerprints: Mapping[Piece, Fingerprint],
    *,
    reject_non_finite: bool,
) -> dict[str, Piece]:
    """Return the `origins_of` pieces with these fingerprints, in the dtypes of the model.

    Raises WeightUpdateError for NaN and infinity if `reject_non_finite`, and for pieces of the same
    or tied weights that differ.
    """
    if reject_non_finite:
        check_finite(fingerprints, {piece: slots[piece.weight].dtype for piece in fingerprints})
    origins = origins_of(slots, fingerprints)
    for piece, fingerprint in fingerprints.items():
        first = origins[piece.weight]
        if fingerprint != fingerprints[first]:
            same = "the same weight" if first.weight == piece.weight else "tied in this model"
            raise WeightUpdateError(
                f"{piece} and {first} are {same}, but the update gives them "
                "different values; send one of them, or equal ones"
            )
    return origins


def check_checksum(fingerprints: Mapping[str, Fingerprint], announced: str) -> None:
    """Raise WeightUpdateError unless the tensors that arrived have the checksum `announced`."""
    checksum = checksum_of(fingerprints)
    if checksum != announced:
        raise WeightUpdateError(
            f"the tensors that came have the checksum {checksum}, not {announced} as announced; "
            "the serving weights are kept"
        )


def checksum_of(fingerprints: Mapping[str, Fingerprint]) -> str:
    """Return BLAKE2b, 16 hex digits, over sorted names and their hashes."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(fingerprints):
        digest.update(f"{name}\0{fingerprints[name][0]}\n".encode())
    return digest.hexdigest()


def _listing(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")
