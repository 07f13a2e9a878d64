"""Time weight updates of a mixture of experts, with one tensor per expert or per stack of experts.

    python -m benchmarks.expert_updates            # a minute
    python -m benchmarks.expert_updates --small    # seconds: shows that it runs

A program, run by hand. One model has as many weight names as a Qwen3-MoE of 48 layers and 128
experts, but few bytes. The other model has 64 larger experts per layer. The same weights are
updated under two sets of names:

- saved: the names in a saved checkpoint, with a matrix for each part of each expert.
- live: the names of a live module, with a tensor that stacks one part of all experts.

The column `checked` is the time of staging with a source checksum, and `clone` the time to copy all
weights. Times are the best of the rounds. The program prints a Markdown page, and writes it and a
JSON file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.one_thread import restart_with_one_thread
from benchmarks.pages import dated, publish, results_parser
from rollout import InferenceConfig
from rollout.backends.ops.fingerprint import hashed_dtype
from rollout.backends.select import create_backend
from rollout.models import CausalLM, ModelSpec
from rollout.weights.served import ServedWeights
from rollout.weights.update import checksum_of

CONFIG = InferenceConfig(num_threads=1)
LARGE = ModelSpec(
    family="qwen3_moe",
    vocab_size=1024,
    hidden_size=512,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=256,
    max_position_embeddings=512,
    qk_norm=True,
    moe_layers=tuple(range(4)),
    num_experts=64,
    experts_per_token=8,
    expert_size=256,
)
MANY = replace(
    LARGE,
    hidden_size=16,
    num_layers=48,
    moe_layers=tuple(range(48)),
    num_experts=128,
    expert_size=8,
)
SMALL = replace(MANY, num_layers=2, moe_layers=(0, 1), num_experts=8)


def measure(spec: ModelSpec, num_rounds: int) -> dict[str, Any]:
    """Return the wall seconds to build the weight table, and to stage and commit all weights."""
    backend, model = create_backend(CONFIG), CausalLM(spec)
    start = time.perf_counter()
    table = model.weight_table()
    first_table = time.perf_counter() - start
    model.randomize(seed=0)
    served = ServedWeights(model, backend, version=0, reject_non_finite=True)
    model.prepare(backend)
    saved = {name: slot.read().clone() for name, slot in table.slots.items()}
    dialects = {"saved": saved, "live": _live(model, saved)}
    return {
        "num_names": len(table.slots) + len(table.aliases),
        "num_bytes": sum(tensor.nbytes for tensor in saved.values()),
        "first_table": first_table,
        "table": _best(num_rounds, model.weight_table),
        "checksum": _best(num_rounds, served.checksum),
        "clone": _best(num_rounds, lambda: [t.clone() for t in dialects["live"].values()]),
        "dialects": {name: _updates(served, t, num_rounds) for name, t in dialects.items()},
    }


def _live(model: CausalLM, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under a live module's names, with experts as stacks."""
    live, aliases = dict(saved), model.weight_table().aliases
    for name, alias in aliases.items():
        stack = torch.empty(alias.shape, dtype=model.spec.dtype)
        for part, index in alias.parts.items():
            stack[index] = live.pop(part)
        live[name] = stack
    return live


def _updates(served: ServedWeights, given: dict[str, Tensor], num_rounds: int) -> dict[str, Any]:
    """Return the seconds to stage the tensors `given`, to stage with a checksum, and to commit."""
    ops = create_backend(CONFIG).ops
    announced = checksum_of(
        {n: ops.fingerprint(t, hashed_dtype(t.dtype)).tolist() for n, t in given.items()}
    )
    commits = []
    for _ in range(num_rounds):
        staged = served.stage(given)
        commits.append(_best(1, partial(served.commit, staged, None)))
    return {
        "num_tensors": len(given),
        "stage": _best(num_rounds, lambda: served.stage(given)),
        "checked": _best(num_rounds, lambda: served.stage(given, source_checksum=announced)),
        "commit": min(commits),
    }


def _best(num_rounds: int, work: Callable[[], object]) -> float:
    """Return the wall seconds of the fastest of `num_rounds` calls."""
    seconds = []
    for _ in range(num_rounds):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def as_markdown(results: dict[str, Any]) -> str:
    """Return a Markdown page with a row for each model and set of names."""
    machine = results["machine"]
    lines = [
        f"# Updates of experts, {results['date']}",
        "",
        f"{machine['cpu']}, one thread, torch {machine['torch']}. Best of {results['num_rounds']}.",
        "",
        "| model | names | MB | tensors | stage | checked | commit | clone | checksum |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    tables = []
    for title, model in results["models"].items():
        tables.append(
            f"{title}: {model['num_names']:,} names, table {model['first_table']:.2f} s once, then "
            f"{model['table'] * 1e6:.1f} µs."
        )
        for dialect, row in model["dialects"].items():
            seconds = [row["stage"], row["checked"], row["commit"]]
            cells = [*seconds, model["clone"], model["checksum"]]
            lines.append(
                f"| {title} | {dialect} | {model['num_bytes'] / 1e6:,.0f} | {row['num_tensors']:,} "
                f"| {' | '.join(f'{value:.3f} s' for value in cells)} |"
            )
    return "\n".join([*lines, "", *tables]) + "\n"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print and write the results, and return them."""
    arguments = results_parser(__doc__, rounds=3, small="few experts, one round").parse_args(argv)
    models = {"48 x 128 experts, tiny": MANY, "4 x 64 experts": LARGE}
    if arguments.small:
        models, arguments.rounds = {"small": SMALL}, 1
    results = {
        **dated(CONFIG),
        "num_rounds": arguments.rounds,
        "models": {title: measure(spec, arguments.rounds) for title, spec in models.items()},
    }
    publish(results, as_markdown(results), "expert-updates", arguments.output, Console(stderr=True))
    return results


if __name__ == "__main__":
    restart_with_one_thread()
    main()
