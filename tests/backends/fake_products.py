"""Products with made-up speeds, and a stopwatch that reads those instead of the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from rollout.backends.products.candidates import BUCKETS, PLAIN, LinearHandle, Product


class PackedProduct(Product):
    """Keeps a clone as its packed copy, and multiplies with that."""

    packs = True

    def __init__(self, name: str, *, kind: str | None = None, unpacks: bool = True) -> None:
        self.name = name
        self.kind = name if kind is None else kind
        self.unpacks = unpacks

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
    """`speed(name, rows)` seconds for each call; over after `max_calls`."""

    speed: Callable[[str, int], float]
    max_calls: int = 1_000_000
    calls: list[tuple[str, int]] = field(default_factory=list)

    def start_part(self, num_left: int) -> None:
        """All parts share `max_calls`."""

    def is_over(self) -> bool:
        return len(self.calls) >= self.max_calls

    def overhead(self, product: Product, x_TK: Tensor, handle: LinearHandle) -> float:
        return 0.0

    def seconds(self, product: Product, x_TK: Tensor, handle: LinearHandle) -> float:
        self.calls.append((product.name, x_TK.shape[0]))
        return self.speed(product.name, x_TK.shape[0])


def rounds(
    speed: Callable[[str, int], float], num_rounds: int = 3, spread: float = 0.0
) -> dict[str, list[list[float]]]:
    """Seconds as `measure` returns them; each round is slower than the one before by `spread`."""
    return {
        product.name: [
            [speed(product.name, rows) * (1 + spread * index) for index in range(num_rounds)]
            for rows in BUCKETS
        ]
        for product in PRODUCTS
    }
