"""`serve` runs an engine of `benchmarks.peers` in its process, and answers requests.

Used by `benchmarks.peers_rollout`, `benchmarks.peers_transformers`, `benchmarks.peers_vllm`,
`benchmarks.peers_llama` and `benchmarks.peers_openvino`. `WorkerProcess` in
`benchmarks.peers_process` sends the requests. `benchmarks.coordinator_fleet` and
`benchmarks.serving_processes` use the functions for CPU times, and `benchmarks.peers_environments`
uses KV_CACHE_GIB. This module needs only the standard library and NumPy, because the process runs
in the engine's own environment.

A request is a line of JSON on stdin. Its reply is a line of JSON on stdout:

    {"method": "convert", "model": FOLDER, "target": FOLDER, "precision": "float32"}   {}
    {"method": "load", "model": FOLDER, "precision": "float32", "num_threads": 1}      {}
    {"method": "generate", "workload": {...}, "seed": 0}   {"tokens": [[...], ...],
                                                          "cpu_seconds": 1.5, "wall_seconds": 1.5}

The reply to a request that fails is {"error": "..."}. The end of stdin ends the process. Output
that the engine prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from benchmarks.workloads import Generated, Workload, require_what_was_asked

MAX_SEQUENCE_LENGTH = 2304  # tokens of prompt and output
MAX_NUM_SEQUENCES = 64
KV_CACHE_GIB = 1  # size of the KV cache of engines that need one


class Peer(Protocol):
    """An engine under measurement. `precision` is "float32", "bfloat16" or "int8"."""

    def load(self, model: Path, precision: str, num_threads: int) -> None:
        """Load a model from a Hugging Face directory, or from the folder that `convert` wrote.

        Raises an error if this machine cannot run the model in this precision.
        """
        ...

    def generate(self, workload: Workload, seed: int) -> Generated:
        """Generate all samples of the workload."""
        ...


# Converts a Hugging Face directory to a peer's own format: model, target folder, precision.
Convert = Callable[[Path, Path, str], None]


def serve(peer: Peer, convert: Convert | None = None) -> None:
    """Answer requests until stdin ends.

    `convert` writes a model in the peer's own file format, or is None if the peer has no own
    format.
    """
    replies = _replies()
    for line in sys.stdin:
        try:
            reply = _answer(peer, convert, json.loads(line))
        except Exception as error:  # reported to the parent, which decides whether to continue
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _replies() -> TextIO:
    """Return the pipe to the parent. Redirects stdout to stderr, also for C code."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return pipe


def _answer(peer: Peer, convert: Convert | None, request: Mapping[str, Any]) -> dict[str, Any]:
    method = request["method"]
    if method == "convert" and convert is not None:
        convert(Path(request["model"]), Path(request["target"]), request["precision"])
        return {}
    if method == "load":
        peer.load(Path(request["model"]), request["precision"], request["num_threads"])
        return {}
    if method == "generate":
        return _timed(peer, Workload(**request["workload"]), request["seed"])
    raise ValueError(f"unknown method {method!r}")


def _timed(peer: Peer, workload: Workload, seed: int) -> dict[str, Any]:
    cpu_start, wall_start = cpu_seconds(), time.perf_counter()
    generated = peer.generate(workload, seed)
    cpu_end, wall_end = cpu_seconds(), time.perf_counter()
    require_what_was_asked(type(peer).__name__, workload, generated)
    return {
        "tokens": [[int(token) for token in row] for row in generated.tokens],
        "cpu_seconds": cpu_end - cpu_start,
        "wall_seconds": wall_end - wall_start,
    }


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and all its descendants."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    running = sum(process_seconds(pid) for pid in descendants(os.getpid()))
    return time.process_time() + ended.ru_utime + ended.ru_stime + running


def descendants(ancestor: int) -> list[int]:
    """Return the process ids of all descendants of `ancestor`, or [] if /proc is missing."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        children.setdefault(int(after_name[1]), []).append(int(path.parent.name))
    found, unvisited = [], [ancestor]
    while unvisited:
        descendants = children.get(unvisited.pop(), [])
        found += descendants
        unvisited += descendants
    return found


def process_seconds(pid: int) -> float:
    """Return the CPU seconds of a running process, or 0 if the process has ended."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # see clock_getcpuclockid(3)
    except OSError:  # it has ended
        return 0.0
