"""Processes of test_two_hosts: trainers whose engines run on other hosts."""

from __future__ import annotations

import asyncio
import contextlib
import io
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from examples import async_minimal
from rollout import LLM, AsyncLLM, InferenceConfig, RolloutError
from rollout.coordinator.core.context import CoordinatorLimits
from rollout.coordinator.net.key_folder import coordinator_keys
from tests.apis.fleets import CONFIG, DEADLINE_S, Load, weights
from tests.scenarios.test_fleet_members import check_all, until_served
from tests.tiny_models import tiny_config
from trainer_hooks import AsyncRolloutProducer, TrainingBatch, WeightSync


def a_trainer(
    pipe: Connection, host: str, model: str, folder: Path, limits: CoordinatorLimits
) -> None:
    """Generate all the time, and push weights twice. Sends the end of the first push."""

    async def run() -> None:
        async with fleet_of(model, CONFIG, host, folder, limits) as llm:
            pipe.send(llm.address)
            await until_served(llm, 0, 2)
            load = Load(llm, width=4, num_tokens=60, rest_s=1.0)
            assert await asyncio.to_thread(pipe.recv) == "mended"
            await until_served(llm, 0, 2)  # so that both take part in the push
            await load.more(4)
            fault = None
            try:
                await llm.update_weights(weights(1), 1, in_flight=True)
            except RolloutError as error:
                fault = error
            assert await asyncio.to_thread(pipe.recv) == "mended"
            await until_served(llm, 0 if fault else 1, 2)
            await load.more(4)
            report = await llm.update_weights(weights(2), 2, in_flight=True)
            assert await llm.weights_checksum() == report.checksum
            await until_served(llm, 2, 2)
            await load.more(4)
            requests = await load.end()
            pipe.send((str(fault), len(requests), check_all(requests)))

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def fleet_of(
    model: Any,
    config: InferenceConfig,
    host: str,
    folder: Path,
    limits: CoordinatorLimits,
    transport: str = "directory:{}",
) -> AsyncLLM:
    """Return an LLM for two engines of other hosts. `transport`: with {} for a directory."""
    return AsyncLLM(
        model,
        None,
        config,
        data_parallel_size=2,
        spawn=0,
        coordinator_host=host,
        coordinator_options={"curve": coordinator_keys(folder / "keys"), "limits": limits},
        weight_transport=transport.format(folder / "weights"),
    )


def a_training_job(
    pipe: Connection, host: str, folder: Path, limits: CoordinatorLimits, transport: str
) -> None:
    """Run examples/async_minimal.py with engines that join it.

    Sends its address; final version and checksums; rewards of the steps; the errors of failed
    pushes, and the ids of all prompts and requests that were trained on.
    """
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(tiny_config("qwen3", vocab_size=16))
    policy.save_pretrained(folder / "model")
    config, batches, faults = InferenceConfig(**async_minimal.ENGINE), list[TrainingBatch](), []

    class RecordedProducer(AsyncRolloutProducer):
        async def __anext__(self) -> TrainingBatch:
            batches.append(await super().__anext__())
            return batches[-1]

    class RecordedSync(WeightSync):
        async def apush(self, *arguments: Any) -> Any:
            llm: Any = self._llm
            update = type(llm).update_weights

            async def recorded(*given: Any, **options: Any) -> Any:
                try:
                    return await update(llm, *given, **options)
                except RolloutError as error:
                    faults.append(str(error))
                    raise

            llm.update_weights = recorded
            return await super().apush(*arguments)

    async def run() -> None:
        served = fleet_of(folder / "model", config, host, folder, limits, transport)
        async with served as llm:
            pipe.send(llm.address)
            await async_minimal.train(llm, policy, suspend=False)
            served_version, checksum = llm.weights_version, await llm.weights_checksum()
        with LLM(policy, inference_config=config) as trained:
            pipe.send((served_version, checksum, trained.weights_checksum()))

    async_minimal.AsyncRolloutProducer = RecordedProducer  # type: ignore[misc]
    async_minimal.WeightSync = RecordedSync  # type: ignore[misc]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
    pipe.send([float(line.split()[3]) for line in output.getvalue().splitlines()])
    groups = [group for batch in batches for group in batch.groups]
    prompts = [(group.ticket.epoch, group.ticket.index) for group in groups]
    requests = [request for group in groups for request in group.requests]
    assert all(len(r.generated_tokens) == 6 for r in requests), "none is cut short"
    pipe.send((faults, prompts, [request.request_id for request in requests]))
