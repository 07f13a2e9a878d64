"""What requests cost in Python's memory: per generated token while they run, per checkpoint, and as
a reply between an engine and a client, where it also tells the CPU time.

    python benchmarks/request_memory.py            # some seconds
    python benchmarks/request_memory.py --small    # shows that it runs

Bytes are those of Python objects (tracemalloc) and of the prompts' tensors, each storage once.
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import torch

import rollout
from benchmarks.host_step import DecodingEngine
from benchmarks.one_thread import restart_with_one_thread
from rollout import DynamicInferenceRequest, DynamicInferenceRequestRecord, SamplingParams
from rollout.coordinator.protocol.packed import pack_record, unpack_record
from rollout.engine.output_processor import RequestState

BLOCK_SIZE = 64
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
            block_size_tokens=BLOCK_SIZE,
            enable_prefix_caching=True,
        )
    )
    for version in range(1, num_checkpoints + 1):
        record.current.generated_tokens += range(1000, 1000 + TOKENS_PER_CHECKPOINT)
        record.current.policy_spans.append(TOKENS_PER_CHECKPOINT, version)
        record.checkpoint()
    return record


def reply_costs(num_tokens: int) -> dict[str, float]:
    """A finished record on its way: CPU microseconds to pack it where it was generated and to
    unpack it at the client, and what a token keeps there, before and after its lists are read."""
    record = _generated(num_tokens)
    packed = pack_record(record)
    costs = {
        "pack_us": _cpu_us(lambda: pack_record(record)),
        "unpack_us": _cpu_us(lambda: unpack_record(packed)),
        "merge_us": _cpu_us(unpack_record(packed).merge),
        "wire_bytes": len(packed) / num_tokens,
    }
    gc.collect()
    tracemalloc.start()
    arrived = unpack_record(packed)
    gc.collect()
    costs["kept_bytes"] = tracemalloc.get_traced_memory()[0] / num_tokens
    arrived.serialize()  # reads all lists
    gc.collect()
    costs["read_bytes"] = tracemalloc.get_traced_memory()[0] / num_tokens
    tracemalloc.stop()
    return costs


def _generated(num_tokens: int) -> DynamicInferenceRequestRecord:
    """As an engine leaves it."""
    request = DynamicInferenceRequest(
        request_id=0,
        prompt_tokens=torch.arange(64),
        sampling_params=SamplingParams(num_tokens_to_generate=num_tokens, return_log_probs=True),
        generated_log_probs=[],
        tpot=[],
    )
    running = RequestState(DynamicInferenceRequestRecord.from_request(request), entry_time=0.0)
    assert running.log_probs is not None
    assert running.tpot is not None
    for index in range(num_tokens):
        running.token_ids.append(index % 100_000)
        running.log_probs.append(-index / 7)
        running.tpot.append(index / 3)
    request.policy_spans.append(num_tokens, 0)
    request.kv_spans.append(64 + num_tokens - 1, 0)
    request.complete()
    return running.record


def _cpu_us(call: Callable[[], object], num_calls: int = 20, num_rounds: int = 5) -> float:
    """The best of a few rounds."""
    rounds = []
    for _ in range(num_rounds):
        start = time.process_time()
        for _ in range(num_calls):
            call()
        rounds.append((time.process_time() - start) / num_calls * 1e6)
    return min(rounds)


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
    results["reply"] = reply = reply_costs(num_tokens=8192)
    print(
        f"reply of 8192 tokens: packed in {reply['pack_us']:.0f} us, unpacked in "
        f"{reply['unpack_us']:.0f} us, merged in {reply['merge_us']:.0f} us; a token takes "
        f"{reply['wire_bytes']:.1f} bytes on the wire, {reply['kept_bytes']:.1f} at the client and "
        f"{reply['read_bytes']:.1f} once it is read"
    )
    return results


if __name__ == "__main__":
    restart_with_one_thread()
    main()
