"""What prime-rl's inference pool sends: python prime_rl_requests.py URL DIRECTORY ROOT.

prime-rl is on no package index, so this is no client of its own: these are the requests of its
InferencePool (health, models, pause, update from a directory, resume, scores) and of its metrics
collector, with their retries left out. Its training client is that of verifiers, which runs
unmodified beside this.
"""

from __future__ import annotations

import shutil
import sys
from collections import defaultdict
from pathlib import Path

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import load_file, save_file

IDS = [5, 6, 7, 8]


def post(admin: httpx.Client, path: str, **fields: object) -> None:
    """_admin_post: a 4xx is a fault at once, a 5xx would be tried again ten times."""
    admin.post(path, **fields).raise_for_status()


def update_weights(admin: httpx.Client, weight_dir: Path) -> None:
    """update_weights of its utils/client.py."""
    post(admin, "/pause", params={"mode": "keep", "clear_cache": "false"})
    try:
        (weight_dir / "NCCL_READY").touch()
        post(admin, "/update_weights", json={"weight_dir": weight_dir.as_posix()})
    finally:
        post(admin, "/resume")


def prefill_logprobs(admin: httpx.Client) -> list[float]:
    """One log-prob for each token, 0.0 for the first."""
    params = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    body = {"model": "model", "token_ids": IDS, "sampling_params": params}
    reply = admin.post("/inference/v1/generate", json=body)
    reply.raise_for_status()
    rows = reply.json()["prompt_logprobs"]
    # It takes the first entry of each row for that of the prompt's token.
    assert [next(iter(row)) for row in rows[1:]] == [str(token_id) for token_id in IDS[1:]]
    return [next(iter(row.values()))["logprob"] if row else 0.0 for row in rows]


def engine_load(admin: httpx.Client) -> dict[str, float]:
    """Return the metrics that prime-rl's collector reads of one engine, by name without `vllm:`.

    Its controller bounds the episodes in flight by them. Values are summed over labels other than
    engine and reason. The capacity is a label.
    """
    response = admin.get("/metrics", timeout=5.0)
    response.raise_for_status()
    load: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(response.text):
        if not family.name.startswith("vllm:") or family.type not in ("counter", "gauge"):
            continue
        for sample in family.samples:
            assert sample.labels["engine"] == "0"
            name = sample.name.removeprefix("vllm:")
            if name == "cache_config_info":
                load["capacity"] = int(sample.labels["kv_cache_size_tokens"])
            elif name == "num_requests_waiting_by_reason":
                load[f"waiting_{sample.labels['reason']}"] += sample.value
            else:
                load[name] += sample.value
    return load


def check_load(admin: httpx.Client) -> None:
    """Check the load of an idle engine that has served requests."""
    load = engine_load(admin)
    assert load["capacity"] > 0, "without it one episode is in flight for ever"
    gauges = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
    assert [load[name] for name in (*gauges, "waiting_capacity")] == [0.0] * 4
    counters = ("num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total")
    assert set(counters) <= set(load)
    assert load["generation_tokens_total"] > 0
    assert load["prompt_tokens_total"] >= len(IDS)


def main(url: str, directory: str, root: str) -> None:
    with httpx.Client(base_url=url, timeout=None) as admin:
        admin.get("/health").raise_for_status()
        assert "model" in [model["id"] for model in admin.get("/v1/models").json()["data"]]
        # Its NCCL broadcaster is not served; a 404 is what its client takes for that.
        broadcaster = {"host": "localhost", "port": 29500, "rank_offset": 0, "timeout": 30}
        assert admin.post("/init_broadcaster", json=broadcaster).status_code == 404
        before = prefill_logprobs(admin)
        assert before[0] == 0.0
        assert len(before) == len(IDS)
        check_load(admin)

        weights = load_file(Path(directory, "model.safetensors"))
        step = Path(root, "step_1")
        step.mkdir()
        save_file(
            {n: (t * np.float32(1.05)) for n, t in weights.items()}, step / "model.safetensors"
        )
        (step / "STABLE").touch()
        update_weights(admin, step)
        assert prefill_logprobs(admin) != before

        torn = Path(root, "step_2")
        torn.mkdir()
        content = (step / "model.safetensors").read_bytes()
        (torn / "model.safetensors").write_bytes(content[: len(content) // 2])
        refusal = None
        try:
            update_weights(admin, torn)
        except httpx.HTTPStatusError as error:
            refusal = error.response.status_code
        assert refusal == 400, "a torn file is refused"

        shutil.copytree(directory, root, dirs_exist_ok=True)
        update_weights(admin, Path(root))
        assert prefill_logprobs(admin) == before
    print("prime-rl's requests: passed")


if __name__ == "__main__":
    main(*sys.argv[1:4])
