"""TensorReader: reads the tensors of a push once, one after another, and hashes them meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from rollout.backends.base import Ops
from rollout.backends.cpu import cpu_backend
from rollout.coordinator.protocol.weights_source import LoraTerms
from rollout.errors import WeightUpdateError
from rollout.models.lora import LoraAdapter
from rollout.models.plain_tensors import full_tensor, refusal
from rollout.models.weights import is_computed
from rollout.runner.weight_update import (
    Fingerprint,
    NamedTensors,
    blaming,
    by_name,
    checksum_of,
    hashed_dtype,
)


class TensorReader:
    """Reads pushes; see `read`."""

    def __init__(self, *, reject_non_finite: bool) -> None:
        self._reject_non_finite = reject_non_finite
        self._ops: Ops | None = None  # made when it is needed, which may compile its kernels

    @torch.no_grad()
    def read(self, named_tensors: NamedTensors, write: Callable[[str, Tensor], None]) -> str:
        """Give each tensor to `write`: whole, contiguous, on the host, valid until it returns.
        Returns the checksum of all of them as they are.

        A module, mapping, list or adapter is read in the order of names, any other iterator in its
        own; sharded tensors are gathered in that order, which is a collective of all ranks. So it
        is read to its end whatever fails, and then the first fault is raised: WeightUpdateError
        naming the tensor, or what `write` has raised. Tensors that a model computes are left out.
        """
        ops = self._ops = self._ops or cpu_backend("device").ops
        fingerprints: dict[str, Fingerprint] = {}
        fault: Exception | None = None
        for name, tensor in _in_order(named_tensors):
            try:
                whole = _whole(name, tensor)
                if fault is not None or is_computed(name):
                    continue
                if name in fingerprints:
                    raise WeightUpdateError(f"{name!r} comes twice in the update; send it once")
                values = whole.detach().cpu().contiguous()
                write(name, values)
                fingerprint = ops.fingerprint(values, hashed_dtype(values.dtype))
                fingerprints[name] = fingerprint.tolist()
            except (WeightUpdateError, OSError) as error:
                fault = fault or error
            except (RuntimeError, TypeError, KeyError) as error:
                fault = fault or WeightUpdateError(f"copying {name!r} failed: {error}")
        if fault is not None:
            raise fault
        self._check_finite(fingerprints)
        return checksum_of(fingerprints)

    def _check_finite(self, fingerprints: Mapping[str, Fingerprint]) -> None:
        bad = [name for name, (_, num_bad) in fingerprints.items() if num_bad]
        if bad and self._reject_non_finite:
            more = f", as do {len(bad) - 1} others" if len(bad) > 1 else ""
            raise WeightUpdateError(
                f"{bad[0]!r} holds NaN or infinity{more}; the serving weights are kept. "
                "reject_non_finite_weights=False would let it pass"
            )


def terms_of(named_tensors: NamedTensors) -> LoraTerms | None:
    """Return what the tensors of an adapter mean; None for weights. Raises WeightUpdateError naming
    a tensor that is no half of a pair.
    """
    if not isinstance(named_tensors, LoraAdapter):
        return None
    adapter = named_tensors
    if adapter.base is not None:
        raise WeightUpdateError(
            "an adapter with a base is for an engine in this process; push the base by itself, "
            "then the adapter without it"
        )
    adapter.pairs()
    return LoraTerms(
        rank=adapter.rank,
        alpha=float(adapter.alpha),
        use_rslora=adapter.use_rslora,
        ranks=dict(adapter.ranks),
        alphas={module: float(alpha) for module, alpha in adapter.alphas.items()},
    )


def _in_order(named_tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    if isinstance(named_tensors, nn.Module | Mapping | Sequence | LoraAdapter):
        tensors = by_name(named_tensors)
        return iter([(name, tensors[name]) for name in sorted(tensors)])
    return _blamed(named_tensors)


def _blamed(pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Raises WeightUpdateError where reading the source fails."""
    iterator, after = iter(pairs), "no tensor at all"
    while True:
        with blaming(f"the source, after {after},"):
            pair = next(iterator, None)
        if pair is None:
            return
        after = repr(pair[0])
        yield pair


def _whole(name: str, tensor: Tensor) -> Tensor:
    if reason := refusal(tensor):
        raise WeightUpdateError(f"{name!r} {reason}")
    return full_tensor(tensor)
