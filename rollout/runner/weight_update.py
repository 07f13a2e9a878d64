"""Weight updates as transactions: verify everything first, then copy in place."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout.errors import WeightUpdateError
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
    """An update that cannot fail any more: source tensors that fit the model, tied ones once.

    They are not copied; `packed` holds what had to be prepared of them.
    """

    tensors: Mapping[str, Tensor]
    packed: Sequence[Any]
    seconds: float


class WeightUpdater:
    """The only writer of the model's weights. Addresses never change, so captured graphs stay
    valid.
    """

    def __init__(self, model: CausalLM, *, reject_non_finite: bool) -> None:
        self._model = model
        self._reject_non_finite = reject_non_finite

    @torch.no_grad()
    def stage(self, named_tensors: NamedTensors) -> StagedWeights:
        """Check names, shapes, dtypes and values in place, and pack; the model is not touched.

        Raises WeightUpdateError naming the tensor at fault and what was expected of it.
        """
        start = time.perf_counter()
        views = self._model.weight_views()
        source = _by_name(named_tensors)
        _check_names(source, views)
        chosen: dict[int, str] = {}
        for name, tensor in source.items():
            self._check_tensor(name, tensor, views[name])
            first = chosen.setdefault(views[name].data_ptr(), name)
            if first != name and not torch.equal(tensor, source[first].to(tensor)):
                raise WeightUpdateError(
                    f"{name!r} and {first!r} are tied in this model, but the update gives them "
                    "different values; send one of them, or equal ones"
                )
        tensors = {name: source[name] for name in chosen.values()}
        packed = self._model.stage(tensors)
        seconds = time.perf_counter() - start
        return StagedWeights(tensors=tensors, packed=packed, seconds=seconds)

    @torch.no_grad()
    def commit(self, staged: StagedWeights) -> int:
        """Copy in place and take the packed copies. Returns bytes written."""
        views = self._model.weight_views()
        num_bytes = 0
        for name, tensor in staged.tensors.items():
            views[name].copy_(tensor)
            num_bytes += views[name].nbytes
        self._model.refresh(staged.packed)
        return num_bytes

    def checksum(self) -> str:
        """CRC-32 over names and bytes of all weights, by name: equal weights, equal checksum."""
        value = 0
        views = self._model.weight_views()
        for name in sorted(views):
            view = views[name].detach().cpu().contiguous()
            value = zlib.crc32(name.encode(), value)
            value = zlib.crc32(view.view(torch.uint8).numpy().data, value)
        return f"{value:08x}"

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
    """The version an update gets: `version`, or current + 1. Raises WeightUpdateError unless
    larger.
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
    for name, tensor in named_tensors:
        if source.setdefault(name, tensor) is not tensor:
            raise WeightUpdateError(f"{name!r} comes twice in the update; send it once")
    return source


def _listing(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")
