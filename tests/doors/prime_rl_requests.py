"""What prime-rl's inference pool sends: python prime_rl_requests.py URL DIRECTORY ROOT.

prime-rl is on no package index, so this is no client of its own: these are the requests of its
InferencePool (health, models, pause, update from a directory, resume, scores), with their retries
left out. Its training client is that of verifiers, which runs unmodified beside this.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import httpx
import numpy as np
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
    return [next(iter(row.values()))["logprob"] if row else 0.0 for row in rows]


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
