"""Time and memory of a group's gradients, with and without a shared prefix.

    python -m benchmarks.update            # five minutes; needs SmolLM2 (extra smollm2)
    python -m benchmarks.update --small    # seconds, with a tiny model: shows that it runs

A program, run by hand. `benchmarks.pushes` imports `load_policy`. It computes loss and gradients of
8 rollouts of one prompt, in float32 on one thread. The ways are whole rows, trees that compute the
shared prompt once, and trees with gradient checkpointing or autocast. Each way runs in a child
process. The program prints the least CPU seconds, the peak memory, and the largest difference from
the gradients of whole rows.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.machine import reset_peak, status_bytes
from benchmarks.one_thread import restart_with_one_thread
from benchmarks.packing import random_batch
from benchmarks.pages import at_least_one
from rollout.backends.cpu.mapping import trim_heap
from rollout.models.checkpoints.smollm2 import model_directory
from trainer_hooks import (
    PolicyLossConfig,
    RolloutBatch,
    UpdateSettings,
    accumulate_gradients,
    compute_logprobs,
)

GROUP_SIZE = 8
SIZES = ((40, 12), (200, 32), (400, 100))  # tokens of the prompt and of each completion
PLAIN = "whole rows"
WAYS: dict[str, dict[str, Any]] = {  # settings of the update
    PLAIN: {"share_prefixes": False},
    "trees": {},
    "trees, checkpointed": {"gradient_checkpointing": True},
    "trees, bfloat16 autocast": {"autocast": "bfloat16"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Costs of a group's gradients.

    peak_bytes: peak memory in bytes, without the loaded model and its gradients.
    """

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


def measure(size: tuple[int, int], way: str, is_small: bool, rounds: int, to: Path) -> Result:
    """Compute the gradients of a group `rounds` times, and write them to the file `to`.

    `size` is the number of tokens of the prompt and of each completion. `way` is a key of WAYS.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = load_policy(is_small).train()
    settings, loss = UpdateSettings(**WAYS[way]), PolicyLossConfig(kind="dapo")

    def sampled(prompt_tokens: int, new_tokens: int) -> RolloutBatch:
        batch = group_of(prompt_tokens, new_tokens, policy.config.vocab_size)
        old_BT = compute_logprobs(policy, batch, UpdateSettings())  # so all ratios are 1
        return replace(batch, behaviour_logprobs_BT=old_BT)

    def accumulate(batch: RolloutBatch) -> None:
        advantages_B1 = torch.linspace(-1.0, 1.0, GROUP_SIZE)[:, None]
        columns = {"advantages_BT": advantages_B1.expand(batch.tokens_BT.shape)}
        policy.zero_grad(set_to_none=False)  # their memory stays
        accumulate_gradients(policy, batch, columns, loss, settings)

    accumulate(sampled(4, 2))
    batch = sampled(*size)
    trim_heap()
    base, times = reset_peak(), []
    for _ in range(rounds):
        start = time.process_time()
        accumulate(batch)
        times.append(time.process_time() - start)
    torch.save({name: p.grad for name, p in policy.named_parameters()}, to)
    return Result(cpu_s=min(times), peak_bytes=status_bytes("VmHWM") - base)


def largest_difference(first: Path, second: Path) -> float:
    """Return the largest difference between the gradients in two files.

    A difference is relative to the parameter's largest gradient in `second`.
    """
    ours, theirs = torch.load(first), torch.load(second)
    return max(
        float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1e-30))
        for name in theirs
    )


def _size(text: str) -> tuple[int, int]:
    prompt_tokens, _, new_tokens = text.partition("+")
    return int(prompt_tokens), int(new_tokens)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Result]]:
    """Run the benchmark, print a table, and return the results by size and way."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="a tiny model and short rollouts")
    parser.add_argument("--rounds", type=at_least_one, default=2, help="the least time is printed")
    parser.add_argument(
        "--sizes", type=_size, nargs="+", default=SIZES, metavar="PROMPT+NEW", help="such as 200+32"
    )
    arguments = parser.parse_args(argv)
    sizes = ((5, 3),) if arguments.small else arguments.sizes
    console, results = Console(), []
    table = Table("prompt + completion", "way", "CPU s", "peak MiB", "difference", "faster")
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, Progress(console=console) as progress:
        task = progress.add_task("updates", total=len(sizes) * len(WAYS))
        for size in sizes:
            found: dict[str, Result] = {}
            files = {way: Path(folder) / f"{way}.pt" for way in WAYS}
            for way, file in files.items():
                with processes.Pool(1) as pool:  # a new process, with no memory of another way
                    given = (size, way, arguments.small, arguments.rounds, file)
                    found[way] = pool.apply(measure, given)
                progress.advance(task)
            for way, result in found.items():
                table.add_row(
                    f"{size[0]} + {size[1]}", way, f"{result.cpu_s:.2f}",
                    f"{result.peak_bytes / 2**20:.0f}",
                    f"{largest_difference(files[way], files[PLAIN]):.0e}",
                    f"{found[PLAIN].cpu_s / result.cpu_s:.1f}x",
                )  # fmt: skip
            results.append(found)
    console.print(table)
    return results


if __name__ == "__main__":
    restart_with_one_thread()
    main()
