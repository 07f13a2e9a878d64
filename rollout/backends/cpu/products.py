"""Matrix products of a CPU, x @ weight.T + bias: the implementations, and the rule that chooses.

CpuOps in `rollout.backends.cpu.linear_ops` asks ProductRule for the products of each weight, and
keeps them in the weight's LinearHandle. `rollout.backends.cpu.ops` asks it about experts.
`rollout.backends.cpu.decoder` reads the handles. `benchmarks.products` times the products. A handle
packs its weight, in a copy or in place.

Shape letters: T tokens, K in features, N out features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.backends.base import RepackedWeight
from rollout.backends.cpu.kernels import AMX, DOT, VECTORS, Kernels, LinearArgs
from rollout.backends.cpu.native_weight import NativeWeight, packed_bytes
from rollout.errors import ConfigError

SWITCH = "ROLLOUT_TUNE"  # environment variable
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # largest number of rows; the last has no limit

_PACK_BATCH = 64  # number of rows for which oneDNN and MKL choose a layout, which serves any number
_PROBED_ROWS = (1, 3, 64, 129)
_PROBE_ATOL = 1e-5

# The fewest rows for which a unit is faster than vectors. DOT was measured on a Zen 4 with models
# of 44M and 135M parameters: 1.04 to 1.18 times the time of vectors for 1 to 4 rows, 0.73 for 8,
# 0.51 for 64. With AMX, on a Xeon, 16 rows decode 1.9 times as fast.
_MIN_ROWS = {VECTORS: 1, DOT: 5, AMX: 9}
_MAX_ONEDNN_ROWS = 128
# Torch multiplies bfloat16 experts by units of pairs, the compiled kernel by vectors. Measured on a
# Zen 4, the kernel takes 0.3 to 0.7 of torch's time for up to 8 tokens of an expert, 0.9 to 1.2 for
# 16, 1.1 to 2.0 for more. On a Xeon with AMX torch is faster from 32 tokens on, too.
_MAX_NATIVE_TOKENS = 16
_BY_RULE, _VECTORS_ALONE = "1", "0"


def bucket_of(num_rows: int) -> int:
    """Return the index in BUCKETS of the smallest bucket for `num_rows` rows."""
    return min((num_rows - 1).bit_length(), len(BUCKETS) - 1)


class Product:
    """An implementation of the matrix product. This base class is torch's product, which packs
    nothing.

    `name` is the product's own name. `kind` is a name that variants of one implementation share.
    `layout` is the name of the packed copy's order; None if the product needs no packed copy.
    Products with one layout can share a copy. `unpacks` says whether `to_dense` of the copy returns
    the weight's exact bytes. `min_rows` is the fewest rows for which the rule chooses the product.
    """

    name = kind = "plain"
    layout: str | None = None
    unpacks = False
    min_rows = 1

    def suits(self, weight_NK: Tensor) -> bool:
        return True

    def can_repack(self, weight_NK: Tensor) -> bool:
        return False

    def pack(self, parts: Sequence[Tensor], allocate: Callable[[int], Tensor]) -> Any:
        """Return a packed copy of the weight whose rows are `parts`, or None if the product needs
        no copy. `allocate` returns memory for the copy. Some products do not use it."""
        return None

    def repack(self, weight_NK: Tensor) -> RepackedWeight:
        """Repack the weight in its own memory, so that no plain copy remains. Return access to the
        weight."""
        raise NotImplementedError

    def __call__(self, x_TK: Tensor, handle: LinearHandle) -> Tensor:
        """Return x @ weight.T + bias, [T, N]."""
        return F.linear(x_TK, handle.weight_NK, handle.bias_N)


PLAIN = Product()


class LinearHandle:
    """A linear layer's weight, at most one packed copy of it, and a product for each bucket.

    The weight is repacked in place, without a copy, if `may_repack` is set, all products share a
    layout, and the layout's product can repack the weight. In that case `is_repacked` is True,
    `packed` is access to the weight's own memory, and `weight_NK` has the packed order and shape.
    `packing` is the product that packs, or None. `chosen` has the product for each bucket.
    `products` is the same, but has PLAIN for products whose packed copy is released. `generation`
    is the number of changes of the packed weight or the products.
    """

    __slots__ = (
        *("bias_N", "chosen", "generation", "is_repacked", "may_repack", "num_inputs"),
        *("num_outputs", "packed", "packing", "products", "weight_NK"),
    )

    def __init__(
        self,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        products: Sequence[Product],
        *,
        may_repack: bool = False,
    ) -> None:
        self.weight_NK, self.bias_N = weight_NK, bias_N
        self.num_outputs, self.num_inputs = weight_NK.shape
        self.may_repack, self.is_repacked = may_repack, False
        self.packing: Product | None = None
        self.packed: Any = None
        self.generation = 0
        self.use(products)

    def use(self, products: Sequence[Product]) -> None:
        """Use these products, one for each bucket, and pack the weight in their layout. All
        products that need a packed weight must share one layout."""
        if self.is_repacked:
            self.packed.unpack()
            self.packed, self.is_repacked = None, False
        self.chosen = tuple(products)
        self.packing = next((p for p in products if p.layout is not None), None)
        if self.packing is not None:
            is_alone = all(product.layout == self.packing.layout for product in products)
            if self.may_repack and is_alone and self.packing.can_repack(self.weight_NK):
                self.packed, self.is_repacked = self.packing.repack(self.weight_NK), True
        self.refresh()

    def refresh(self, staged: Any = None) -> None:
        """Use the staged packed copy, or pack the weight again. A repacked weight swaps its values
        with the staged copy, if there is one."""
        if self.is_repacked:
            if staged is not None:
                self.packed.exchange(staged)
        elif staged is None and self.packing is not None:
            self.packed = self.packing.pack([self.weight_NK], packed_bytes)
        else:
            self.packed = staged
        self.products = self.chosen
        self.generation += 1

    def release(self) -> None:
        """Drop the packed copy. Torch's product is used until `refresh`. A repacked weight is not
        released."""
        self.generation += 1
        if not self.is_repacked:
            self.packed = None
            self.products = tuple(PLAIN if p.layout is not None else p for p in self.chosen)


class OneDnnProduct(Product):
    """oneDNN's product, through torch. Its packed copy holds the weight's numbers in another
    order."""

    name = kind = layout = "onednn"
    unpacks = True

    def suits(self, weight_NK: Tensor) -> bool:
        return _is_floating_on_cpu(weight_NK) and _onednn_works(weight_NK.dtype)

    def pack(self, parts: Sequence[Tensor], allocate: Callable[[int], Tensor]) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(_joined(parts), _PACK_BATCH)
        return packed

    def __call__(self, x_TK: Tensor, handle: LinearHandle) -> Tensor:
        y_TN: Tensor = torch.ops.mkldnn._linear_pointwise(
            x_TK, handle.packed, handle.bias_N, "none", [], ""
        )
        return y_TN


class MklProduct(Product):
    """MKL's product in float32, through torch. MKL cannot unpack its packed copy."""

    name = kind = layout = "mkl"

    def suits(self, weight_NK: Tensor) -> bool:
        is_float32 = weight_NK.dtype == torch.float32
        return is_float32 and _is_floating_on_cpu(weight_NK) and _mkl_works()

    def pack(self, parts: Sequence[Tensor], allocate: Callable[[int], Tensor]) -> Tensor:
        packed: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(_joined(parts), _PACK_BATCH)
        return packed

    def __call__(self, x_TK: Tensor, handle: LinearHandle) -> Tensor:
        # Torch would use the unpacked weight if the last argument were not x's number of rows.
        y_TN: Tensor = torch.ops.mkl._mkl_linear(
            x_TK, handle.packed, handle.weight_NK, handle.bias_N, x_TK.shape[0]
        )
        return y_TN


