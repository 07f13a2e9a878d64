"""TensorReader: reads the tensors of a push once, one after another, and hashes them meanwhile.

Used by the collective, delta, directory and shared transports and by `rollout_vllm`. Writes only to
memory that the transports provide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rollout.backends.base import Ops
from rollout.backends.cpu.backend import cpu_backend
from rollout.backends.ops.fingerprint import hashed_dtype
from rollout.errors import WeightUpdateError
from rollout.models.weights import is_computed
from rollout.weights.fingerprints import FingerprintOf, fingerprint_on
from rollout.weights.lora import LoraAdapter
from rollout.weights.source import LoraTerms
from rollout.weights.update import Fingerprint, NamedTensors, checksum_of, streamed


class TensorReader:
    def __init__(self, *, reject_non_finite: bool, device: torch.device | None = None) -> None:
        """`device` is where `write` gets the tensors; None means the host. `reject_non_finite`
        refuses NaN and infinity."""
        self._reject_non_finite = reject_non_finite
        self.is_finite = True  # whether the tensors that were read last had no NaN or infinity
        self._device = device or torch.device("cpu")
        # Created once, on first use, because that compiles kernels.
        self._fingerprint: FingerprintOf | None = None
        self._ops: Ops[Any] | None = None

    def read(self, named_tensors: NamedTensors, write: Callable[[str, Tensor], None]) -> str:
        """Call `write` with each tensor's name and values. Return the checksum of all tensors.

        The values are whole, contiguous tensors on the device, valid until `write` returns. Tensors
        come one at a time, in the order of `streamed`. Tensors that a model computes itself are
        left out. After an error the remaining tensors are still read, because reading sharded
        tensors is a collective of all ranks of a trainer.

        Raises WeightUpdateError for a tensor that cannot be read, and for refused NaN or infinity.
        Also raises the errors of `write`.
        """

        def written(name: str, tensor: Tensor) -> Fingerprint:
            values = self.values_of(name, tensor)
            write(name, values)
            return self.fingerprint_of(name, values)

        return self._read(named_tensors, written)

    def read_into(
        self, named_tensors: NamedTensors, room_for: Callable[[str, Tensor], Tensor]
    ) -> str:
        """Copy each tensor to the memory that `room_for` returns for it. Return the checksum of all
        tensors. `room_for` must return host memory with the tensor's shape and dtype. Order and
        errors are as in `read`."""
        ops = self._ops = self._ops or cpu_backend("device").ops

        def copied(name: str, tensor: Tensor) -> Fingerprint:
            return ops.copy_with_fingerprint(room_for(name, tensor), tensor.detach()).tolist()

        return self._read(named_tensors, copied)

    @torch.no_grad()
    def _read(
        self, named_tensors: NamedTensors, hashed: Callable[[str, Tensor], Fingerprint]
    ) -> str:
        stream = streamed(named_tensors)
        fingerprints: dict[str, Fingerprint] = {}
        try:
            while (pair := next(stream, None)) is not None:
                name = pair[0]
                if not is_computed(name):
                    try:
                        fingerprints[name] = hashed(*pair)
                    except (RuntimeError, TypeError, KeyError) as error:
                        raise _copy_failed(name, error) from error
                del pair  # before the next one is gathered
        except Exception:
            stream.drain()
            raise
        self.check_finite(fingerprints)
        return checksum_of(fingerprints)

    def values_of(self, name: str, tensor: Tensor) -> Tensor:
        """Return `tensor` on the device, contiguous. Raises WeightUpdateError if it cannot be
        copied."""
        try:
            return tensor.detach().to(self._device).contiguous()
        except (RuntimeError, TypeError) as error:
            raise _copy_failed(name, error) from error

    def fingerprint_of(self, name: str, values: Tensor) -> Fingerprint:
        """Return the fingerprint of values from `values_of`. Raises WeightUpdateError if they
        cannot be hashed."""
        hash_of = self._fingerprint = self._fingerprint or fingerprint_on(self._device)
        try:
            return hash_of(values, hashed_dtype(values.dtype)).tolist()
        except (RuntimeError, TypeError, KeyError) as error:
            raise _copy_failed(name, error) from error

    def check_finite(self, fingerprints: Mapping[str, Fingerprint]) -> None:
        """Set `is_finite`. Raise WeightUpdateError if a tensor has NaN or infinity and
        `reject_non_finite` is set."""
        bad = [name for name, (_, num_bad) in fingerprints.items() if num_bad]
        self.is_finite = not bad
        if bad and self._reject_non_finite:
            more = f", as do {len(bad) - 1} others" if len(bad) > 1 else ""
            raise WeightUpdateError(
                f"{bad[0]!r} holds NaN or infinity{more}; the serving weights are kept. "
                "reject_non_finite_weights=False accepts it"
            )


def _copy_failed(name: str, error: Exception) -> WeightUpdateError:
    return WeightUpdateError(f"copying {name!r} failed: {error}")


def terms_of(named_tensors: NamedTensors) -> LoraTerms | None:
    """Return the settings of an adapter; None for weights. Raises WeightUpdateError for an adapter
    with a `base` or with invalid tensors."""
    if not isinstance(named_tensors, LoraAdapter):
        return None
    adapter = named_tensors
    if adapter.base is not None:
        raise WeightUpdateError(
            "an adapter with a base cannot be sent to other processes; push the base first, then "
            "the adapter without it"
        )
    adapter.pairs()
    return LoraTerms(
        rank=adapter.rank,
        alpha=float(adapter.alpha),
        use_rslora=adapter.use_rslora,
        ranks=dict(adapter.ranks),
        alphas={module: float(alpha) for module, alpha in adapter.alphas.items()},
    )
