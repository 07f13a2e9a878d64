"""The tables and the picture of finished SmolLM2 runs. No model is trained here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import smollm
from tests.installed import needs

COST = {"wall_s": 90.0, "cpu_s": 120.0, "peak_mib": 3584}


def finished(directory: Path, kind: str) -> None:
    """Write the files that a run of `kind` with seed 0 leaves."""
    own = directory / "outputs" / "train" / kind / "seed_0"
    own.mkdir(parents=True)
    rows = [{"trainer/step": step, "eval/exact": step / 40} for step in (0, 14, 28)]
    (own / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (own / "summary.json").write_text(json.dumps({f"{part}_s": 1.0 for part in smollm.PARTS}))
    (own / "cost.json").write_text(json.dumps(COST))


@needs("matplotlib")
@pytest.mark.parametrize(
    ("kinds", "draws"),
    [
        (["lora"], False),
        (["reversal", "digits"], False),
        ([*smollm.TITLES, "shuffled_rewards"], True),
    ],
)
def test_smollm_tables_finished_runs_and_draws_them_if_tasks_and_control_were_run(
    kinds: list[str],
    draws: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plot = tmp_path / "smollm.png"
    monkeypatch.setattr(smollm, "PLOT", plot)
    for kind in kinds:
        finished(tmp_path, kind)
    smollm.main(["--directory", str(tmp_path), "--seeds", "1", "--kinds", *kinds])
    printed = capsys.readouterr().out
    for kind in kinds:
        assert f"| {kind.replace('_', ' ')} | 0 | 0% | 70% | 1.5 | 2.0 | 3.5 |" in printed
    assert plot.exists() == draws
