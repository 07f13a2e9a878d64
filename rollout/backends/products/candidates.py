"""The ways to compute x @ weight.T + bias on a CPU, and the handle that they work on.

Shape letters: T tokens, K in features, N out features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import addressof
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.backends.native.kernels import Kernels, LinearArgs

_PACK_BATCH = 64  # rows that packed layouts are made for; they work with any number
_PROBED_ROWS = (1, 3, 64, 129)
_MIN_WEIGHTS_PER_THREAD = 1 << 19
_HINTS = {"none": -1, "nta": 0, "t2": 1, "t1": 2, "t0": 3}  # named after the x86 instructions


class Product:
    """One way to compute a product. This one is torch's own, with the weight as it is stored.

    `kind` groups the variants of one implementation. `packs`: it needs a packed copy of the weight.
    `unpacks`: `to_dense` of that copy gives the very weight. `max_rows`: with more rows than this
    it is never the fastest, so it is not timed.
    """

    name = kind = "plain"
    packs = unpacks = False
    max_rows: int | None = None

    def suits(self, weight_NK: Tensor) -> bool:
        """Whether it can multiply with this weight."""
        return True

    def pack(self, weight_NK: Tensor) -> Tensor | None:
        """The copy of the weight that it needs; None if it needs none."""
        return None

    def __call__(self, x_TK: Tensor, handle: LinearHandle) -> Tensor:
        """x @ weight.T + bias, [T, N]."""
        return F.linear(x_TK, handle.weight_NK, handle.bias_N)


PLAIN = Product()


class LinearHandle:
    """A linear layer's weight, at most one packed copy of it, and a product for each bucket."""

    __slots__ = ("bias_N", "chosen", "packed", "packing", "products", "weight_NK")

    def __init__(
        self, weight_NK: Tensor, bias_N: Tensor | None, products: Sequence[Product]
    ) -> None:
        self.weight_NK, self.bias_N = weight_NK, bias_N
        self.packing: Product | None = None
        self.packed: Tensor | None = None
        self.use(products)

    def use(self, products: Sequence[Product]) -> None:
        """Take these products, one a bucket. At most one kind of packed copy is wanted by them."""
        packing = next((product for product in products if product.packs), None)
        is_packed = self.packing is packing and self.packed is not None
        self.chosen, self.packing = tuple(products), packing
        if is_packed:
            self.products = self.chosen
        else:
            self.release()
            self.refresh()

    def refresh(self, staged: Tensor | None = None) -> None:
        """Take the staged packed copy, or make one of the weight as it is now."""
        if staged is None and self.packing is not None:
            staged = self.packing.pack(self.weight_NK)
        self.packed, self.products = staged, self.chosen

    def release(self) -> None:
        """Drop the packed copy; until `refresh`, the plain product stands in."""
        self.packed = None
        self.products = tuple(PLAIN if product.packs else product for product in self.chosen)


class OneDnnProduct(Product):
    """oneDNN's, with the weight in its own layout, which only reorders the numbers."""

    name = kind = "onednn"
    packs = unpacks = True

    def suits(self, weight_NK: Tensor) -> bool:
        return _is_floating_on_cpu(weight_NK) and _onednn_works(weight_NK.dtype)

    def pack(self, weight_NK: Tensor) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NK.detach(), _PACK_BATCH)
        return packed

    def __call__(self, x_TK: Tensor, handle: LinearHandle) -> Tensor:
        y_TN: Tensor = torch.ops.mkldnn._linear_pointwise(
            x_TK, handle.packed, handle.bias_N, "none", [], ""
        )
        return y_TN


