"""Recorded routing travels from an engine's process to its caller."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollout import AsyncLLM
from tests.apis.fleets import CONFIG, DEADLINE_S, params
from tests.tiny_mixtures import own_routing, tiny_mixture
from tests.tiny_models import prompt_of, tokens_of

pytestmark = pytest.mark.slow


def test_fleet_requests_have_routing_rows(tmp_path: Path) -> None:
    model = tiny_mixture()
    model.save_pretrained(tmp_path)
    config = replace(CONFIG, record_routing=True)

    async def run() -> None:
        async with AsyncLLM(str(tmp_path), None, config, data_parallel_size=2) as llm:
            prompts = [prompt_of(length) for length in (1, 9, 30)]
            work = llm.generate(prompts, params(seed=1))
            for request in await asyncio.wait_for(work, DEADLINE_S):
                tokens_BT = torch.tensor([tokens_of(request)])
                wanted, routing = own_routing(model, tokens_BT)[0, :-1], request.routing_indices
                assert torch.equal(routing.sort(dim=-1).values, wanted.sort(dim=-1).values)

    asyncio.run(run())
