"""rollout keys, coordinator and engine: the commands of a fleet over several hosts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rollout import AsyncLLM
from rollout.cli.coordinator import address_of
from rollout.cli.main import main
from rollout.cli.settings import UsageError
from rollout.coordinator.net.key_folder import CLIENT, peer_keys
from tests.apis.fleets import DEADLINE_S, directory, params
from tests.apis.shells import said_first, shell, shell_engine
from tests.tiny_models import prompt_of

WAIT_S = 120


@pytest.mark.distributed
def test_keys_a_coordinator_and_an_engine_of_a_shell_are_a_fleet_that_a_program_joins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"
    assert main(["keys", str(folder)]) == 0
    assert f"copy {folder / 'engine'} to its hosts" in capsys.readouterr().out

    async def use(address: str) -> None:
        llm = await AsyncLLM.connect(address, curve=peer_keys(folder, CLIENT))
        request = await llm.generate(prompt_of(9), params(0))
        assert len(request.generated_tokens) == 20
        words = ["top", address, "--keys", str(folder), "count=1", "--json"]
        assert await asyncio.to_thread(main, words) == 0
        assert len(json.loads(capsys.readouterr().out)["engines"]) == 1
        await llm.shutdown(end_fleet=True)

    with shell("coordinator", "--listen", "tcp://0.0.0.0:0", "--keys", folder) as coordinator:
        address = said_first(coordinator)
        with shell_engine(address, "--keys", folder / "engine") as engine:
            asyncio.run(asyncio.wait_for(use(address), DEADLINE_S))
            assert engine.wait(WAIT_S) == 0
            assert coordinator.wait(WAIT_S) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["coordinator", "--listen", "tcp://0.0.0.0:0"], "can be reached by other machines"),
        (["coordinator", "--listen", "somewhere"], "give tcp://HOST:PORT"),
        (["coordinator", "--keys", "/nowhere"], "coordinator.key_secret' cannot be read"),
        (["coordinator", "heartbeat_s=9", "engine_lease_s=9"], "at least twice heartbeat_s"),
        (["coordinator", "--port", "1"], "--port is unknown; port is the option --listen"),
        (["engine"], "--join tcp://HOST:PORT"),
        (["engine", "--join", "1", "model=/nowhere"], "is not a directory"),
        (["engine", "--join", "1"], "model is missing"),
        (["keys"], "rollout keys DIR"),
    ],
)
def test_mistakes_are_refused_with_a_remedy_before_anything_starts(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_an_engine_without_keys_learns_how_to_make_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", str(tmp_path / "keys"), "--json"]) == 0
    words = ["engine", "--join", "1", f"model={directory()}", "--keys", str(tmp_path / "keys")]
    assert main([*words, "--as", "other"]) == 2
    assert "no keys of 'other', only of: client, engine. " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("listen", "host", "port"),
    [
        ("tcp://10.0.0.1:5555", "10.0.0.1", 5555),
        ("node7:5555", "node7", 5555),
        ("tcp://[::1]:5555", "::1", 5555),
        ("5555", "127.0.0.1", 5555),
        ("tcp://0.0.0.0:0", "0.0.0.0", None),
    ],
)
def test_listen_accepts_host_and_port(listen: str, host: str, port: int | None) -> None:
    assert address_of(listen) == (host, port)


@pytest.mark.parametrize("listen", ["", "tcp://", "node7", "node7:", "ipc:///tmp/x:1", "n:70000"])
def test_listen_refuses_other_words(listen: str) -> None:
    with pytest.raises(UsageError, match="is not an address"):
        address_of(listen)
