"""A fleet whose engine runs beside a vLLM server: the server is killed and started again."""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from rollout import AsyncLLM, SamplingParams
from tests.apis.shells import shell
from tests.contracts.vllm_engines import HAS_VLLM, directory_of, vllm_weights
from tests.rollout_vllm.vllm_server import ServerProcess, vllm_server

IS_INSTALLED = any(p.name == "vllm-server" for p in entry_points(group="rollout.engines"))
if not (HAS_VLLM and IS_INSTALLED):
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)

PARAMS = SamplingParams(num_tokens_to_generate=300, return_log_probs=True, termination_id=-1)
NUM_REQUESTS = 6
EXIT_S = 300


@pytest.mark.timeout(2400)
def test_requests_of_a_killed_vllm_server_go_on_beside_the_next_one(tmp_path: Path) -> None:
    """Each request ends once. The new server begins with the checkpoint and gets the fleet's
    weights before it gets requests."""
    asyncio.run(kill_and_replace(tmp_path))


async def kill_and_replace(folder: Path) -> None:
    async with AsyncLLM(directory_of(), data_parallel_size=1, spawn=0) as llm:
        address = llm.address
        with vllm_server(folder / "first") as first, beside(address, first) as engine:
            await llm.generate([1, 2], SamplingParams(num_tokens_to_generate=1))  # it has joined
            await llm.update_weights(vllm_weights(1), 1, in_flight=True)
            await asyncio.to_thread(first.pause)
            tasks = [
                asyncio.create_task(llm.generate([5 + i] * 40, PARAMS)) for i in range(NUM_REQUESTS)
            ]
            while (await llm.stats()).num_running < NUM_REQUESTS:  # they have come to the server
                await asyncio.sleep(0.05)
            first.kill()
            fault = await asyncio.to_thread(engine.communicate, None, EXIT_S)
            assert "does not answer" in fault[1]
            assert engine.returncode == 1
        assert not any(task.done() for task in tasks)
        with vllm_server(folder / "second") as second, beside(address, second):
            requests = await asyncio.gather(*tasks)
            await llm.shutdown()
    for request in requests:
        assert request.num_generated_tokens == PARAMS.num_tokens_to_generate
        assert request.kv_versions_are_bounds
        assert set(request.policy_versions.tolist()) == {1}


def beside(address: str, server: ServerProcess) -> AbstractContextManager[subprocess.Popen[str]]:
    """An engine that joins the fleet."""
    options = ("--join", address, "--beside", server.url, f"model={directory_of()}")
    return shell("engine", *options, "max_kv_staleness_versions=1")
