"""CpuOps: the reference, with the fastest matrix product of this machine for each weight.

Shape letters: T tokens, K in features, N out features.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollout.backends.base import ExpertWeights, RepackedWeight
from rollout.backends.cpu.kernels import Kernels
from rollout.backends.cpu.mapping import trim_heap
from rollout.backends.cpu.product_cache import TimesCache, describe_machine
from rollout.backends.cpu.product_selection import SWITCH, ProductSelection
from rollout.backends.cpu.products import (
    BUCKETS,
    PLAIN,
    LinearHandle,
    available_products,
    bucket_of,
)
from rollout.backends.fused_decoder import FusedDecoder
from rollout.backends.ops.reference import TorchOps
from rollout.errors import ConfigError

logger = logging.getLogger(__name__)


class CpuOps(TorchOps):
    """Implements `Ops` on CPU."""

    def __init__(self, products: ProductSelection | None = None) -> None:
        """`products`: by default those that `default_selection` knows without kernels."""
        self._products = default_selection() if products is None else products

    def prepare_linear(
        self, weight_NK: Tensor, bias_N: Tensor | None = None, *, may_repack: bool = False
    ) -> LinearHandle:
        """A handle with the plain product, until `tune` chooses others and packs what they need."""
        return LinearHandle(weight_NK, bias_N, [PLAIN] * len(BUCKETS), may_repack=may_repack)

    def tune(
        self,
        handles: Iterable[LinearHandle],
        experts: Iterable[ExpertWeights] = (),
        fused: FusedDecoder | None = None,
    ) -> None:
        """Measure unknown shapes, then give each handle its best products and packed copy."""
        handles = list(handles)
        weights = [handle.weight_NK for handle in handles]
        if fused is None:
            self._products.choose(weights)
        else:
            fused_weights = [handle.weight_NK for handle in fused.handles]
            self._products.choose(weights, fused_weights, fused.num_other_calls)
            fused.allow(self._products.fused_buckets())
        for handle in handles:
            handle.use(self._products.products_for(handle.weight_NK))
        trim_heap()  # weights were reordered piece by piece
        if fused is not None:
            logger.info("forward passes in one call: %s", fused.explain())

    def explain(self) -> str:
        """The measured products, one line for each weight's shape and number of rows."""
        return self._products.explain()

    def choices(self) -> Mapping[str, Any]:
        """The choice for each key of a shape."""
        return self._products.choices()

    def take_choices(self, choices: Mapping[str, Any]) -> None:
        """Nothing that has such a choice is measured."""
        self._products.take_choices(choices)

    def linear(self, x_TK: Tensor, handle: LinearHandle) -> Tensor:
        """x @ weight.T + bias, [T, N]."""
        return handle.products[bucket_of(x_TK.shape[0])](x_TK, handle)

    def linear_float32(self, x_TK: Tensor, handle: LinearHandle) -> Tensor:
        """`linear`, cast to float32."""
        return self.linear(x_TK, handle).float()

    def stage(self, handle: LinearHandle, parts: Sequence[Tensor]) -> Any:
        """The packed copy of the weight to come, None where none is kept."""
        if handle.packing is None:
            return None
        cast = [part.detach().to(handle.weight_NK.dtype) for part in parts]
        return handle.packing.pack(torch.cat(cast) if len(cast) > 1 else cast[0])

    def refresh(self, handle: LinearHandle, staged: Any = None) -> None:
        """Take the staged packed copy, or pack again, after the weight was changed in place."""
        handle.refresh(staged)

    def repacked(self, handle: LinearHandle) -> RepackedWeight | None:
        """The weight in panels, where the compiled product serves all its buckets."""
        return handle.packed if handle.is_repacked else None

    def release(self, handle: LinearHandle) -> None:
        """Drop the packed copy; plain products stand in until `refresh`."""
        handle.release()

    def packed(self, handle: LinearHandle) -> Any:
        """The packed copy, if it can be unpacked; `refresh` replaces it and never writes to it."""
        packing = None if handle.is_repacked else handle.packing
        return handle.packed if packing is not None and packing.unpacks else None

    def unpack(self, packed: Any) -> Tensor:
        """The weight; its packed copy only has its numbers in another order."""
        weight_NK: Tensor = packed.to_dense()
        return weight_NK


def default_selection(
    kernels: Kernels | None = None, *, native_only: bool = False
) -> ProductSelection:
    """What the environment and the cache file of this machine say.

    `native_only`: the compiled products, whose results do not depend on the batch; raises
    ConfigError if the environment forces another one.
    """
    machine = describe_machine("none" if kernels is None else kernels.version)
    products = available_products(kernels)
    switch = os.environ.get(SWITCH, "1")
    if native_only and not switch.startswith("native"):
        if switch not in ("0", "1"):
            raise ConfigError(
                f"{SWITCH}={switch!r} contradicts deterministic=True; unset it, or leave that False"
            )
        switch = "native"
    return ProductSelection(products, switch, TimesCache(machine))
