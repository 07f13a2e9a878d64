"""Weight updates as transactions: verify everything first, then copy in place, or go back."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rollout.backends.base import Ops
from rollout.backends.ops.fingerprint import EXPONENT_BITS
from rollout.errors import WeightUpdateError
from rollout.models.backup import WeightBackup
from rollout.models.causal_lm import CausalLM
from rollout.models.plain_tensors import full_tensor, named_weights, refusal
from rollout.models.weights import is_computed

MAX_VERSION = 2**31 - 1
# Of a module: its parameters and persistent buffers.
NamedTensors = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Fingerprint = Sequence[int]  # hash, number of non-finite values


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateReport:
    """A committed update. `seconds`: of staging and commit. `stall_seconds`: from the end of the
    last step under the old version to the moment when the first one under the new version can
    begin; if nothing could run, of the commit alone.
    """

    version: int
    seconds: float
    stall_seconds: float
    num_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedWeights:
    """A verified update: source tensors that fit the model, tied ones once.

    They are not copied. `packed` holds what had to be prepared of them, `backup` the weights that
    were served after `num_writes` writes. `started_at`: when staging began, of time.perf_counter.
    """

    tensors: Mapping[str, Tensor]
    packed: Sequence[Any]
    backup: WeightBackup
    num_writes: int
    checksum: str
    started_at: float
    seconds: float


class WeightUpdater:
    """The only writer of the model's weights, in place: captured graphs stay valid."""

    def __init__(self, model: CausalLM, ops: Ops, *, reject_non_finite: bool) -> None:
        self._model, self._ops = model, ops
        self._reject_non_finite = reject_non_finite
        self._num_writes = 0

    @torch.no_grad()
    def stage(
        self,
        named_tensors: NamedTensors,
        check: Callable[[], None] = lambda: None,
        source_checksum: str = "",
    ) -> StagedWeights:
        """Check names, shapes, dtypes and values, pack, and back up; the model is not touched.

        The host waits for each device once. Sharded tensors are gathered, in the order of their
        names, which is a collective of all ranks that hold a part. `check` is called before each
        tensor, and may raise to end staging. source_checksum: what `checksum_of` must be of the
        tensors as they come, "" if not known. Raises WeightUpdateError naming the tensor at fault
        and what was expected of it.
        """
        start = time.perf_counter()
        num_writes = self._num_writes
        views = self._model.weight_views()
        given = by_name(named_tensors)
        source = {name: tensor for name, tensor in given.items() if not is_computed(name)}
        _check_names(source, views)
        for name, tensor in source.items():
            with _blaming(f"checking {name!r}"):
                _check_form(name, tensor, views[name])
        source = _gathered(source)
        dtypes = {name: view.dtype for name, view in views.items()}
        fingerprints = self._fingerprints(source, dtypes, check)
        if source_checksum:
            self._check_source(source, fingerprints, dtypes, source_checksum, check)
        chosen: dict[int, str] = {}
        for name in source:
            first = chosen.setdefault(views[name].data_ptr(), name)
            self._check_values(name, first, fingerprints, dtypes[name])
        tensors = {name: source[name] for name in chosen.values()}
        origins = {name: chosen[view.data_ptr()] for name, view in views.items()}
        return StagedWeights(
            tensors=tensors,
            packed=self._pack({name: source[origin] for name, origin in origins.items()}, check),
            backup=WeightBackup(self._model),
            num_writes=num_writes,
            checksum=checksum_of({name: fingerprints[o] for name, o in origins.items()}),
            started_at=start,
            seconds=time.perf_counter() - start,
        )

    def backup_for(self, staged: StagedWeights) -> WeightBackup:
        """The weights as they are now: those backed up while staging, unless written to since."""
        backup = staged.backup
        if staged.num_writes != self._num_writes:
            backup = WeightBackup(self._model)
        backup.keep_packed()
        return backup

    @torch.no_grad()
    def write(self, staged: StagedWeights) -> int:
        """Copy in place and take the packed copies. Returns bytes written.

        On an exception old and new weights are mixed; `backup_for`, called before, can undo that.
        """
        self._num_writes += 1
        views = self._model.weight_views()
        num_bytes = 0
        for name, tensor in staged.tensors.items():
            with _blaming(f"copying {name!r}"):
                views[name].copy_(tensor)
            num_bytes += views[name].nbytes
        with _blaming("taking the packed copies"):
            self._model.refresh(staged.packed)
        return num_bytes

    def checksum(self) -> str:
        """Hash of names and bits of all weights: equal weights, equal checksum on any device."""
        views = self._model.weight_views()
        dtypes = {name: view.dtype for name, view in views.items()}
        return checksum_of(self._fingerprints(views, dtypes))

    def _fingerprints(
        self,
        tensors: Mapping[str, Tensor],
        dtypes: Mapping[str, torch.dtype],
        check: Callable[[], None] = lambda: None,
    ) -> dict[str, Fingerprint]:
        """Of each tensor, cast to its dtype in `dtypes`: computed where it is, fetched with one
        copy a device. A source may be elsewhere than the model. Raises WeightUpdateError naming the
        tensor.
        """
        queued: dict[torch.device, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            check()
            with _blaming(f"checking {name!r}"):
                fingerprint = self._ops.fingerprint(tensor, dtypes[name])
                queued.setdefault(tensor.device, {})[name] = fingerprint
        fetched: dict[str, Fingerprint] = {}
        for device, by_name in queued.items():
            with _blaming(f"checking the tensors on {device}"):
                rows = torch.stack([*by_name.values()]).cpu().tolist()
            fetched |= zip(by_name, rows, strict=True)
        return fetched

    def _check_source(
        self,
        source: Mapping[str, Tensor],
        fingerprints: Mapping[str, Fingerprint],
        dtypes: Mapping[str, torch.dtype],
        source_checksum: str,
        check: Callable[[], None],
    ) -> None:
        """Refuse tensors other than those announced. Only those that are cast are read again."""
        own = {name: hashed_dtype(tensor.dtype) for name, tensor in source.items()}
        cast = {name: tensor for name, tensor in source.items() if own[name] != dtypes[name]}
        checksum = checksum_of(
            {name: fingerprints[name] for name in source} | self._fingerprints(cast, own, check)
        )
        if checksum != source_checksum:
            raise WeightUpdateError(
                f"the tensors that came have the checksum {checksum}, not {source_checksum} as "
                "announced; the serving weights are kept"
            )

    def _check_values(
        self, name: str, first: str, fingerprints: Mapping[str, Fingerprint], dtype: torch.dtype
    ) -> None:
        """Refuse NaN and infinity, and a tensor that differs from `first`, to which it is tied."""
        if self._reject_non_finite and fingerprints[name][1]:
            raise WeightUpdateError(
                f"{name!r} holds NaN or infinity (as {dtype}); the serving weights are kept. "
                "reject_non_finite_weights=False would let it pass"
            )
        if fingerprints[name] != fingerprints[first]:
            raise WeightUpdateError(
                f"{name!r} and {first!r} are tied in this model, but the update gives them "
                "different values; send one of them, or equal ones"
            )

    def _pack(self, tensors: Mapping[str, Tensor], check: Callable[[], None]) -> list[Any]:
        """What `refresh` will want, by layer; while the old weights still serve."""
        views = self._model.weight_views()
        by_address = {views[name].data_ptr(): tensor for name, tensor in tensors.items()}
        packed = []
        for path, layer in self._model.linear_layers().items():
            check()
            with _blaming(f"packing {path!r}"):
                parts = [by_address[view.data_ptr()] for view in layer.part_weights()]
                packed.append(layer.stage(parts))
        return packed


def _check_form(name: str, tensor: Tensor, view: Tensor) -> None:
    """Refuse what cannot become the view's values, whatever they are."""
    if reason := refusal(tensor):
        raise WeightUpdateError(f"{name!r} {reason}")
    if tensor.shape != view.shape:
        raise WeightUpdateError(
            f"{name!r} has shape {list(tensor.shape)}, but the model's is {list(view.shape)}"
        )
    if tensor.dtype != view.dtype and not tensor.is_floating_point():
        raise WeightUpdateError(
            f"{name!r} has dtype {tensor.dtype}, which cannot become the model's {view.dtype}; "
            "send a floating dtype"
        )


def _gathered(source: Mapping[str, Tensor]) -> dict[str, Tensor]:
    full: dict[str, Tensor] = {}
    for name in sorted(source):  # all ranks of a trainer gather in this order
        with _blaming(f"gathering {name!r}"):
            full[name] = full_tensor(source[name])
    return {name: full[name] for name in source}


def _check_names(source: Mapping[str, Tensor], views: Mapping[str, Tensor]) -> None:
    if extra := sorted(source.keys() - views.keys()):
        raise WeightUpdateError(
            f"the update has {len(extra)} tensors that the model lacks ({_listing(extra)}); "
            "send the parameters of the same architecture under their Hugging Face names. A buffer "
            "that is the trainer's own: leave it out, pushing a mapping instead of the module"
        )
    given = {views[name].data_ptr() for name in source}
    missing = [name for name, view in views.items() if view.data_ptr() not in given]
    if missing:
        raise WeightUpdateError(
            f"the update lacks {len(missing)} of the model's tensors ({_listing(missing)}); "
            "send all parameters at once"
        )


def next_version(current: int, version: int | None) -> int:
    """The version an update gets: `version`, or current + 1.

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


def by_name(named_tensors: NamedTensors) -> dict[str, Tensor]:
    """The tensors of a source, as they are. Raises WeightUpdateError where the source fails."""
    if isinstance(named_tensors, nn.Module):
        return named_weights(named_tensors)
    if isinstance(named_tensors, Mapping):
        return dict(named_tensors)
    source: dict[str, Tensor] = {}
    pairs = iter(named_tensors)
    while True:
        with _blaming(f"the source, after {_listing([*source][-1:]) or 'no tensor at all'},"):
            pair = next(pairs, None)
        if pair is None:
            return source
        name, tensor = pair
        if source.setdefault(name, tensor) is not tensor:
            raise WeightUpdateError(f"{name!r} comes twice in the update; send it once")


@contextmanager
def _blaming(culprit: str) -> Iterator[None]:
    """Turn any failure inside into a WeightUpdateError that names `culprit`."""
    try:
        yield
    except WeightUpdateError:
        raise
    except Exception as error:
        raise WeightUpdateError(
            f"{culprit} failed with {type(error).__name__}: {error}; the serving weights are kept"
        ) from error


def hashed_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a tensor is cast to for the fingerprint of its own values: mostly its own dtype."""
    is_known = not dtype.is_floating_point or dtype in EXPONENT_BITS
    return dtype if is_known else torch.float32  # holds each value of the 8-bit ones


def checksum_of(fingerprints: Mapping[str, Fingerprint]) -> str:
    """BLAKE2b, 16 hex digits, over sorted names and their hashes."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(fingerprints):
        digest.update(f"{name}\0{fingerprints[name][0]}\n".encode())
    return digest.hexdigest()


def _listing(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")
