"""Weight updates as transactions: verify everything first, then copy in place, or go back."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout.errors import WeightUpdateError
from rollout.models.backup import WeightBackup
from rollout.models.causal_lm import CausalLM

MAX_VERSION = 2**31 - 1
NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateReport:
    """A committed update. `stall_seconds` is the part during which no step could run."""

    version: int
    seconds: float
    stall_seconds: float
    num_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedWeights:
    """A verified update: source tensors that fit the model, tied ones once.

    They are not copied. `packed` holds what had to be prepared of them, `backup` the weights that
    were served after `num_writes` writes.
    """

    tensors: Mapping[str, Tensor]
    packed: Sequence[Any]
    backup: WeightBackup
    num_writes: int
    checksum: str
    seconds: float


class WeightUpdater:
    """The only writer of the model's weights, in place: captured graphs stay valid."""

    def __init__(self, model: CausalLM, *, reject_non_finite: bool) -> None:
        self._model = model
        self._reject_non_finite = reject_non_finite
        self._num_writes = 0

    @torch.no_grad()
    def stage(self, named_tensors: NamedTensors) -> StagedWeights:
        """Check names, shapes, dtypes and values, pack, and back up; the model is not touched.

        Raises WeightUpdateError naming the tensor at fault and what was expected of it.
        """
        start = time.perf_counter()
        num_writes = self._num_writes
        views = self._model.weight_views()
        source = _by_name(named_tensors)
        _check_names(source, views)
        chosen: dict[int, str] = {}
        for name, tensor in source.items():
            with _blaming(f"checking {name!r}"):
                self._check_tensor(name, tensor, views[name])
                first = chosen.setdefault(views[name].data_ptr(), name)
                if first != name and not torch.equal(tensor, source[first].to(tensor)):
                    raise WeightUpdateError(
                        f"{name!r} and {first!r} are tied in this model, but the update gives them "
                        "different values; send one of them, or equal ones"
                    )
        tensors = {name: source[name] for name in chosen.values()}
        by_view = {name: source[chosen[view.data_ptr()]] for name, view in views.items()}
        checksum = _checksum((name, by_view[name].to(views[name].dtype)) for name in sorted(views))
        return StagedWeights(
            tensors=tensors,
            packed=self._pack(by_view),
            backup=WeightBackup(self._model),
            num_writes=num_writes,
            checksum=checksum,
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
        """CRC-32 over names and bytes of all weights: equal weights, equal checksum."""
        return _checksum(sorted(self._model.weight_views().items()))

    def _pack(self, tensors: Mapping[str, Tensor]) -> list[Any]:
        """What `refresh` will want, by layer; while the old weights still serve."""
        views = self._model.weight_views()
        by_address = {views[name].data_ptr(): tensor for name, tensor in tensors.items()}
        packed = []
        for path, layer in self._model.linear_layers().items():
            with _blaming(f"packing {path!r}"):
                parts = [by_address[view.data_ptr()] for view in layer.part_weights()]
                packed.append(layer.stage(parts))
        return packed

    def _check_tensor(self, name: str, tensor: Tensor, view: Tensor) -> None:
        if not isinstance(tensor, Tensor):
            raise WeightUpdateError(f"{name!r} is a {type(tensor).__name__}; send a torch.Tensor")
        if tensor.shape != view.shape:
            raise WeightUpdateError(
                f"{name!r} has shape {list(tensor.shape)}, but the model's is {list(view.shape)}"
            )
        if tensor.dtype != view.dtype and not tensor.is_floating_point():
            raise WeightUpdateError(
                f"{name!r} has dtype {tensor.dtype}, which cannot become the model's {view.dtype}; "
                "send a floating dtype"
            )
        if tensor.is_meta:
            raise WeightUpdateError(f"{name!r} is on the meta device and has no values")
        if self._reject_non_finite and not torch.isfinite(tensor.to(view.dtype)).all():
            raise WeightUpdateError(
                f"{name!r} holds NaN or infinity (as {view.dtype}); the serving weights are kept. "
                "reject_non_finite_weights=False would let it pass"
            )


def _check_names(source: Mapping[str, Tensor], views: Mapping[str, Tensor]) -> None:
    if extra := sorted(source.keys() - views.keys()):
        raise WeightUpdateError(
            f"the update has {len(extra)} tensors that the model lacks ({_listing(extra)}); "
            "send the parameters of the same architecture under their Hugging Face names"
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


def _by_name(named_tensors: NamedTensors) -> dict[str, Tensor]:
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


def _checksum(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    value = 0
    for name, tensor in named_tensors:
        with _blaming(f"the checksum of {name!r}"):
            plain = tensor.detach().cpu().contiguous()
            value = zlib.crc32(name.encode(), value)
            value = zlib.crc32(plain.view(torch.uint8).numpy().data, value)
    return f"{value:08x}"


def _listing(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")
