"""weight_transport="vllm:gloo" to a fleet of two engine processes: late engines, and a trainer that
dies in the middle of a transfer."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from rollout import AsyncLLM, SamplingParams, WeightUpdateError
from tests.apis.leftovers import fleet_pids
from tests.contracts.vllm_engines import HAS_VLLM, directory_of, vllm_model, vllm_weights
from tests.rollout_vllm.replay import Replay

if not HAS_VLLM:
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)

from tests.rollout_vllm.test_fleet import CONFIG  # skips without vLLM

TRANSPORT = "vllm:gloo"
PARAMS = SamplingParams(num_tokens_to_generate=60, return_log_probs=True, termination_id=-1)
MODELS = {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 2}  # seeds of the models by version
NUM_REQUESTS = 8


@pytest.mark.timeout(1200)
def test_vllm_gloo_updates_two_engines_and_survives_a_trainer_that_dies() -> None:
    asyncio.run(push_kill_and_push())


async def push_kill_and_push() -> None:
    options = {"data_parallel_size": 2, "weight_transport": TRANSPORT, **CONFIG}
    replay = Replay(lambda version: vllm_model(seed=MODELS[version]))
    async with AsyncLLM(directory_of(), **options) as llm:
        tasks = [
            asyncio.create_task(llm.generate([5 + i] * 40, PARAMS)) for i in range(NUM_REQUESTS)
        ]
        for version in (1, 2):
            report = await llm.update_weights(vllm_weights(MODELS[version]), in_flight=True)
            assert report.version == version
            assert await llm.weights_checksum() == report.checksum
        await check_generation(llm, replay, 2)

        await asyncio.to_thread(die_while_sending, llm.address)
        # The fleet is at version 3, which no engine has: all wait for the next push.
        report = await push_until_committed(llm, 4)
        assert report.checksum == await llm.weights_checksum()
        await check_generation(llm, replay, 4)

        _, victim, _ = fleet_pids()
        os.kill(victim, signal.SIGKILL)
        await push_until_committed(llm, 5)
        await check_generation(llm, replay, 5)
        requests = await asyncio.gather(*tasks)
    assert [len(request.generated_tokens) for request in requests] == [60] * NUM_REQUESTS
    print(f"{replay.num_tokens} tokens, worst gap {replay.worst_gap:.1e}")


async def check_generation(llm: AsyncLLM, replay: Replay, version: int) -> None:
    """A new request has the log-probs that transformers gives with the weights of `version`."""
    request = await llm.generate([version] * 20, PARAMS)
    assert {*request.policy_versions.tolist()} == {version}
    replay.check(SimpleNamespace(requests=[request]))  # type: ignore[arg-type]
    assert replay.worst_gap <= 1e-4


async def push_until_committed(llm: AsyncLLM, version: int) -> Any:
    """Push; engines that were lost just now have to register again first."""
    while True:
        try:
            return await llm.update_weights(vllm_weights(MODELS[version]), version, in_flight=True)
        except WeightUpdateError as error:
            if not error.is_transient:
                raise
            await asyncio.sleep(0.2)


class Deadly(dict[str, Tensor]):
    """Tensors of which the sender sends four, once vLLM knows their shapes; then it dies."""

    is_known = False

    def items(self) -> Any:
        for number, pair in enumerate(super().items()):
            if self.is_known and number == 4:
                os._exit(7)
            yield pair
        self.is_known = True


def die_while_sending(address: str) -> None:
    context = multiprocessing.get_context("spawn")
    trainer = context.Process(target=push_and_die, args=(address,))
    trainer.start()
    trainer.join()
    assert trainer.exitcode == 7


def push_and_die(address: str) -> None:
    from rollout_vllm.transfer_sender import VllmTransport

    class DeadlyTransport(VllmTransport):
        def publish(self, named_tensors: Any) -> Any:
            source = super().publish(named_tensors)
            assert self._push is not None
            self._push.tensors = Deadly(self._push.tensors)
            return source

    async def push() -> None:
        llm = await AsyncLLM.connect(address, weight_transport=DeadlyTransport("gloo"))
        await llm.update_weights(vllm_weights(0), in_flight=True)

    asyncio.run(push())
