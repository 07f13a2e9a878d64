"""Access to an AsyncLLM: its own processes, processes of the same user, and over TCP clients
with known keys."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollout import AsyncLLM, InferenceClient
from rollout.coordinator.net.key_folder import (
    CLIENT,
    coordinator_keys,
    create_key_folder,
    peer_keys,
)
from tests.apis.fleets import CONFIG, DEADLINE_S, directory, params, until
from tests.apis.shells import shell_engine
from tests.tiny_models import prompt_of

pytestmark = pytest.mark.distributed


def test_tcp_fleet_with_curve_serves_clients_with_known_keys(tmp_path: Path) -> None:
    create_key_folder(tmp_path / "keys")

    async def use() -> None:
        async with AsyncLLM(
            directory(),
            inference_config=CONFIG,
            coordinator_host="localhost",
            coordinator_options={
                "curve": coordinator_keys(tmp_path / "keys"),
                "advertise_host": "127.0.0.1",
            },
        ) as llm:
            assert llm.address.startswith("tcp://127.0.0.1:")
            request = await llm.generate(prompt_of(9), params(0))
            client_keys = peer_keys(tmp_path / "keys", CLIENT)
            async with InferenceClient(llm.address, curve=client_keys) as client:
                record = await client.add_request(prompt_of(9), params(0))
                assert record.merge().generated_tokens == request.generated_tokens
            with shell_engine(llm.address, "--keys", tmp_path / "keys" / "engine"):
                await until(lambda: has_engines(llm, 2), "the engine has joined")
            create_key_folder(tmp_path / "keys", ["later"])
            with shell_engine(llm.address, "--keys", tmp_path / "keys", "--as", "later"):
                await until(lambda: has_engines(llm, 2), "a key that was added counts at once")

    asyncio.run(asyncio.wait_for(use(), DEADLINE_S))


async def has_engines(llm: AsyncLLM, count: int) -> bool:
    results = await llm.client.engine_stats()
    return len(results.by_rank) == count
