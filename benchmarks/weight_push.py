"""What a push of weights costs by each transport, over the one copy that it cannot do without.

    python benchmarks/weight_push.py            # a minute: 500 MB
    python benchmarks/weight_push.py --small    # seconds: shows that it runs, not how well

Each round measures the floor, which is one copy of the same bytes into memory that is there, and
then each transport; ratios are taken within a round. `publish`: what the trainer does, reading,
hashing and writing each tensor once; for a collective, the broadcast to one engine of the same
process. `fetch`: until the engine has the tensors by name. Writes a Markdown page and a JSON file.
"""

from __future__ import annotations

import argparse
import datetime
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
from msgspec import structs
from rich.console import Console
from torch import Tensor

from benchmarks.machine import describe
from benchmarks.one_thread import restart_with_one_thread
from benchmarks.pages import publish
from rollout import InferenceConfig
from rollout.weights.transports.base import WeightTransport
from rollout.weights.transports.collective import CollectiveTransport
from rollout.weights.transports.directory import DirectoryTransport
from rollout.weights.transports.registry import WeightFetcher
from rollout.weights.transports.shared import SharedTransport

ROOT = Path(__file__).parent
SHARED_MEMORY = Path("/dev/shm")
Seconds = dict[str, dict[str, float]]


def model_of(num_bytes: int) -> dict[str, Tensor]:
    """bfloat16 tensors of a 0.5B model's sizes, in all about `num_bytes`."""
    sizes, tensors = [(896, 896), (4864, 896), (896, 4864), (128, 896), (896,)], {}
    left, index = num_bytes, 0
    while left > 0:
        tensor = torch.randn(sizes[index % len(sizes)], dtype=torch.bfloat16)
        tensors[f"model.{index:05d}.weight"] = tensor
        left, index = left - tensor.nbytes, index + 1
    return tensors


def floor_s(tensors: dict[str, Tensor], copies: dict[str, Tensor]) -> dict[str, float]:
    """Seconds of one copy of each tensor into memory that was written before."""
    start, cpu = time.perf_counter(), time.process_time()
    for name, tensor in tensors.items():
        copies[name].copy_(tensor)
    return {"push": time.perf_counter() - start, "cpu": time.process_time() - cpu}


def new_memory_s(tensors: dict[str, Tensor]) -> dict[str, float]:
    """Seconds of the same copy into shared memory that is new, which the system has to clear."""
    start, cpu = time.perf_counter(), time.process_time()
    descriptor = os.memfd_create("floor", os.MFD_CLOEXEC)
    for tensor in tensors.values():
        bytes_N: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        os.write(descriptor, bytes_N)
    taken = {"push": time.perf_counter() - start, "cpu": time.process_time() - cpu}
    os.close(descriptor)
    return taken


def time_push(
    transport: WeightTransport, fetcher: WeightFetcher, tensors: dict[str, Tensor]
) -> dict[str, float]:
    """Seconds of one push: to publish, until the engine has the tensors, and of CPU time."""
    start, cpu = time.perf_counter(), time.process_time()
    source = transport.publish(tensors)
    published = time.perf_counter()
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(transport.send, source)
        fetched: Any = fetcher(structs.replace(source, num_members=1))
        sending.result()
    end, cpu = time.perf_counter(), time.process_time() - cpu
    name = next(iter(tensors))
    assert len(fetched) == len(tensors)
    assert torch.equal(fetched[name], tensors[name])
    transport.commit()
    return {"publish": published - start, "fetch": end - published, "push": end - start, "cpu": cpu}


def measure(
    tensors: dict[str, Tensor], num_rounds: int
) -> tuple[list[dict[str, float]], list[dict[str, float]], list[Seconds]]:
    """Seconds of both copies and of each transport in each round; the first round is left out."""
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    floors: list[dict[str, float]] = []
    new: list[dict[str, float]] = []
    rounds: list[Seconds] = []
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory:
        transports: dict[str, WeightTransport] = {
            "shared": SharedTransport(),
            "directory": DirectoryTransport(directory),
            "collective": CollectiveTransport(),
        }
        fetchers = {kind: WeightFetcher() for kind in transports}
        for _ in range(1 + num_rounds):
            floors.append(floor_s(tensors, copies))
            new.append(new_memory_s(tensors))
            rounds.append(
                {kind: time_push(t, fetchers[kind], tensors) for kind, t in transports.items()}
            )
        for transport in transports.values():
            transport.close()
    return floors[1:], new[1:], rounds[1:]


def as_markdown(results: dict[str, Any]) -> str:
    floors, rounds = results["floor_seconds"], results["seconds"]
    new = results["new_memory_seconds"]
    machine = results["machine"]
    lines = [
        "# Pushes of weights, over one copy",
        "",
        f"{machine['cpu']}, {machine['threads']} thread, torch {machine['torch']}; load average "
        f"{results['load_average']:.1f} on {machine['num_cores']} cores. "
        f"{results['num_bytes'] / 1e6:.0f} MB of bfloat16, medians of {len(rounds)} rounds; ratios "
        f"are taken within a round. One copy into memory that is there: "
        f"{_middle(floors, 'push'):.3f} s, {_middle(floors, 'cpu'):.3f} s of CPU time; into new "
        f"shared memory: {_middle(new, 'push'):.3f} s, {_middle(new, 'cpu'):.3f} s of CPU time.",
        "",
        "| transport | publish, s | then fetched, s | push, s | / one copy | CPU, s | / one copy |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for kind in rounds[0]:
        own = [seconds[kind] for seconds in rounds]
        publish_s, fetch_s, push_s, cpu_s = (
            f"{_middle(own, part):.3f}" for part in ("publish", "fetch", "push", "cpu")
        )
        wall, cpu = (
            f"{median(r[part] / floor[part] for r, floor in zip(own, floors, strict=True)):.2f}"
            for part in ("push", "cpu")
        )
        cells = " | ".join((kind, publish_s, fetch_s, push_s, wall, cpu_s, cpu))
        lines.append(f"| {cells} |")
    return "\n".join([*lines, ""])


def _middle(seconds: list[dict[str, float]], part: str) -> float:
    return median(each[part] for each in seconds)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="2 MB, one round")
    parser.add_argument("--output", type=Path, default=ROOT / "results", help="folder of the page")
    given = parser.parse_args(arguments)
    tensors = model_of(2_000_000 if given.small else 500_000_000)
    floors, new, rounds = measure(tensors, 1 if given.small else 7)
    results = {
        "date": datetime.date.today().isoformat(),
        "machine": describe(InferenceConfig(num_threads=1)),
        "load_average": os.getloadavg()[0],
        "num_bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "floor_seconds": floors,
        "new_memory_seconds": new,
        "seconds": rounds,
    }
    publish(results, as_markdown(results), "weight-push", given.output, Console(stderr=True))
    return results


if __name__ == "__main__":
    restart_with_one_thread()
    main()