class NativeProduct(Product):
    """The compiled kernel's product, with a float32 or bfloat16 weight in panels of outputs. The
    product is computed in float32, but the units DOT and AMX first round x to bfloat16. The result
    of a row of x does not depend on other rows."""

    kind = "native"
    unpacks = True

    def __init__(self, kernels: Kernels, lanes: int, unit: int = VECTORS) -> None:
        self.layout = f"native-{32 * lanes}"
        self.name = {VECTORS: self.layout, DOT: "native-dot", AMX: "native-amx"}[unit]
        self._kernels = kernels
        self.lanes, self.unit, self.min_rows = lanes, unit, _MIN_ROWS[unit]

    def suits(self, weight_NK: Tensor) -> bool:
        dtypes = (torch.float32, torch.bfloat16) if self.unit == VECTORS else (torch.bfloat16,)
        return weight_NK.is_cpu and weight_NK.dtype in dtypes

    def can_repack(self, weight_NK: Tensor) -> bool:
        is_whole = weight_NK.shape[0] % (2 * self.lanes) == 0
        return is_whole and weight_NK.is_contiguous() and weight_NK.numel() > 0

    def pack(self, parts: Sequence[Tensor], allocate: Callable[[int], Tensor]) -> NativeWeight:
        return NativeWeight.copy_of(self._kernels, parts, self.lanes, allocate)

    def repack(self, weight_NK: Tensor) -> NativeWeight:
        return NativeWeight.in_place_of(self._kernels, weight_NK, self.lanes)

    def __call__(self, x_TK: Tensor, handle: LinearHandle) -> Tensor:
        x_TK = x_TK.float()
        if x_TK.stride(1) != 1:
            x_TK = x_TK.contiguous()
        num_tokens, num_inputs = x_TK.shape
        packed: NativeWeight = handle.packed
        panels_PKW, num_outputs = packed.panels_PKW, packed.num_outputs
        bias_N = None if handle.bias_N is None else handle.bias_N.float()
        y_TN = torch.empty(num_tokens, num_outputs, dtype=torch.float32)
        args = LinearArgs(
            *(y_TN.data_ptr(), x_TK.data_ptr(), panels_PKW.data_ptr()),
            None if bias_N is None else bias_N.data_ptr(),
            *(num_tokens, num_inputs, num_outputs, x_TK.stride(0), self.lanes),
            *(panels_PKW.dtype == torch.bfloat16, self.unit, False),
        )
        self._kernels.run(
            self._kernels.linear_part,
            *(args, len(panels_PKW)),
            smallest=packed.min_panels_per_thread,
        )
        return y_TN.to(panels_PKW.dtype)


