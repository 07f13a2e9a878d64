"""An engine on Triton's kernels and captured steps gives the tokens of the trainer's model.

Interpreted without a GPU, with stand-ins for CUDA's graphs and streams and for nothing else.
"""

from __future__ import annotations

from typing import Any

import pytest

from rollout.backends.cuda.graph_shapes import GraphShape, GraphShapes
from tests.backends.repeating_device import check_a_life_with_a_suspend, graph_engine
from tests.contracts.on_device import device_ops
from tests.family_cases import family_model
from tests.tiny_models import tiny_model

pytest.importorskip("triton")

from tests.contracts.attention_on_device import device_attention

# Small, for each program of a kernel costs the interpreter milliseconds.
GRAPH_SHAPES = GraphShapes(
    decode=(GraphShape(num_decode_rows=4),),
    mixed=(GraphShape(num_decode_rows=4, num_prefill_rows=2, num_prefill_tokens=24),),
)


@pytest.mark.device
@pytest.mark.parametrize(
    ("family", "config"),
    [
        pytest.param("qwen3", {}, id="eager prefill", marks=pytest.mark.slow),
        pytest.param(
            "qwen3",
            {"enable_chunked_prefill": True, "max_tokens": 16},
            id="captured prefill",
            marks=pytest.mark.slow,
        ),
        pytest.param("gemma2", {}, id="softcaps and windows", marks=pytest.mark.slow),
        pytest.param("gemma3_text", {}, id="two ropes", marks=pytest.mark.slow),
        pytest.param("glm4", {}, id="half of a head turns", marks=pytest.mark.slow),
        pytest.param("cohere2", {}, id="layers without rope", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_the_trainers_model(
    monkeypatch: pytest.MonkeyPatch, family: str, config: dict[str, Any]
) -> None:
    """Two layers, 20 tokens each of a group and of requests alone, across a suspend."""
    model = tiny_model("qwen3", seed=9) if family == "qwen3" else family_model(family, seed=9)
    engine, executor, _ = graph_engine(
        monkeypatch,
        model,
        graph_shapes=GRAPH_SHAPES,
        ops=device_ops(),
        attention=device_attention(),
        max_requests=6,
        max_sequence_length=64,
        memory_kind="reserved",
        **config,
    )
    check_a_life_with_a_suspend(engine, model)
    assert executor.num_captures > 0
