"""Adapters over vLLM: A and B are merged on the host into the base weights, which vLLM reloads.

The result is the same as with engine="rollout", for every model and rank. vLLM's own LoRA would
need modules that it lists, and a largest rank that is known at the start, and it cannot reload the
base weights below an adapter by their names. Used by `rollout_vllm.executor`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rollout.errors import WeightUpdateError
from rollout.weights.lora import LoraPair
from rollout.weights.lora_merge import Merger, check_fit
from rollout.weights.update import Fingerprint

_REMEDY = "leave it out of target_modules, or merge the adapter in the trainer and push all weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseWeights:
    """All weights in the checkpoint's format, on the host, and their fingerprints: the sum of these
    weights and an adapter is served. num_bytes: bytes of copies; 0 if the checkpoint's files are
    mapped."""

    tensors: Mapping[str, Tensor]
    fingerprints: Mapping[str, Fingerprint]
    num_bytes: int

    @classmethod
    def copied(
        cls, tensors: Mapping[str, Tensor], fingerprints: Mapping[str, Fingerprint]
    ) -> BaseWeights:
        """Return host copies of an update's tensors."""
        copies = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        num_bytes = sum(tensor.nbytes for tensor in copies.values())
        return cls(tensors=copies, fingerprints=fingerprints, num_bytes=num_bytes)


def check_targets(
    pairs: Mapping[str, LoraPair], shapes: Mapping[str, Sequence[int]], tied_size: int | None
) -> None:
    """Raise WeightUpdateError unless an adapter fits the checkpoint's tensors. `tied_size`: size of
    the vocabulary if the head is tied to the embedding, else None."""
    for module, pair in pairs.items():
        shape = shapes.get(f"{module}.weight", ())
        if len(shape) != 2:
            raise WeightUpdateError(
                f"{pair.names[0]!r} adapts {module!r}, which is no linear layer of this model; "
                f"{_REMEDY}"
            )
        if shape[0] == tied_size:
            raise WeightUpdateError(
                f"{pair.names[0]!r} adapts {module!r}, but head and embedding are tied in this "
                f"model; {_REMEDY}"
            )
        check_fit(pair, shape)


def merged_weights(
    base: Mapping[str, Tensor], pairs: Mapping[str, LoraPair], check: Callable[[], None]
) -> dict[str, Tensor]:
    """Return the weights that an adapter changes, in the dtypes of `base`. `check` is called before
    each of them, and may raise."""
    merger = Merger(pairs.values())
    merged: dict[str, Tensor] = {}
    for module, pair in pairs.items():
        check()
        weight = base[name := f"{module}.weight"]
        if not weight.is_floating_point() or weight.dtype.itemsize < 2:
            raise WeightUpdateError(
                f"{pair.names[0]!r} adapts {module!r}, whose weight is quantised ({weight.dtype}); "
                f"{_REMEDY}"
            )
        merged[name] = merger.merged(weight, pair, None)
    return merged