class ProductRule:
    """Chooses products by the weight's dtype, the number of rows and the processor's features.

    `switch` is the value of ROLLOUT_TUNE. "1" chooses the compiled product with the widest vectors,
    or its unit for pairs of bfloat16 numbers (DOT, AMX) if that is faster. Without kernels, "1"
    chooses oneDNN's product for up to 128 rows, and torch's product for more. "0" does not choose
    DOT and AMX, which round x to bfloat16. A product's name or kind forces this product for all
    weights that it supports. Raises ConfigError if this machine has no such product.
    """

    def __init__(self, candidates: Sequence[Product], switch: str = _BY_RULE) -> None:
        self._candidates, self._switch = candidates, switch
        names = [name for product in candidates for name in (product.kind, product.name)]
        legal = dict.fromkeys((_BY_RULE, _VECTORS_ALONE, *names))
        if switch not in legal:
            raise ConfigError(
                f"{SWITCH}={switch!r} is not a product of this machine; use one of {[*legal]}"
            )

    def products_for(self, weight_NK: Tensor) -> list[Product]:
        """Return the product of each bucket of BUCKETS for this weight."""
        suited = [product for product in self._candidates if product.suits(weight_NK)]
        if self._switch in (_BY_RULE, _VECTORS_ALONE):
            return [self._by_rule(num_rows, suited) for num_rows in BUCKETS]
        forced = (product for product in suited if self._switch in (product.name, product.kind))
        return [next(forced, PLAIN)] * len(BUCKETS)

    def experts_by_kernel(self, dtype: torch.dtype, num_tokens: int) -> bool:
        """Return whether to use the compiled kernel, not torch, for experts of `dtype` with
        `num_tokens` tokens each."""
        if self._switch != _BY_RULE:
            return self._switch == _VECTORS_ALONE or self._switch.startswith("native")
        has_pairs = any(product.min_rows > 1 for product in self._candidates)
        return num_tokens <= _MAX_NATIVE_TOKENS or dtype != torch.bfloat16 or not has_pairs

    def _by_rule(self, num_rows: int, suited: Sequence[Product]) -> Product:
        natives = [product for product in suited if product.kind == "native"]
        if not natives:
            onednn = (product for product in suited if product.kind == "onednn")
            return next(onednn, PLAIN) if num_rows <= _MAX_ONEDNN_ROWS else PLAIN
        vectors = natives[0]
        if self._switch == _VECTORS_ALONE:
            return vectors
        sharing = (p for p in natives if p.layout == vectors.layout and p.min_rows <= num_rows)
        return max(sharing, key=lambda product: product.min_rows)


