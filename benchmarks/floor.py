"""The floor of a forward pass: CPU seconds of its bare matrix products.

Used by `benchmarks.generate` and `benchmarks.report`. A pass of T tokens multiplies T rows by the
matrices of every layer. The head's matrix is multiplied only by the rows whose logits are needed.
The floor uses the fastest of up to three products: torch's, oneDNN's with packed weights, or the
engine's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout import InferenceConfig, SamplingParams
from rollout.backends.base import Ops
from rollout.backends.select import create_backend
from rollout.engine.engine import Engine
from rollout.layers.linear import Linear
from rollout.models import CausalLM, build_model

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """Rows of one forward pass: `num_tokens` in the layers, `num_logits` in the head."""

    num_tokens: int
    num_logits: int


class MatmulFloor:
    """CPU seconds of the bare matrix products of a model. Each number of rows is measured once."""

    def __init__(self, model: Any, config: InferenceConfig) -> None:
        backend = create_backend(config)
        causal_lm: CausalLM = build_model(model)
        linears = [m for m in causal_lm.modules() if isinstance(m, Linear)]
        self._head = _products([causal_lm.lm_head], backend.ops)
        self._trunk = _products([m for m in linears if m is not causal_lm.lm_head], backend.ops)
        self._widths = [m.weight.shape[1] for m in linears if m is not causal_lm.lm_head]
        self._hidden_size = causal_lm.spec.hidden_size
        self._best: dict[tuple[str, int], tuple[float, str]] = {}

    def seconds(self, rows: StepRows) -> float:
        """Return the floor of one forward pass, in CPU seconds."""
        trunk, _ = self._measure("trunk", rows.num_tokens)
        head, _ = self._measure("head", rows.num_logits)
        return trunk + head

    def fastest(self, rows: StepRows) -> str:
        """Return the name of the fastest product, and the name of the head's product if it
        differs."""
        _, trunk = self._measure("trunk", rows.num_tokens)
        _, head = self._measure("head", rows.num_logits)
        return trunk if trunk == head else f"{trunk}, head {head}"

    def run(self, rows: StepRows) -> None:
        """Run the fastest products once, for the caller to time."""
        for part, num_rows in (("trunk", rows.num_tokens), ("head", rows.num_logits)):
            self._run(part, num_rows, self._measure(part, num_rows)[1])

    def _measure(self, part: str, num_rows: int) -> tuple[float, str]:
        """Return the CPU seconds and the name of the fastest product of "trunk" or "head"."""
        if not num_rows:
            return 0.0, "none"
        key = (part, num_rows)
        if key not in self._best:
            num_repeats = 5 if num_rows <= 128 else 2
            kinds = self._trunk if part == "trunk" else self._head
            seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
            for _ in range(num_repeats):
                for kind, samples in seconds.items():
                    start = time.process_time()
                    self._run(part, num_rows, kind)
                    samples.append(time.process_time() - start)
            self._best[key] = min((statistics.median(s), kind) for kind, s in seconds.items())
        return self._best[key]

    @torch.inference_mode()
    def _run(self, part: str, num_rows: int, kind: str) -> None:
        if not num_rows:
            return
        widths, products = self._widths, self._trunk
        if part == "head":
            widths, products = [self._hidden_size], self._head
        inputs = {width: torch.ones(num_rows, width) for width in set(widths)}
        for width, product in zip(widths, products[kind], strict=True):
            product(inputs[width])


def _products(linears: list[Linear], ops: Ops[Any]) -> dict[str, list[Product]]:
    """Return the products by kind, such as "torch": a function for each layer."""
    weights = [linear.weight.detach() for linear in linears]
    handles = [ops.prepare_linear(weight) for weight in weights]
    ops.choose_products(handles)
    kinds = {
        "torch": [_plain(weight) for weight in weights],
        "engine": [_engine(handle, ops) for handle in handles],
    }
    if torch.backends.mkldnn.is_available():
        kinds["oneDNN packed"] = [_packed(weight) for weight in weights]
    return kinds


def _plain(weight_NK: Tensor) -> Product:
    return lambda x_TK: F.linear(x_TK, weight_NK)


def _engine(handle: Any, ops: Ops[Any]) -> Product:
    return lambda x_TK: ops.linear(x_TK, handle)


def _packed(weight_NK: Tensor) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK, 64)
    return lambda x_TK: torch.ops.mkldnn._linear_pointwise(x_TK, packed, None, "none", [], "")


class StepTrace:
    """A MetricsWriter that keeps the rows of every engine step until `take_runs` or `clear`."""

    def __init__(self) -> None:
        self._steps: list[StepRows] = []

    def log(self, metrics: Mapping[str, float]) -> None:
        """Keep the rows of one step, read from the engine's metrics."""
        num_prefill = int(metrics["engine/last_step/num_prefill_tokens"])
        num_tokens = num_prefill + int(metrics["engine/last_step/num_decode_tokens"])
        num_logits = int(metrics["engine/last_step/num_sampled_tokens"])
        self._steps.append(StepRows(num_tokens=num_tokens, num_logits=num_logits))

    def clear(self) -> None:
        self._steps.clear()

    def take_runs(self, num_runs: int, *, num_forked: int) -> list[StepRows]:
        """Return the first run's steps, and clear all. All `num_runs` runs are equal.

        `num_forked` is the number of samples in the first step that share another sample's logits.
        """
        steps, self._steps = self._steps, []
        run = steps[: len(steps) // num_runs]
        if num_forked:
            num_logits = run[0].num_logits - num_forked
            run[0] = StepRows(num_tokens=run[0].num_tokens, num_logits=num_logits)
        return run


def total_seconds(floor: MatmulFloor, steps: Iterable[StepRows]) -> float:
    """Return the floor of a whole run, in CPU seconds."""
    return sum(floor.seconds(rows) for rows in steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Medians over decode steps: CPU milliseconds of a step and of its floor, and their ratio.

    batch: rows of a step.
    context: mean context tokens of a row.
    floor_product: name of the fastest product.
    """

    batch: int
    context: int
    step_ms: float
    floor_ms: float
    ratio: float
    floor_product: str


def decode_step_cost(
    engine: Engine, floor: MatmulFloor, batch: int, *, vocab_size: int, num_steps: int
) -> StepCost:
    """Run `num_steps` decode steps of `batch` rows, and time each step and then its floor.

    Runs all requests to their end.
    """
    prompt_len = 128
    params = [
        SamplingParams(
            num_tokens_to_generate=num_steps + 3, ignore_eos=True, return_log_probs=True, seed=seed
        )
        for seed in range(batch)
    ]
    engine.add_group([(7 * i) % vocab_size for i in range(prompt_len)], params)
    rows = StepRows(num_tokens=batch, num_logits=batch)
    engine.step()  # prefill
    engine.step()  # blocks shared by the group are copied
    floor.run(rows)
    pairs = []
    for _ in range(num_steps):
        start = time.process_time()
        engine.step()
        middle = time.process_time()
        floor.run(rows)
        pairs.append((middle - start, time.process_time() - middle))
    while engine.has_unfinished_requests():
        engine.step()
    return StepCost(
        batch=batch,
        context=prompt_len + 2 + num_steps // 2,
        step_ms=1e3 * statistics.median(step for step, _ in pairs),
        floor_ms=1e3 * statistics.median(bare for _, bare in pairs),
        ratio=statistics.median(step / bare for step, bare in pairs),
        floor_product=floor.fastest(rows),
    )
