"""Products with made-up speeds, and a stopwatch that reads those instead of the clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rollout.backends.cpu.product_cache import TimesCache
from rollout.backends.cpu.product_choice import Times
from rollout.backends.cpu.product_selection import ProductSelection
from rollout.backends.cpu.products import BUCKETS, PLAIN, LinearHandle, Product, bucket_of

MACHINE: dict[str, str | int] = {"cpu": "this one"}


class PackedProduct(Product):
    """Keeps a clone as its packed copy, and multiplies with that."""

    def __init__(
        self, name: str, *, kind: str | None = None, layout: str | None = None, unpacks: bool = True
    ) -> None:
        self.name, self.layout = name, layout or name
        self.kind = name if kind is None else kind
        self.unpacks, self.is_fused = unpacks, self.kind == "native"

    def pack(self, weight_NK: Tensor) -> Tensor:
        return weight_NK.detach().clone()

    def __call__(self, x_TK: Tensor, handle: LinearHandle) -> Tensor:
        assert handle.packed is not None
        return x_TK @ handle.packed.T


PRODUCTS = [PLAIN, PackedProduct("onednn"), PackedProduct("tiled")]
PRODUCTS += [PackedProduct("mkl", unpacks=False)]
PRODUCTS += [PackedProduct(name, kind="native") for name in ("native-a", "native-b")]


@dataclass(slots=True)
class FakeStopwatch:
    """`speed(name, rows)` seconds for each call, of which `call_s` are not the work; over after
    `max_calls`.
    """

    speed: Callable[[str, int], float]
    max_calls: int = 1_000_000
    call_s: float = 0.0
    calls: list[tuple[str, int]] = field(default_factory=list)

    def start_part(self, num_left: int) -> None:
        """All parts share `max_calls`."""

    def is_over(self) -> bool:
        return len(self.calls) >= self.max_calls

    def overhead(self, product: Product, x_TK: Tensor, handle: LinearHandle) -> float:
        return self.call_s

    def seconds(self, product: Product, x_TK: Tensor, handle: LinearHandle) -> float:
        self.calls.append((product.name, x_TK.shape[0]))
        return self.speed(product.name, x_TK.shape[0])


def times(
    speed: Callable[[str, int], float],
    num_rounds: int = 2,
    spread: float = 0.0,
    call: float = 0.0,
) -> dict[str, Times]:
    """Times as `measure` returns them: `speed(name, rows)` microseconds besides those of a call;
    the second round is slower than the first by `spread`.
    """
    return {
        product.name: Times(
            call=call,
            work=tuple(
                tuple(
                    speed(product.name, rows) * (1 + spread * index) for index in range(num_rounds)
                )
                for rows in BUCKETS
            ),
        )
        for product in PRODUCTS
    }


def selection(
    stopwatch: FakeStopwatch, switch: str = "1", machine: dict[str, str | int] = MACHINE
) -> ProductSelection:
    start: Callable[[], Any] = lambda: stopwatch  # noqa: E731
    return ProductSelection(PRODUCTS, switch, TimesCache(machine), start)


def products_chosen(products: ProductSelection, weight: Tensor) -> set[str]:
    """The names of all that serve some number of rows."""
    return {product.name for product in products.products_for(weight)}


def names_at(*rows: int, products: Sequence[str]) -> list[str]:
    """The products that serve these numbers of rows."""
    return [products[bucket_of(number)] for number in rows]
