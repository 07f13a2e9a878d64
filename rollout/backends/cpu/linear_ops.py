"""CpuOps: the torch operations, with matrix products chosen for this machine.

Used by `rollout.backends.cpu.backend` if there are no compiled kernels, and by
`rollout.backends.cpu.ops` as the base of NativeOps. Shape letters: T tokens, K in features, N out
features.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from rollout.backends.base import ExpertWeights, RepackedWeight
from rollout.backends.cpu.kernels import Kernels
from rollout.backends.cpu.mapping import trim_heap
from rollout.backends.cpu.native_weight import packed_bytes
from rollout.backends.cpu.products import (
    BUCKETS,
    PLAIN,
    SWITCH,
    LinearHandle,
    ProductRule,
    available_products,
    bucket_of,
    summary,
)
from rollout.backends.fused_decoder import FusedDecoder
from rollout.backends.ops.reference import TorchOps
from rollout.errors import ConfigError

logger = logging.getLogger(__name__)


class CpuOps(TorchOps):
    """`Ops` on CPU."""

    def __init__(self, rule: ProductRule | None = None) -> None:
        """`rule` chooses products; None means `rule_of_environment()`, without compiled kernels."""
        self._rule = rule_of_environment() if rule is None else rule
        self._explained: dict[str, str] = {}  # products in use, by the weight's shape and dtype

    def prepare_linear(
        self, weight_NK: Tensor, bias_N: Tensor | None = None, *, may_repack: bool = False
    ) -> LinearHandle:
        """Return a handle with torch's product, which `choose_products` can replace."""
        return LinearHandle(weight_NK, bias_N, [PLAIN] * len(BUCKETS), may_repack=may_repack)

    def choose_products(
        self,
        handles: Iterable[LinearHandle],
        experts: Iterable[ExpertWeights] = (),
        fused: FusedDecoder | None = None,
    ) -> None:
        """Give each handle the products of the rule, pack its weight, and log the choice."""
        for handle in handles:
            products = self._rule.products_for(handle.weight_NK)
            self._explain(handle.weight_NK, "", [product.name for product in products])
            handle.use(products)
        trim_heap()  # packing has freed many small tensors
        logger.info("products: %s", "; ".join(self.explain().splitlines()))
        if fused is not None:
            logger.info("forward passes in one call: %s", fused.explain())

    def explain(self) -> str:
        """Describe the products in use, one line for each shape and dtype of weights."""
        return "\n".join(f"{key}: {products}" for key, products in self._explained.items())

    def _explain(self, weight: Tensor, suffix: str, names: Sequence[str]) -> None:
        shape = "x".join(map(str, weight.shape[-2:]))
        key = f"{shape} {str(weight.dtype).removeprefix('torch.')}{suffix}"
        self._explained[key] = summary(names)

    def linear(self, x_TK: Tensor, handle: LinearHandle) -> Tensor:
        """Return x @ weight.T + bias, [T, N]."""
        return handle.products[bucket_of(x_TK.shape[0])](x_TK, handle)

    def stage(
        self, handle: LinearHandle, parts: Sequence[Tensor], allocate: Callable[[int], Tensor]
    ) -> Any:
        """Return a packed copy of the new weight, whose rows are `parts`. Return None if the
        handle's products pack nothing. `allocate` is used only for a repacked weight."""
        if handle.packing is None:
            return None
        cast = [part.to(handle.weight_NK.dtype) for part in parts]
        # A repacked weight's copy is dropped together with the other staged copies.
        return handle.packing.pack(cast, allocate if handle.is_repacked else packed_bytes)

    def refresh(self, handle: LinearHandle, staged: Any = None) -> None:
        """Use the packed copy `staged`, or pack the weight again. See `LinearHandle.refresh`."""
        handle.refresh(staged)

    def repacked(self, handle: LinearHandle) -> RepackedWeight | None:
        """Return access to the weight if it is repacked in its memory; else None."""
        return handle.packed if handle.is_repacked else None

    def release(self, handle: LinearHandle) -> None:
        """Drop the packed copy. Torch's product is used until `refresh`."""
        handle.release()

    def packed(self, handle: LinearHandle) -> Any:
        """Return the packed copy, which `refresh` never writes. Return None if it cannot be
        unpacked or the weight is repacked."""
        packing = None if handle.is_repacked else handle.packing
        return handle.packed if packing is not None and packing.unpacks else None

    def unpack(self, packed: Any) -> Tensor:
        """Return the weight, [N, K], of a packed copy, which has the same numbers in another
        order."""
        weight_NK: Tensor = packed.to_dense()
        return weight_NK


def rule_of_environment(
    kernels: Kernels | None = None, *, native_only: bool = False
) -> ProductRule:
    """Return the rule that the environment variable ROLLOUT_TUNE asks for.

    `kernels` are the compiled kernels; None gives a rule without them. `native_only` forces the
    compiled product by vectors, whose results do not depend on the batch. Raises ConfigError if
    ROLLOUT_TUNE then forces another product, and if it names an unknown product.
    """
    switch = os.environ.get(SWITCH, "1")
    if native_only and not switch.startswith("native"):
        if switch not in ("0", "1"):
            raise ConfigError(
                f"{SWITCH}={switch!r} contradicts deterministic=True; unset it, or leave that False"
            )
        switch = "native"
    return ProductRule(available_products(kernels), switch)
