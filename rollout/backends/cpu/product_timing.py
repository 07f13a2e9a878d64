"""Timing products as a forward pass runs them: with weights that have left the caches.

Shape letters: T tokens, K in features, N out features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from rollout.backends.cpu.mapping import trim_heap
from rollout.backends.cpu.product_choice import Measured, Times, default_product
from rollout.backends.cpu.products import BUCKETS, LinearHandle, Product

Seconds = Sequence[Sequence[float]]  # by bucket: of each round

BUDGET_S = 1.8
_MAX_ROUNDS = 7
_MAX_CONTENDERS = 4  # in each bucket, from the second round on
_SAMPLE_BYTES = 2 << 20  # of a large weight: a huge page, in which whole weights lie, too
_PANEL = 32  # outputs: whole panels of every packed layout
_READ_BETWEEN_BYTES = 32 << 20
_NUM_EMPTY_CALLS = 2  # the first one brings the code back into the caches
_SHORTEST_S = 1e-7
_NUM_KEPT = 2  # rounds: the fastest, and one that says how far it is to be trusted


class Stopwatch:
    """Times calls, and says when its budget is used up. The budget runs from its construction.

    With one thread it counts CPU time, so that other processes do not disturb it.
    """

    def __init__(self, budget_s: float = BUDGET_S) -> None:
        self._now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self._end = self._part_end = self._now() + budget_s

    def start_part(self, num_left: int) -> None:
        """Give the first of `num_left` parts an equal share of what is left of the budget."""
        now = self._now()
        self._part_end = now + max(0.0, self._end - now) / num_left

    def is_over(self) -> bool:
        """Whether the part's share of the budget is used up."""
        return self._now() >= self._part_end

    def seconds(self, product: Product, x_TK: Tensor, handle: LinearHandle) -> float:
        """Return the seconds that one call of the product takes."""
        return self.seconds_of(lambda: product(x_TK, handle))

    def seconds_of(self, call: Callable[[], object]) -> float:
        """Return the seconds that this call takes."""
        start = self._now()
        call()
        return self._now() - start

    def overhead(self, product: Product, x_TK: Tensor, handle: LinearHandle) -> float:
        """Return the seconds that a call takes besides the work. `handle` has a tiny weight."""
        return min(self.seconds(product, x_TK, handle) for _ in range(_NUM_EMPTY_CALLS))


def times_of(seconds: Seconds, *, call_s: float = 0.0, share: float = 1.0) -> Times:
    """The times of a product whose calls took these seconds, each with `call_s` for the call itself
    and the rest for `share` of the work.
    """
    kept = (sorted(rounds)[:_NUM_KEPT] for rounds in seconds)
    work = [[max(_SHORTEST_S, total_s - call_s) / share for total_s in rounds] for rounds in kept]
    return Times(
        call=_microseconds(call_s),
        work=tuple(tuple(map(_microseconds, rounds)) for rounds in work),
    )


@torch.no_grad()
def measure(
    weights: Mapping[str, Tensor],
    candidates: Sequence[Product],
    stopwatch: Stopwatch,
    model_weights: Sequence[Tensor],
) -> dict[str, Measured]:
    """Return times by weight and product. Rounds are interleaved.

    One weight is measured after the other, so that no more than one is packed at a time. Its rounds
    end with its share of the stopwatch's budget; small weights come first, and leave the others
    what they do not need. What was not reached has no rounds. Between two uses of a weight
    others of the model are read, as a forward pass would, or as many as evict a processor's caches.
    """
    measured: dict[str, Measured] = {}
    for key in sorted(weights, key=lambda key: weights[key].numel()):
        stopwatch.start_part(len(weights) - len(measured))
        others = [weight_NK for weight_NK in model_weights if weight_NK is not weights[key]]
        measured[key] = _Sample(weights[key], candidates, stopwatch).measure(others)
        trim_heap()  # packed copies of libraries lie there
    return measured


