"""RayLauncher: engines as actors of a Ray cluster on this machine behave like processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("transformers")

import ray
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples import async_minimal
from rollout import AsyncLLM, ConfigError
from rollout.launch.launcher import Launcher
from rollout.launch.local import LocalLauncher
from tests.apis.fleets import CONFIG, DEADLINE_S, directory, params, weights
from tests.apis.leftovers import MARK, census
from tests.apis.test_child_process import is_alive
from tests.apis.test_fleet_losses import (
    NUM_REQUESTS,
    check_same,
    frozen_amid_work,
    served,
)
from tests.installed import needs
from tests.launch.clusters import ray_launcher
from tests.tiny_models import prompt_of
from tests.trainer_hooks.train.grpo_settings import tiny_settings
from tests.waiting import until, until_async
from trainer_hooks import AsyncRolloutProducer
from trainer_hooks.metrics import read_jsonl
from trainer_hooks.train.main import run_seed

pytestmark = [pytest.mark.distributed, needs("reasoning_gym")]
OUTSIDER = """
import asyncio, sys
from rollout import AsyncLLM
from rollout.launch.ray import RayLauncher
from tests.apis.fleets import CONFIG
from tests.launch.clusters import cluster_options

async def main():
    launcher = RayLauncher(init={**cluster_options(), "_temp_dir": sys.argv[1]})
    async with AsyncLLM(sys.argv[2], None, CONFIG, launcher=launcher) as llm:
        print("up", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def launcher_of(kind: str) -> Launcher:
    return ray_launcher() if kind == "ray" else LocalLauncher()


async def trained(launcher: Launcher) -> dict[str, Tensor]:
    """The weights that examples/async_minimal.py trains, with two engines."""
    torch.manual_seed(0)
    shape = dict(vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    policy = Qwen3ForCausalLM(Qwen3Config(**shape, **heads))
    engines = {**async_minimal.ENGINE, "deterministic": True, "data_parallel_size": 2}
    async with AsyncLLM(policy, **engines, launcher=launcher) as llm:
        await async_minimal.train(llm, policy, suspend=False)
        stats = await llm.client.engine_stats()
    assert all(each.num_finished for each in stats.by_rank.values()), "both worked"
    return policy.state_dict()


def test_the_async_example_gets_the_same_rewards_from_actors_as_from_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Only then each token's version does not depend on which is quicker.
    producer = partial(AsyncRolloutProducer, max_staleness_versions=0)
    monkeypatch.setattr(
        async_minimal,
        "AsyncRolloutProducer",
        lambda *arguments, max_staleness_versions: producer(*arguments),
    )
    weights, printed = [], []
    for kind in ("local", "ray"):
        weights.append(asyncio.run(trained(launcher_of(kind))))
        lines = capsys.readouterr().out.splitlines()
        printed.append([line for line in lines if line.startswith("step")])
    on_processes, on_actors = printed
    assert len(on_processes) == async_minimal.NUM_STEPS
    assert on_processes[0].split()[3] < "0.3" < "0.6" < on_processes[-1].split()[3], "it learns"
    assert on_actors == on_processes
    for name, parameter in weights[0].items():
        assert torch.equal(weights[1][name], parameter), name
    with capsys.disabled():
        print("", *on_actors[:: async_minimal.NUM_STEPS - 1], sep="\n")


def completions(directory: Path, kind: str) -> list[dict[str, Any]]:
    """All rollouts of the async job with two engines, and their rewards."""
    launcher_of(kind)  # the job uses the cluster that is there
    settings = tiny_settings(
        mode="async",
        num_engines=2,
        launcher=kind,
        producer__max_staleness_versions=0,
        engine__deterministic="true",
        model__head_dim=16,
    )
    run_seed(directory, settings, seed=0)
    return read_jsonl(directory / "completions.jsonl")


def test_the_async_job_has_the_same_rollouts_on_actors_as_on_processes(tmp_path: Path) -> None:
    on_processes = completions(tmp_path / "local", "local")
    assert len(on_processes) == 4 * 12
    assert len({each["reward"] for each in on_processes}) > 1
    assert completions(tmp_path / "ray", "ray") == on_processes


@pytest.mark.parametrize("transport", ["shared", "directory"])
def test_a_killed_ray_actor_restarts_with_the_weights(transport: str, tmp_path: Path) -> None:
    options = {"data_parallel_size": 2, "launcher": ray_launcher()}
    options["weight_transport"] = transport if transport == "shared" else f"directory:{tmp_path}"

    async def work() -> None:
        # A whole model in the arguments: too large for Ray to keep them by itself.
        async with AsyncLLM(weights(), None, CONFIG, **options) as llm:
            await llm.update_weights(weights(1).state_dict(), in_flight=True)
            jobs = [(prompt_of(9, seed=i), params(i, 250)) for i in range(NUM_REQUESTS)]
            undisturbed = await asyncio.gather(*(llm.generate(*job) for job in jobs))
            actor = actors(llm)[0]
            killed = pid_of(actor)
            tasks = await frozen_amid_work(llm, jobs, killed)
            ray.kill(actor, no_restart=False)
            check_same(undisturbed, await asyncio.gather(*tasks))

            async def is_back() -> bool:
                return await served(llm) == [1, 1]

            await until_async(lambda: not is_alive(killed), "the actor's process is gone")
            await until_async(is_back, "the actor has the committed weights", every_s=0.2)
            pids = [pid_of(each) for each in actors(llm)]
            assert len({killed, *pids}) == 3
            report = await llm.update_weights(weights(2).state_dict(), in_flight=True)
            assert report.version == 2
            assert await served(llm) == [2, 2]
        until(lambda: not any(map(is_alive, pids)), "all engines have ended")

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


def actors(llm: AsyncLLM) -> list[Any]:
    assert llm._fleet is not None
    return [engine._actor for engine in llm._fleet._engines]  # type: ignore[attr-defined]


def pid_of(actor: Any) -> int:
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))


# ---- the end


def test_a_killed_trainer_leaves_no_ray_actor() -> None:
    mark = uuid.uuid4().hex
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rollout-ray-"))
        command = [sys.executable, "-c", OUTSIDER, folder, directory()]
        environment = os.environ | {MARK: mark, "PYTHONPATH": os.getcwd(), "TMPDIR": folder}
        # Ray's own processes may stay for a minute.
        stack.callback(kill_all, mark)
        trainer = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        )
        stack.callback(trainer.kill)
        assert trainer.stdout is not None
        assert any(line == "up\n" for line in trainer.stdout)
        assert len(own_processes(mark)) == 2
        trainer.kill()
        until(lambda: not own_processes(mark), "the processes of Ray have ended")


def own_processes(mark: str) -> list[str]:
    """The command lines of engines and coordinators that were started under `mark`."""
    lines = [command_line(pid) for pid in census(mark).pids]
    return [line for line in lines if "EngineActor" in line or "rollout.coordinator" in line]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it has ended
        return ""


def kill_all(mark: str) -> None:
    while pids := census(mark).pids:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_ray_launcher_refuses_more_than_the_cluster_has() -> None:
    launcher = ray_launcher(num_cpus=3)
    with pytest.raises(ConfigError, match=r"Ray has not found 1 places with {'CPU': 3}; it has"):
        AsyncLLM(directory(), None, CONFIG, launcher=launcher, start_timeout_s=1.0)
