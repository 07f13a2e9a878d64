"""Fields of InferenceConfig as keywords of LLM and AsyncLLM."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout import LLM, AsyncLLM, ConfigError, InferenceConfig
from rollout.apis import async_llm
from rollout.apis.arguments import config_with
from tests.apis.fake_fleet import FakeProcesses, fake_fleet
from tests.tiny_models import tiny_model


def test_llm_keywords_replace_fields_of_the_config() -> None:
    config = InferenceConfig(block_size_tokens=8, seed=3)
    assert config_with(config, {"seed": 4}) == config.replace(seed=4)
    assert config_with(None, {}) == InferenceConfig()
    with pytest.raises(ConfigError, match="block_size_tokens=9 must be a power of two"):
        config_with(config, {"block_size_tokens": 9})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("max_request", "max_requests"),
        ("buffer_size", "buffer_size_gb"),
        ("data_paralel_size", "data_parallel_size"),
    ],
)
@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_llm_refuses_an_unknown_keyword_with_the_nearest_name(
    kind: Any, name: str, nearest: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name}=7 is unknown; did you mean {nearest}?"):
        kind("a model", **{name: 7})
    with pytest.raises(ConfigError, match="zzz=7 is unknown; see"):
        kind("a model", zzz=7)


def test_llm_passes_config_fields_to_its_engine() -> None:
    config = InferenceConfig(block_size_tokens=16)
    with LLM(
        tiny_model(), inference_config=config, block_size_tokens=8, buffer_size_gb=0.001
    ) as llm:
        block_bytes = 2 * 2 * 2 * 16 * 4 * 8
        assert llm.stats().num_blocks_total == pytest.approx(0.001 * 2**30 / block_bytes, abs=2)


def test_async_llm_passes_config_fields_to_engines_and_coordinator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_fleet(monkeypatch)
    given: list[Any] = []

    def processes(coordinator: Any, engine: Any, **_: Any) -> FakeProcesses:
        given.append((coordinator, engine))
        return FakeProcesses()

    monkeypatch.setattr(async_llm, "FleetProcesses", processes)

    async def work() -> None:
        async with AsyncLLM("a model", None, InferenceConfig(seed=3), block_size_tokens=8):
            pass

    asyncio.run(work())
    with LLM("a model", use_coordinator=True, seed=3, block_size_tokens=8):
        pass
    for coordinator, engine in given:
        assert coordinator["block_size_tokens"] == 8
        config = engine["inference_config"]
        assert (config.block_size_tokens, config.seed) == (8, 3)


def test_llm_refuses_coordinator_settings_without_a_coordinator() -> None:
    for options in ({"spawn": 0}, {"max_engine_restarts": 1}, {"start_timeout_s": 5.0}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))}=.* needs use_coordinator"):
            LLM("a model", **options)
