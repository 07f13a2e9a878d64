"""A fleet of processes takes expert weights under both kinds of names, as one engine does."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout import LLM, InferenceConfig, WeightUpdateError
from tests.weights.expert_dialects import checksum_of, dialects, last_of, trainer, without

CONFIG = InferenceConfig(
    block_size_tokens=8, max_sequence_length=128, buffer_size_gb=0.01, num_threads=1
)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe", "mixtral", "gpt_oss"])
def test_fleet_update_weights_takes_each_dialect_of_experts(family: str, tmp_path: Path) -> None:
    trainer(family, 0).save_pretrained(tmp_path)
    saved = dialects(family, 1).saved
    gone = last_of([*saved], "experts.2.up_proj.weight")
    with LLM(tmp_path, inference_config=CONFIG, use_coordinator=True) as llm:
        assert llm.weights_checksum() == checksum_of(family, 0)
        for seed, given in (
            (1, saved),
            (0, dialects(family, 0).live.items()),
            (1, trainer(family, 1)),
            (0, trainer(family, 0).state_dict()),
        ):
            llm.update_weights(given, in_flight=True)
            assert llm.weights_checksum() == checksum_of(family, seed)
        with pytest.raises(WeightUpdateError, match=f"lacks 1 .*'{gone}'"):
            llm.update_weights(without(gone)(saved), in_flight=True)
        assert llm.weights_checksum() == checksum_of(family, 0)
        llm.update_weights(saved, in_flight=True)
        assert llm.weights_checksum() == checksum_of(family, 1)
