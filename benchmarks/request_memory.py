"""What requests cost in Python's memory: per generated token while they run, and per checkpoint.

    python benchmarks/request_memory.py            # some seconds
    python benchmarks/request_memory.py --small    # shows that it runs

Bytes are those of Python objects (tracemalloc) and of the prompts' tensors, each storage once.
"""

from __future__ import annotations

import argparse
import gc
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import torch

import rollout
from benchmarks.host_step import DecodingEngine
from benchmarks.one_thread import restart_with_one_thread
from rollout import DynamicInferenceRequest, DynamicInferenceRequestRecord, SamplingParams
from rollout.config import InferenceConfig

NUM_CHECKPOINTS = 20
TOKENS_PER_CHECKPOINT = 8
_SCHEDULING = str(Path(rollout.__file__).parent / "scheduling" / "*")


def bytes_per_token(num_rows: int, num_steps: int, *, has_log_probs: bool) -> dict[str, float]:
    """Of requests that run: all that is kept, and what the scheduler alone keeps of it."""
    engine = DecodingEngine(num_rows, num_steps, has_log_probs=has_log_probs)
    tracemalloc.start()
    gc.collect()
    before = tracemalloc.take_snapshot()
    for _ in range(num_steps):
        engine.step()
    gc.collect()
    after = tracemalloc.take_snapshot()
    tracemalloc.stop()
    of_scheduler = [tracemalloc.Filter(True, _SCHEDULING)]
    num_tokens = num_rows * num_steps
    return {
        "total": _growth(before, after) / num_tokens,
        "scheduler": _growth(before.filter_traces(of_scheduler), after.filter_traces(of_scheduler))
        / num_tokens,
    }


def _growth(before: tracemalloc.Snapshot, after: tracemalloc.Snapshot) -> int:
    # The snapshots themselves are Python objects, too.
    own = tracemalloc.Filter(False, tracemalloc.__file__)
    return sum(
        difference.size_diff
        for difference in after.filter_traces([own]).compare_to(
            before.filter_traces([own]), "filename"
        )
    )


def record_bytes(prompt_len: int) -> list[dict[str, int]]:
    """A record as it begins, and after every checkpoint: in memory and on the wire."""
    rows = []
    for num_checkpoints in (0, 1, NUM_CHECKPOINTS):
        gc.collect()
        tracemalloc.start()
        record = _record(prompt_len, num_checkpoints)
        gc.collect()
        num_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        storages = {
            segment.prompt_tokens.untyped_storage().data_ptr(): segment.prompt_tokens
            for segment in record.requests
        }
        num_bytes += sum(prompt.untyped_storage().nbytes() for prompt in storages.values())
        rows.append(
            {
                "num_checkpoints": num_checkpoints,
                "in_memory": num_bytes,
                "on_the_wire": len(msgpack.packb(record.serialize())),
            }
        )
    return rows


def _record(prompt_len: int, num_checkpoints: int) -> DynamicInferenceRequestRecord:
    record = DynamicInferenceRequestRecord.from_request(
        DynamicInferenceRequest(
            request_id=0,
            prompt_tokens=torch.arange(prompt_len),
            sampling_params=SamplingParams(num_tokens_to_generate=1024),
            block_size_tokens=InferenceConfig().block_size_tokens,
            enable_prefix_caching=True,
        )
    )
    for version in range(1, num_checkpoints + 1):
        record.current.generated_tokens += range(1000, 1000 + TOKENS_PER_CHECKPOINT)
        record.current.policy_spans.append(TOKENS_PER_CHECKPOINT, version)
        record.checkpoint()
    return record


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="few rows and steps")
    arguments = parser.parse_args(argv)
    arguments.num_rows, arguments.num_steps = (4, 64) if arguments.small else (64, 512)
    return arguments


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and print. Returns what was measured."""
    arguments = parse_arguments(argv)
    results: dict[str, Any] = {}
    for has_log_probs in (False, True):
        case = bytes_per_token(arguments.num_rows, arguments.num_steps, has_log_probs=has_log_probs)
        results["with log-probs" if has_log_probs else "without log-probs"] = case
        print(
            f"{'with' if has_log_probs else 'without'} log-probs: {case['total']:.1f} bytes per "
            f"generated token, {case['scheduler']:.1f} of them the scheduler's"
        )
    results["record"] = record_bytes(prompt_len=4096)
    for row in results["record"]:
        print(
            f"record of 4096 prompt tokens, {row['num_checkpoints']:>2} checkpoints: "
            f"{row['in_memory'] / 1024:.1f} KiB in memory, "
            f"{row['on_the_wire'] / 1024:.1f} KiB on the wire"
        )
    return results


if __name__ == "__main__":
    restart_with_one_thread()
    main()
