"""The exact problem of the lag benchmark, and that docs/losses.md shows what it prints."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks.lag_corrections import (
    CONTESTANTS,
    Parameters,
    all_sequences,
    ascend,
    expected_rewards,
    gradient_figures,
    lagged_logprobs,
    logprobs,
    main,
    rewards,
    sample,
)

DOCS = Path(__file__).parents[2] / "docs" / "losses.md"


def test_without_any_change_between_versions_every_correction_is_exact() -> None:
    policy = ascend(3, seed=0)[-1]
    for name, figures in gradient_figures([policy] * 12, policy_lag=8).items():
        if name != "TIS, KV lag <= 1":  # it drops tokens that are only said to be old
            assert figures["bias"] < 1e-4, name
            assert figures["ess"] == pytest.approx(1.0, abs=1e-4), name


def test_samples_have_the_exact_mean_reward() -> None:
    history = ascend(6, seed=1)
    tokens, kv_lags = sample(history, 0, 20_000, torch.Generator().manual_seed(0))
    weights = logprobs(history[-1], history[-1], tokens).sum(dim=-1)
    weights = (weights - lagged_logprobs(history, 0, tokens, kv_lags).sum(dim=-1)).exp()
    mean = (weights * rewards(tokens)).mean()
    assert float(mean) == pytest.approx(float(expected_rewards(history[-1])), abs=0.02)


def test_probabilities_of_all_sequences_add_up_to_one() -> None:
    policy = Parameters.zeros(1).drifted(1.0, torch.Generator().manual_seed(0))
    total = logprobs(policy, policy, all_sequences()[None]).sum(dim=-1).exp().sum()
    assert float(total) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
def test_a_small_run_prints_both_tables_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--small", "--plot", str(tmp_path / "plot.png")])
    printed = capsys.readouterr().out
    assert all(printed.count(f"| {contestant.name} |") == 2 for contestant in CONTESTANTS)
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_page_shows_the_figures_that_the_script_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--plot", str(tmp_path / "plot.png")])
    page = DOCS.read_text(encoding="utf-8").splitlines()
    starts = tuple(f"| {contestant.name} | 0." for contestant in CONTESTANTS)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith(starts)]
    shown = [line for line in page if line.startswith(starts)]
    assert len(printed) == len(shown) == 2 * len(CONTESTANTS)
    for ours, theirs in zip(printed, shown, strict=True):
        figures = [[float(x) for x in re.findall(r"\d+\.\d+", line)] for line in (ours, theirs)]
        # Another processor rounds otherwise, and learning amplifies it.
        assert figures[0] == pytest.approx(figures[1], abs=0.03)
