"""What loading takes of memory, as the benchmark measures it in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.loading import SMALL, measure_elsewhere, write_directories

# Two copies of the weights would be 2.
LIMIT = 1.2
EMBEDDINGS_SHARE = 0.33  # of the weights: the largest parameter


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_directories(SMALL, folder)
    return folder


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("source", "limit"),
    [
        ("one file", LIMIT),
        ("four files", LIMIT),
        ("random", LIMIT),
        ("CausalLM", LIMIT + EMBEDDINGS_SHARE),  # its parameters move one by one
    ],
)
def test_loading_holds_the_weights_once(source: str, limit: float, folder: Path) -> None:
    results = measure_elsewhere(source, "plain", folder, "small")
    assert max(results["open"], results["fill"], results["products"]) < limit
    assert results["packed"] == 0.0
    assert results["built"] > 0.9  # else nothing was measured
