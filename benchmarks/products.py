"""Compare the matrix products that the engine chose with all other available products.

`python -m benchmarks.products`, run by hand, prints the engine's report of its choice, then a
table. For each shape of weights and number of rows, the table has CPU microseconds of the chosen
product, the ratio to the fastest product, and the ratio to the fastest product of torch's
libraries. Ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.models import MODELS
from rollout import InferenceConfig
from rollout.backends.cpu.kernels import Kernels
from rollout.backends.cpu.library import load_library
from rollout.backends.cpu.products import (
    LinearHandle,
    Product,
    available_products,
    bucket_of,
)
from rollout.backends.select import create_backend
from rollout.layers.linear import Linear
from rollout.models import build_model

ROWS = (1, 8, 16, 64, 256)
NUM_ROUNDS = {1: 25, 8: 21, 16: 15, 64: 9, 256: 5}
# By product, then by shape: the CPU seconds of each round.
Seconds = dict[str, dict[str, list[float]]]


class Contest:
    """All matrix products that run on this machine, with prepared handles of the model's
    weights."""

    def __init__(self, layers: Sequence[Linear]) -> None:
        library = load_library()
        kernels = None if library is None else Kernels(library)
        self.products = {product.name: product for product in available_products(kernels)}
        self._layers = layers
        weights = [plain_weight(layer) for layer in layers]
        self._handles = {
            name: [LinearHandle(weight, None, [product]) for weight in weights]
            for name, product in self.products.items()
            if product.layout is not None or name == "plain"
        }
        self.weights = weights

    @torch.inference_mode()
    def play(self, num_rows: int) -> Seconds:
        """Run the rounds of `num_rows` rows, and return CPU seconds by product and shape."""
        seconds: Seconds = {name: {} for name in self.products}
        inputs = {w.shape[1]: torch.ones(num_rows, w.shape[1]) for w in self.weights}
        for index in range(NUM_ROUNDS[num_rows]):
            for name in seconds if index % 2 else reversed(seconds):
                for shape, spent in self._pass(self.products[name], inputs).items():
                    seconds[name].setdefault(shape, []).append(spent)
        return seconds

    def chosen(self, num_rows: int) -> dict[str, str]:
        """Return the name of the product that the engine chose, by shape."""
        bucket = bucket_of(num_rows)
        pairs = zip(self.weights, self._layers, strict=True)
        return {label(weight): layer.handle.products[bucket].name for weight, layer in pairs}

    def _pass(self, product: Product, inputs: dict[int, Tensor]) -> dict[str, float]:
        """Run a product on all weights that suit it, and return CPU seconds by shape."""
        spent: dict[str, float] = {}
        handles = self._handles[product.name if product.layout is not None else "plain"]
        for weight, handle in zip(self.weights, handles, strict=True):
            if product.suits(weight):
                start = time.thread_time()
                product(inputs[weight.shape[1]], handle)
                shape, seconds = label(weight), time.thread_time() - start
                spent[shape] = spent.get(shape, 0.0) + seconds
        return spent


def plain_weight(layer: Linear) -> Tensor:
    """Return the layer's weight [N, K], unpacked if the engine has repacked it."""
    repacked = layer.repacked
    return layer.weight.detach() if repacked is None else repacked.read(0, repacked.shape[0])


def label(weight: Tensor) -> str:
    """Return the weight's shape as text, such as "512x1728"."""
    return "x".join(map(str, weight.shape))


def ratio(seconds: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of `seconds` / `others`, round by round."""
    return statistics.median(a / b for a, b in zip(seconds, others, strict=True))


def add_rows(table: Table, contest: Contest, num_rows: int) -> None:
    """Measure products of `num_rows` rows. Adds a table row for each shape, and one for all
    weights."""
    seconds = contest.play(num_rows)
    sums = {role: [0.0] * NUM_ROUNDS[num_rows] for role in ("chosen", "best", "library")}
    for shape, product in contest.chosen(num_rows).items():
        candidates = {name: rounds[shape] for name, rounds in seconds.items() if shape in rounds}
        chosen = candidates[product]
        best, *rest = sorted(candidates, key=lambda name: statistics.median(candidates[name]))
        library = next(n for n in (best, *rest) if contest.products[n].kind != "native")
        shown = {"chosen": chosen, "best": candidates[best], "library": candidates[library]}
        for role, rounds in shown.items():
            sums[role] = [a + b for a, b in zip(sums[role], rounds, strict=True)]
        table.add_row(
            *(shape, str(num_rows), product, f"{1e6 * statistics.median(chosen):.0f}"),
            *(best, f"{ratio(chosen, candidates[best]):.2f}"),
            *(library, f"{ratio(chosen, candidates[library]):.2f}"),
        )
    table.add_row(
        *("all", str(num_rows), "", f"{1e6 * statistics.median(sums['chosen']):.0f}"),
        *("", f"{ratio(sums['chosen'], sums['best']):.2f}"),
        *("", f"{ratio(sums['chosen'], sums['library']):.2f}"),
        end_section=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="m45")
    spec = MODELS[parser.parse_args().model]
    torch.set_num_threads(1)
    backend = create_backend(InferenceConfig())
    model = build_model(spec)
    model.prepare(backend)
    print(backend.ops.explain())
    contest = Contest([*model.linear_layers().values()])
    columns = ("weights", "rows", "chosen", "us", "best", "chosen/best")
    table = Table(*columns, "best library", "chosen/library")
    for num_rows in ROWS:
        add_rows(table, contest, num_rows)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
