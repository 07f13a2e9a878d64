"""Random schedules of other kinds of models over vLLM: windows, experts, latent attention,
recurrent states.

`make test-vllm`; NUM_SCHEDULES of each kind with ROLLOUT_TEST_LONG=1.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from safetensors.torch import load_file

from rollout.errors import WeightUpdateError
from rollout.models.checkpoints.reader import WEIGHTS_FILE
from tests.contracts.vllm_engines import HAS_VLLM, directory_of, vllm_engine, vllm_weights
from tests.run_seed import run_seed
from tests.tiny_models import IS_LONG

if not HAS_VLLM:
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)

from rollout_vllm.reload import repair_reload
from tests.rollout_vllm.test_random_schedules import WORST_GAP, Schedules

NUM_SCHEDULES = 20 if IS_LONG else 1
STACK = "model.layers.0.mlp.experts.gate_up_proj"  # as live modules name it


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How to test a family. `config`: of its engine. `is_recurrent`: it has recurrent layers."""

    config: dict[str, Any] = field(default_factory=dict)
    is_recurrent: bool = False


BOUND: dict[str, Any] = {"max_kv_staleness_versions": 1, "max_sequence_length": 256}
PREFIXES: dict[str, Any] = {**BOUND, "enable_prefix_caching": True}
# vLLM chooses blocks as large as a recurrent state.
BLOCKS_OF_VLLM: dict[str, Any] = {**BOUND, "block_size_tokens": None}
KINDS = {
    "mistral": Kind(config=PREFIXES),
    "gemma3_text": Kind(config=PREFIXES),  # the output layer shares the embedding's weight
    "qwen3_moe": Kind(config=PREFIXES),
    "deepseek_v3": Kind(config=BOUND),
    "granitemoehybrid": Kind(config=BLOCKS_OF_VLLM, is_recurrent=True),
    "falcon_h1": Kind(config=BLOCKS_OF_VLLM, is_recurrent=True),
}


@pytest.mark.timeout(1800)
@pytest.mark.drawn(4)
@pytest.mark.parametrize("family", KINDS)
def test_every_token_of_a_kind_is_what_its_record_says(
    family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = KINDS[family]
    engine = vllm_engine(family, **kind.config)
    schedules = Schedules(
        engine,
        random.Random(run_seed()),
        kind.config["max_kv_staleness_versions"],
        family,
        by_token=kind.is_recurrent,
    )
    try:
        for _ in range(NUM_SCHEDULES):
            schedules.run()
    finally:
        engine.shutdown()
    replay = schedules.replay
    with capsys.disabled():
        print(
            f"\n{family}: {replay.num_tokens} tokens, {replay.num_mixed} over KV of several "
            f"versions, worst gap {replay.worst_gap:.1e}, oldest KV {schedules.worst_age} versions"
        )
    assert replay.num_tokens
    assert replay.num_mixed or not IS_LONG
    assert replay.worst_gap <= WORST_GAP


@pytest.mark.timeout(600)
def test_update_weights_takes_a_mixture_by_the_names_of_its_directory_and_of_its_module() -> None:
    engine = vllm_engine("qwen3_moe")
    try:
        live, before = vllm_weights(0, "qwen3_moe"), engine.weights_checksum()
        assert STACK in live
        engine.update_weights(live, in_flight=True)
        assert engine.weights_checksum() == before
        engine.update_weights(load_file(directory_of("qwen3_moe") / WEIGHTS_FILE), in_flight=True)
        assert engine.weights_checksum() == before
        for changed, reason in (
            (live | {STACK: live[STACK][1:]}, f"{STACK}' has shape"),
            ({name: t for name, t in live.items() if name != STACK}, f"lacks 1 .*{STACK}"),
            (live | {"extra": live[STACK]}, "unknown 1 .*extra"),
        ):
            with pytest.raises(WeightUpdateError, match=reason):
                engine.update_weights(changed, in_flight=True)
        assert (engine.weights_version, engine.weights_checksum()) == (2, before)
    finally:
        engine.shutdown()


@pytest.mark.timeout(600)
def test_repair_reload_names_a_kernel_of_experts_that_keeps_old_weights() -> None:
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    engine: Any = vllm_engine("qwen3_moe")
    try:
        worker = engine.core.model_executor.driver_worker
        for layer in worker.get_model().modules():
            if hasattr(method := getattr(layer, "quant_method", None), "unquantized_backend"):
                method.unquantized_backend = UnquantizedMoeBackend.MOONEP
        assert "MoonEP" in repair_reload(worker)
    finally:
        engine.shutdown()
