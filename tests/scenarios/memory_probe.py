"""Fills a pool, suspends and resumes, and reads from the system what that did to this process."""

from __future__ import annotations

from pathlib import Path

import torch

from rollout import InferenceConfig, SamplingParams
from rollout.models import CausalLM
from rollout.models.spec import ModelSpec
from tests.inspected_engine import InspectedEngine

# 44 MiB of weights.
SPEC = ModelSpec(
    family="llama",
    vocab_size=4096,
    hidden_size=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    intermediate_size=1024,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)
POOL_GB = 0.501
SMALL_POOL_GB = 0.051  # where only addresses count
NUM_CYCLES = 20


def mapping_of(address: int) -> dict[str, int]:
    """Return start, end and Rss, in bytes, of the mapping around `address`, from smaps."""
    found: dict[str, int] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            found = {"start": start, "end": end} if start <= address < end else {}
        elif found and first == "Rss:":
            return found | {"rss": int(rest[0]) * 1024}
    return {"start": 0, "end": 0, "rss": 0}


def private_dirty() -> int:
    """Bytes of Private_Dirty of the whole process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty"))


def filled_engine(kind: str, *, is_static: bool) -> InspectedEngine:
    """Return an engine with two running requests, and every page of its pool written."""
    config = InferenceConfig(
        block_size_tokens=16,
        max_sequence_length=512,
        buffer_size_gb=SMALL_POOL_GB if is_static else POOL_GB,
        memory_kind=kind,
        kv_cache_management_mode="recompute" if is_static else "persist",
        static_kv_memory_pointers=is_static,
    )
    engine = InspectedEngine.from_model(CausalLM.random(SPEC), config)
    for layer in engine.kv.layers:
        layer.fill_(1.0)
    for seed in range(2):
        params = SamplingParams(num_tokens_to_generate=64, seed=seed)
        engine.add_request(list(range(30)), params)
    engine.step()
    engine.step()
    return engine


def cycle(kind: str, mode: str, release: tuple[str, ...]) -> dict[str, object]:
    """Suspend and resume. Returns the system's counts before, between and after."""
    engine = filled_engine(kind, is_static=False)
    engine.pause()
    address = min(engine.kv_data_ptrs().values())
    weights = min(engine.weight_data_ptrs().values())
    before = {"kv": mapping_of(address), "weights": mapping_of(weights), "dirty": private_dirty()}
    report = engine.suspend(mode, release)
    after = {"kv": mapping_of(address), "weights": mapping_of(weights), "dirty": private_dirty()}
    checks = {"released": report.bytes_released, "on_host": report.bytes_on_host}
    engine.resume()
    engine.unpause()
    num_finished = 0
    while engine.has_unfinished_requests():
        num_finished += len(engine.step())
    return {
        "before": before,
        "after": after,
        "pool": engine.memory_status().resident_bytes["kv_cache"],
        "weights": engine.memory_status().resident_bytes["weights"],
        "num_finished": num_finished,
        **checks,
    }


def static_cycles(mode: str) -> tuple[list[dict[str, int]], int]:
    """Addresses of the KV before and after each of 20 suspend, update, resume; the last version."""
    engine = filled_engine("reserved", is_static=True)
    pointers = [engine.kv_data_ptrs()]
    source = CausalLM.random(SPEC, seed=1).read_weights()
    for _ in range(NUM_CYCLES):
        engine.pause()
        engine.suspend(mode)
        ballast = torch.ones(8 << 20)  # takes addresses that were given back
        engine.update_weights(source)
        engine.resume()
        del ballast
        engine.unpause()
        engine.step()
        pointers.append(engine.kv_data_ptrs())
    version = engine.weights_version
    engine.shutdown()
    return pointers, version
