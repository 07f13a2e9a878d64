"""Who can join an AsyncLLM: its own processes, those of its user, and over TCP known keys."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollout import AsyncLLM, InferenceClient
from rollout.apis import engine_process
from rollout.coordinator.security import client_keys_in, create_key_files, server_keys_in
from tests.apis.fleets import CONFIG, DEADLINE_S, directory, params, until
from tests.tiny_models import prompt_of

pytestmark = pytest.mark.distributed


def shell_engine(address: str, *flags: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rollout.apis.engine_process", address, directory()]
    command += ["--config", '{"block_size_tokens": 8, "num_threads": 1, "buffer_size_gb": 0.02}']
    return subprocess.Popen(
        [*command, *map(str, flags)], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )


def test_a_fleet_of_tcp_and_keys_serves_its_own_and_whose_keys_it_knows(tmp_path: Path) -> None:
    for name in ("server", "friend", "stranger"):
        create_key_files(tmp_path, name)
    keys = {
        n: client_keys_in(tmp_path / f"{n}.key_secret", tmp_path / "server.key")
        for n in ("friend", "stranger")
    }
    server = server_keys_in(tmp_path / "server.key_secret", [tmp_path / "friend.key"])

    async def use() -> None:
        async with AsyncLLM(
            directory(),
            inference_config=CONFIG,
            coordinator_host="localhost",
            coordinator_options={"curve": server, "advertise_host": "127.0.0.1"},
        ) as llm:
            assert llm.address.startswith("tcp://127.0.0.1:")
            request = await llm.generate(prompt_of(9), params(0))
            async with InferenceClient(llm.address, curve=keys["friend"]) as client:
                record = await client.add_request(prompt_of(9), params(0))
                assert record.merge().generated_tokens == request.generated_tokens
            friend = shell_engine(
                llm.address,
                *("--key", tmp_path / "friend.key_secret", "--server-key", tmp_path / "server.key"),
            )
            try:
                await until(lambda: has_engines(llm, 2), "the engine has joined")
            finally:
                friend.kill()
                friend.communicate()

    asyncio.run(asyncio.wait_for(use(), DEADLINE_S))


async def has_engines(llm: AsyncLLM, count: int) -> bool:
    results = await llm.client.engine_stats()
    return len(results["ranks"]) == count


def test_an_engine_from_a_shell_needs_both_keys_and_its_own_to_be_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    create_key_files(tmp_path, "engine")
    secret, public = tmp_path / "engine.key_secret", tmp_path / "engine.key"
    secret.chmod(0o644)
    for flags, reason in (
        (("--key", secret), "need each other"),
        (("--key", secret, "--server-key", public), "chmod 600"),
    ):
        with pytest.raises(SystemExit, match=f"ConfigError: .*{reason}"):
            engine_process.main(["1", directory(), *map(str, flags)])