class _Sample:
    """The first rows of a weight, packed for each product that needs it, and their times."""

    def __init__(
        self, weight_NK: Tensor, candidates: Sequence[Product], stopwatch: Stopwatch
    ) -> None:
        self._candidates = [product for product in candidates if product.suits(weight_NK)]
        self._stopwatch = stopwatch
        num_outputs = _num_outputs(weight_NK)
        self._share = num_outputs / weight_NK.shape[0]
        sample_NK = weight_NK.detach()[:num_outputs]
        self._handles = {p.name: LinearHandle(sample_NK, None, [p]) for p in self._candidates}
        tiny_NK = sample_NK[:_PANEL].clone()
        self._tiny = {p.name: LinearHandle(tiny_NK, None, [p]) for p in self._candidates}
        self._inputs_TK = torch.ones(BUCKETS[-1], weight_NK.shape[1], dtype=weight_NK.dtype)
        self._seconds: dict[str, list[list[float]]] = {
            product.name: [[] for _ in BUCKETS] for product in self._candidates
        }
        self._calls: dict[str, list[float]] = {name: [] for name in self._seconds}

    def measure(self, others: Iterable[Tensor]) -> Measured:
        """Time rounds until the stopwatch is over, with `others` read between them."""
        for index, bucket in _passes():
            contenders = [p for p in self._candidates if self._is_contender(p, bucket, index)]
            if index == 0:
                self._warm_up(contenders, bucket)
            _read(others)
            for product in contenders:
                self._time(product, bucket)
            if self._stopwatch.is_over():
                break
        return {
            name: times_of(seconds, call_s=median(self._calls[name]), share=self._share)
            for name, seconds in self._seconds.items()
        }

    def _is_contender(self, product: Product, bucket: int, index: int) -> bool:
        """Whether the product is timed in round `index`; in the first one all are."""
        timed = [name for name, rounds in self._seconds.items() if rounds[bucket]]
        fastest = sorted(timed, key=lambda name: min(self._seconds[name][bucket]))
        is_default = product is default_product(BUCKETS[bucket], self._candidates)
        return index == 0 or is_default or product.name in fastest[:_MAX_CONTENDERS]

    def _warm_up(self, contenders: Iterable[Product], bucket: int) -> None:
        """Call the libraries' products, which build and cache code for a number of rows."""
        for product in contenders:
            if product.kind != "native":
                product(self._inputs_TK[: BUCKETS[bucket]], self._handles[product.name])

    def _time(self, product: Product, bucket: int) -> None:
        """Time one call with the sample, and right before one with next to no work: so no product
        pays for being the first one after the caches were left.
        """
        x_TK, name = self._inputs_TK[: BUCKETS[bucket]], product.name
        self._calls[name].append(self._stopwatch.overhead(product, x_TK[:1], self._tiny[name]))
        seconds = self._stopwatch.seconds(product, x_TK, self._handles[name])
        self._seconds[name][bucket].append(seconds)


def _passes() -> Iterator[tuple[int, int]]:
    """Yield (round, bucket), in every second round from the last bucket to the first.

    Otherwise a budget that ends early would always miss the same buckets.
    """
    buckets = range(len(BUCKETS))
    for index in range(_MAX_ROUNDS):
        for bucket in reversed(buckets) if index % 2 else buckets:
            yield index, bucket


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 2)


def _num_outputs(weight_NK: Tensor) -> int:
    """How many of the weight's rows are a sample: whole panels, if that is not all of them."""
    num_outputs, num_inputs = weight_NK.shape
    num_panels = -(-_SAMPLE_BYTES // (num_inputs * _PANEL * weight_NK.itemsize))
    return min(num_outputs, num_panels * _PANEL)


def _read(weights: Iterable[Tensor]) -> None:
    """Read these weights, or as many bytes of them as evict a processor's caches."""
    num_bytes = _READ_BETWEEN_BYTES
    for weight in weights:
        part = weight.detach().view(-1)[: num_bytes // weight.itemsize]
        part.sum()
        num_bytes -= part.nbytes
        if num_bytes <= 0:
            return
