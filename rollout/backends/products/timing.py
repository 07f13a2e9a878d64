"""Timing products as a forward pass runs them: with weights that have left the caches.

Shape letters: T tokens, K in features, N out features.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rollout.backends.products.candidates import BUCKETS, LinearHandle, Product
from rollout.backends.products.choice import default_product, fastest_of

BUDGET_S = 1.8
_MAX_ROUNDS = 7
_MAX_CONTENDERS = 4  # in each bucket, from the second round on
# Of a large weight only so many numbers are multiplied: its first rows.
_FEW_ROWS = 32
_MAX_WEIGHTS_FOR_FEW_ROWS = 1 << 21
_MAX_WEIGHTS = 1 << 20
_READ_BETWEEN_BYTES = 32 << 20
_SHORTEST_S = 1e-7


class Stopwatch:
    """Times calls, and says when its budget is used up. The budget runs from its construction.

    With one thread it counts CPU time, so that other processes do not disturb it.
    """

    def __init__(self, budget_s: float = BUDGET_S) -> None:
        self._now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self._end = self._now() + budget_s

    def is_over(self) -> bool:
        """Whether the budget is used up."""
        return self._now() >= self._end

    def seconds(self, product: Product, x_TK: Tensor, handle: LinearHandle) -> float:
        """Return the seconds that one call of the product takes."""
        start = self._now()
        product(x_TK, handle)
        return self._now() - start


@torch.no_grad()
def measure(
    weights: Mapping[str, Tensor],
    candidates: Sequence[Product],
    stopwatch: Stopwatch,
    model_bytes: int,
) -> dict[str, dict[str, list[list[float]]]]:
    """Return the seconds of each round by weight, product and bucket. Rounds are interleaved.

    Rounds end with the stopwatch's budget; lists that were not reached by then are empty. Between
    two uses of a weight other memory is read, as a forward pass would: `model_bytes` of it, or as
    much as evicts a processor's caches if that is less.
    """
    samples = [_Sample(weight_NK, candidates) for weight_NK in weights.values()]
    read_between = torch.zeros(min(_READ_BETWEEN_BYTES, model_bytes) // 4, dtype=torch.float32)
    for index, bucket, product in _passes(candidates):
        contenders = [s for s in samples if s.is_contender(product, bucket, index)]
        if index == 0 and product.kind != "native":
            for sample in contenders:
                product(*sample.arguments(product, bucket))  # builds what its library caches
        if contenders:
            read_between.sum()
        for sample in contenders:
            sample.time(product, bucket, stopwatch)
        if stopwatch.is_over():
            break
    return dict(zip(weights, (sample.seconds for sample in samples), strict=True))


def _passes(candidates: Sequence[Product]) -> Iterator[tuple[int, int, Product]]:
    """Yield (round, bucket, product), in every second round from the last bucket to the first.

    Otherwise a budget that ends early would always miss the same buckets.
    """
    buckets = range(len(BUCKETS))
    for index in range(_MAX_ROUNDS):
        for bucket in reversed(buckets) if index % 2 else buckets:
            for product in candidates:
                yield index, bucket, product


class _Sample:
    """The first rows of a weight, packed for each product that needs it, and their times."""

    def __init__(self, weight_NK: Tensor, candidates: Sequence[Product]) -> None:
        self._weight_NK = weight_NK.detach()
        self._candidates = [product for product in candidates if product.suits(weight_NK)]
        self._handles: dict[tuple[str, int], LinearHandle] = {}
        self.seconds: dict[str, list[list[float]]] = {
            product.name: [[] for _ in BUCKETS] for product in self._candidates
        }

    def is_contender(self, product: Product, bucket: int, index: int) -> bool:
        """Whether the product is timed in round `index`; in the first one all that suit are."""
        if product not in self._candidates:
            return False
        fastest = fastest_of(bucket, self.seconds)[:_MAX_CONTENDERS]
        is_default = product is default_product(BUCKETS[bucket], self._candidates)
        return index == 0 or is_default or product.name in fastest

    def arguments(self, product: Product, bucket: int) -> tuple[Tensor, LinearHandle]:
        """Return what to call the product with: ones, [T, K], and the weight's first rows."""
        num_rows, num_inputs = BUCKETS[bucket], self._weight_NK.shape[1]
        x_TK = torch.ones(num_rows, num_inputs, dtype=self._weight_NK.dtype)
        return x_TK, self._handle(product, self._num_outputs(num_rows))

    def time(self, product: Product, bucket: int, stopwatch: Stopwatch) -> None:
        """Time one call, and add its seconds scaled up to the whole weight.

        Leaves out Python that a fused pass does not run.
        """
        x_TK, handle = self.arguments(product, bucket)
        share = handle.weight_NK.shape[0] / self._weight_NK.shape[0]
        seconds = stopwatch.seconds(product, x_TK, handle)
        if product.is_fused:
            seconds = max(_SHORTEST_S, seconds - stopwatch.seconds(product, x_TK[:0], handle))
        self.seconds[product.name][bucket].append(seconds / share)

    def _num_outputs(self, num_rows: int) -> int:
        is_few = num_rows <= _FEW_ROWS
        max_weights = _MAX_WEIGHTS_FOR_FEW_ROWS if is_few else _MAX_WEIGHTS
        num_outputs, num_inputs = self._weight_NK.shape
        return min(num_outputs, max(1, max_weights // num_inputs))

    def _handle(self, product: Product, num_outputs: int) -> LinearHandle:
        key = (product.name if product.packs else "", num_outputs)
        if key not in self._handles:
            self._handles[key] = LinearHandle(self._weight_NK[:num_outputs], None, [product])
        return self._handles[key]
