"""LiveModule, without vLLM."""

from __future__ import annotations

import json
from pathlib import Path

from rollout_vllm.live_module import LiveModule


def test_live_module_has_no_shapes_of_a_model_type_that_transformers_lacks(tmp_path: Path) -> None:
    config = {"model_type": "known_to_vllm_only", "architectures": ["KnownToVllmOnly"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert LiveModule(tmp_path).shapes == {}
