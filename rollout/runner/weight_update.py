"""What a weight update is, and the stateless checks that its tensors must pass."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rollout.backends.ops.fingerprint import EXPONENT_BITS
from rollout.errors import WeightUpdateError
from rollout.layers.weight_slot import WeightSlot
from rollout.models.lora import LoraAdapter
from rollout.models.plain_tensors import full_tensor, named_weights, refusal
from rollout.models.weights import is_computed

MAX_VERSION = 2**31 - 1
# A module gives its parameters and persistent buffers. An adapter changes some weights only.
NamedTensors = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | LoraAdapter
Fingerprint = Sequence[int]  # hash, number of non-finite values


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateReport:
    """A committed update.

    version: the version served from now on. seconds: the time of staging and commit together.
    stall_seconds: the time from the end of the last step under the old version to the moment when
    the first step under the new version can begin; if no request could run, the time of the commit
    alone. num_bytes: bytes written to the model's weights. checksum: of all weights, 16 hex digits.
    """

    version: int
    seconds: float
    stall_seconds: float
    num_bytes: int
    checksum: str


def next_version(current: int, version: int | None) -> int:
    """Return the version that an update gets: `version`, or current + 1 if that is None.

    Raises WeightUpdateError unless it is above the current one.
    """
    if version is None:
        return current + 1
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


def by_name(named_tensors: NamedTensors) -> dict[str, Tensor]:
    """Return the tensors of a source by name, unchanged.

    Raises WeightUpdateError where reading the source fails, or if a name comes twice.
    """
    if isinstance(named_tensors, nn.Module):
        return named_weights(named_tensors)
    if isinstance(named_tensors, LoraAdapter):
        return dict(named_tensors.tensors)
    if isinstance(named_tensors, Mapping):
        return dict(named_tensors)
    source: dict[str, Tensor] = {}
    pairs = iter(named_tensors)
    while True:
        with blaming(f"the source, after {_listing([*source][-1:]) or 'no tensor at all'},"):
            pair = next(pairs, None)
        if pair is None:
            return source
        name, tensor = pair
        if source.setdefault(name, tensor) is not tensor:
            raise WeightUpdateError(f"{name!r} comes twice in the update; send it once")


def checked_source(
    named_tensors: NamedTensors, slots: Mapping[str, WeightSlot]
) -> dict[str, Tensor]:
    """Return the whole tensors of a source whose names, shapes and dtypes fit the model's `slots`.

    Sharded tensors are gathered in the order of their names: a collective of all ranks that hold a
    part. Tables that a model computes are left out. Raises WeightUpdateError naming the tensor.
    """
    given = by_name(named_tensors)
    source = {name: tensor for name, tensor in given.items() if not is_computed(name)}
    _check_names(source, slots)
    for name, tensor in source.items():
        with blaming(f"checking {name!r}"):
            _check_form(name, tensor, slots[name])
    full: dict[str, Tensor] = {}
    for name in sorted(source):
        with blaming(f"gathering {name!r}"):
            full[name] = full_tensor(source[name])
    return {name: full[name] for name in source}


def _check_names(source: Mapping[str, Tensor], slots: Mapping[str, WeightSlot]) -> None:
    if extra := sorted(source.keys() - slots.keys()):
        raise WeightUpdateError(
            f"the update has {len(extra)} tensors that the model lacks ({_listing(extra)}); "
            "send the parameters of the same architecture under their Hugging Face names. A buffer "
            "that is the trainer's own: leave it out, pushing a mapping instead of the module. An "
            "adapter: push LoraAdapter.from_peft(model)"
        )
    given = {slots[name].address for name in source}
    missing = [name for name, slot in slots.items() if slot.address not in given]
    if missing:
        raise WeightUpdateError(
            f"the update lacks {len(missing)} of the model's tensors ({_listing(missing)}); "
            "send all parameters at once"
        )


def _check_form(name: str, tensor: Tensor, slot: WeightSlot) -> None:
    """Refuse a tensor that cannot become the slot's values, whatever its own values are."""
    if reason := refusal(tensor):
        raise WeightUpdateError(f"{name!r} {reason}")
    if tensor.shape != slot.shape:
        raise WeightUpdateError(
            f"{name!r} has shape {list(tensor.shape)}, but the model's is {list(slot.shape)}"
        )
    if tensor.dtype != slot.dtype and not tensor.is_floating_point():
        raise WeightUpdateError(
            f"{name!r} has dtype {tensor.dtype}, which cannot become the model's {slot.dtype}; "
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
    fingerprints: Mapping[str, Fingerprint], dtypes: Mapping[str, torch.dtype]
) -> None:
    """Raise WeightUpdateError naming a tensor that holds NaN or infinity in its dtype."""
    for name, (_, num_bad) in fingerprints.items():
        if num_bad:
            raise WeightUpdateError(
                f"{name!r} holds NaN or infinity (as {dtypes[name]}); the serving weights are "
                "kept. reject_non_finite_weights=False would let it pass"
            )


def checked_origins(
    slots: Mapping[str, WeightSlot],
    fingerprints: Mapping[str, Fingerprint],
    *,
    reject_non_finite: bool,
) -> dict[str, str]:
    """Return, for each of the model's weights, the name of the source's tensor for it.

    Tied weights have the same origin. `fingerprints` are those of the source, in the model's
    dtypes. Raises WeightUpdateError for NaN and infinity if `reject_non_finite`, and for tensors
    that are tied in the model and differ in the source.
    """
    if reject_non_finite:
        check_finite(fingerprints, {name: slot.dtype for name, slot in slots.items()})
    chosen: dict[int, str] = {}
    for name, fingerprint in fingerprints.items():
        first = chosen.setdefault(slots[name].address, name)
        if fingerprint != fingerprints[first]:
            raise WeightUpdateError(
                f"{name!r} and {first!r} are tied in this model, but the update gives them "
                "different values; send one of them, or equal ones"
            )
    return {name: chosen[slot.address] for name, slot in slots.items()}


def check_checksum(fingerprints: Mapping[str, Fingerprint], announced: str) -> None:
    """Raise WeightUpdateError unless the tensors that arrived have the checksum `announced`."""
    checksum = checksum_of(fingerprints)
    if checksum != announced:
        raise WeightUpdateError(
            f"the tensors that came have the checksum {checksum}, not {announced} as announced; "
            "the serving weights are kept"
        )


def hashed_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what a tensor is cast to for the fingerprint of its own values: mostly its dtype."""
    is_known = not dtype.is_floating_point or dtype in EXPONENT_BITS
    return dtype if is_known else torch.float32  # holds each value of the 8-bit ones


def checksum_of(fingerprints: Mapping[str, Fingerprint]) -> str:
    """Return BLAKE2b, 16 hex digits, over sorted names and their hashes."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(fingerprints):
        digest.update(f"{name}\0{fingerprints[name][0]}\n".encode())
    return digest.hexdigest()


def _listing(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")