def summary(names: Sequence[str]) -> str:
    """Describe product names, one for each bucket, such as "native-512 from 1, native-dot from 5
    rows"."""
    parts, num_rows = [], 1
    for name, buckets in groupby(zip(names, BUCKETS, strict=True), lambda pair: pair[0]):
        parts.append(f"{name} from {num_rows}")
        num_rows = [*buckets][-1][1] + 1
    return ", ".join(parts) + " rows"


def available_products(kernels: Kernels | None) -> list[Product]:
    """Return all products that work on this machine. The default of each kind comes first.
    `kernels` are the compiled kernels; None if there are none."""
    products = [PLAIN, OneDnnProduct(), MklProduct(), *_native_products(kernels)]
    probes = [torch.zeros(1, 16, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    return [product for product in products if any(map(product.suits, probes))]


def _native_products(kernels: Kernels | None) -> Iterator[Product]:
    if kernels is not None:
        for lanes in (16, 8):
            if lanes <= kernels.linear_max_lanes():
                yield NativeProduct(kernels, lanes)
        if kernels.dot_is_usable():
            yield NativeProduct(kernels, 16, DOT)
        if kernels.amx_is_usable():
            yield NativeProduct(kernels, 16, AMX)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([*parts]) if len(parts) > 1 else parts[0].detach()


def _is_floating_on_cpu(weight_NK: Tensor) -> bool:
    return weight_NK.is_cpu and weight_NK.is_floating_point()


@cache
def _onednn_works(dtype: torch.dtype) -> bool:
    return _works(OneDnnProduct(), dtype)


@cache
def _mkl_works() -> bool:
    return _works(MklProduct(), torch.float32)


def _works(product: Product, dtype: torch.dtype) -> bool:
    """Try the product for this dtype, and return whether it works on this machine."""
    generator = torch.Generator().manual_seed(0)
    weight_NK = torch.randn(24, 32, generator=generator).to(dtype)
    rtol = 8 * torch.finfo(dtype).eps
    try:
        handle = LinearHandle(weight_NK, None, [product])
        assert handle.packed is not None
        if product.unpacks and not torch.equal(handle.packed.to_dense(), weight_NK):
            return False
        for num_rows in _PROBED_ROWS:
            x_TK = torch.randn(num_rows, 32, generator=generator).to(dtype)
            # torch.testing would import SymPy for this, which takes a second.
            if not torch.allclose(product(x_TK, handle), PLAIN(x_TK, handle), rtol, _PROBE_ATOL):
                return False
    except (RuntimeError, NotImplementedError, AttributeError, AssertionError):
        return False
    return True