class MklProduct(Product):
    """MKL's, with the weight in its own layout, in float32. MKL has no way back from there."""

    name = kind = "mkl"
    packs = True

    def suits(self, weight_NK: Tensor) -> bool:
        is_float32 = weight_NK.dtype == torch.float32
        return is_float32 and _is_floating_on_cpu(weight_NK) and _mkl_works()

    def pack(self, weight_NK: Tensor) -> Tensor:
        packed: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight_NK.detach(), _PACK_BATCH)
        return packed

    def __call__(self, x_TK: Tensor, handle: LinearHandle) -> Tensor:
        # Told another number of rows than it gets, torch takes the weight that is not packed.
        y_TN: Tensor = torch.ops.mkl._mkl_linear(
            x_TK, handle.packed, handle.weight_NK, handle.bias_N, x_TK.shape[0]
        )
        return y_TN


class NativeProduct(Product):
    """The compiled kernel's, which reads the weight as it is stored, once for a few rows."""

    kind = "native"
    max_rows = 32  # beyond, its arithmetic outweighs the reading that it saves

    def __init__(self, kernels: Kernels, lanes: int, hint: str) -> None:
        self.name = f"native-{32 * lanes}-{hint}"
        self._kernels = kernels
        self._lanes = lanes
        self._variant = lanes, _HINTS[hint]

    def suits(self, weight_NK: Tensor) -> bool:
        is_plain = weight_NK.dtype == torch.float32 and weight_NK.is_contiguous()
        return is_plain and weight_NK.is_cpu and weight_NK.shape[1] % self._lanes == 0

    def __call__(self, x_TK: Tensor, handle: LinearHandle) -> Tensor:
        if x_TK.stride(1) != 1 or x_TK.dtype != torch.float32:
            return super().__call__(x_TK, handle)
        num_tokens, num_inputs = x_TK.shape
        weight_NK, bias_N = handle.weight_NK, handle.bias_N
        num_outputs = weight_NK.shape[0]
        y_TN = torch.empty(num_tokens, num_outputs, dtype=torch.float32)
        args = LinearArgs(
            *(y_TN.data_ptr(), x_TK.data_ptr(), weight_NK.data_ptr()),
            None if bias_N is None else bias_N.data_ptr(),
            *(num_tokens, num_inputs, num_outputs, x_TK.stride(0), *self._variant),
        )

        def work(first: int, last: int) -> None:
            self._kernels.linear(addressof(args), first, last)

        self._kernels.split(num_outputs, work, _MIN_WEIGHTS_PER_THREAD // num_inputs + 1)
        return y_TN


def available_products(kernels: Kernels | None) -> list[Product]:
    """All products of this machine; the first one of a kind is its default variant."""
    products = [PLAIN, OneDnnProduct(), MklProduct(), *_native_products(kernels)]
    probe_NK = torch.zeros(1, 16, dtype=torch.float32)
    return [product for product in products if product.suits(probe_NK)]


def _native_products(kernels: Kernels | None) -> Iterator[Product]:
    if kernels is not None:
        for lanes in (16, 8):
            if lanes <= kernels.linear_max_lanes():
                for hint in reversed(_HINTS):
                    yield NativeProduct(kernels, lanes, hint)


def _is_floating_on_cpu(weight_NK: Tensor) -> bool:
    return weight_NK.is_cpu and weight_NK.is_floating_point()


@cache
def _onednn_works(dtype: torch.dtype) -> bool:
    return _works(OneDnnProduct(), dtype)


@cache
def _mkl_works() -> bool:
    return _works(MklProduct(), torch.float32)


def _works(product: Product, dtype: torch.dtype) -> bool:
    """Whether this build of torch has the product for this dtype, here: it is tried."""
    generator = torch.Generator().manual_seed(0)
    weight_NK = torch.randn(24, 32, generator=generator).to(dtype)
    try:
        handle = LinearHandle(weight_NK, None, [product])
        assert handle.packed is not None
        if product.unpacks and not torch.equal(handle.packed.to_dense(), weight_NK):
            return False
        for num_rows in _PROBED_ROWS:
            x_TK = torch.randn(num_rows, 32, generator=generator).to(dtype)
            torch.testing.assert_close(product(x_TK, handle), PLAIN(x_TK, handle))
    except (RuntimeError, NotImplementedError, AttributeError, AssertionError):
        return False
    return True
