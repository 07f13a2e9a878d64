"""The comparison with TRL's own generation, cut down to seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks.trl_step import compare
from tests.installed import needs
from tests.trainer_hooks.train.grpo_settings import tiny_settings

pytestmark = needs("reasoning_gym", "trl")


@pytest.mark.slow
def test_both_kinds_of_step_are_timed(tmp_path: Path) -> None:
    settings = tiny_settings(algorithm__group_size=4, algorithm__max_new_tokens=6)
    figures = compare(settings, num_rounds=1, directory=tmp_path)
    assert figures["step_cpu_s_engine"] > 0
    assert figures["step_cpu_s_built_in"] > 0
    assert figures["built_in_over_engine"] == pytest.approx(
        figures["step_cpu_s_built_in"] / figures["step_cpu_s_engine"]
    )
