"""Batches in files, the doctor's command that examines them, and its choice of rows."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.virtual_time import run_virtually
from rollout.errors import ConfigError
from tests.tiny_models import randomize
from tests.trainer_hooks.doctor.runs import (
    SOUND_RUNS,
    arguments,
    collated,
    model_of,
    rollouts_of,
    several_turns,
    stale_weights,
)
from tests.trainer_hooks.producer.fake_llm import FakeLLM, train
from tests.trainer_hooks.producer.test_bound import any_reward
from trainer_hooks import AsyncRolloutProducer, TrainerState, save_checkpoint
from trainer_hooks.doctor import BatchFiles, diagnose, load_rollouts, save_rollouts
from trainer_hooks.doctor.command import main
from trainer_hooks.doctor.tokens import choose_rows, seen_from


def test_batch_files_keep_the_first_batch_sampled_by_each_checkpoint(
    tmp_path: Path,
) -> None:
    llm = FakeLLM()
    files = BatchFiles(tmp_path, 0.7, checkpoint_interval=3)

    async def work() -> None:
        async with AsyncRolloutProducer(llm, [[1], [2], [3]], any_reward, 2, 2, 1) as producer:
            for step, batch in enumerate(await train(llm, producer, 9, step_s=10.0), 1):
                files.log(step, batch)

    run_virtually(work())
    kept = {path.name: load_rollouts(path) for path in (tmp_path / "batches").iterdir()}
    assert sorted(kept) == ["step_000003.pt", "step_000006.pt"], "two stay"
    for name, saved in kept.items():
        assert saved.weights_version == int(name[5:11])
        batch = seen_from(saved.batch, saved.weights_version)
        assert 2 * int((batch.policy_lag_BT[batch.mask_BT] == 0).sum()) >= int(batch.mask_BT.sum())
        assert saved.temperature == 0.7


def save(path: Path, given: dict[str, Any]) -> None:
    save_rollouts(path, given["batch"], given["sources"])


def test_load_rollouts_returns_what_save_rollouts_wrote(tmp_path: Path) -> None:
    given = several_turns(1)
    save_rollouts(tmp_path / "of" / "run.pt", given["batch"], given["sources"], temperature=0.7)
    loaded = load_rollouts(tmp_path / "of" / "run.pt")
    for field in fields(given["batch"]):
        value = getattr(given["batch"], field.name)
        same = getattr(loaded.batch, field.name)
        assert torch.equal(value, same) if isinstance(value, torch.Tensor) else value == same
    assert loaded.temperature == 0.7
    assert loaded.sources is not None
    for kept, source in zip(loaded.sources, given["sources"], strict=True):
        assert kept.tokens_T.tolist() == source.tokens_T.tolist()
        assert [turn.num_cached_tokens for turn in kept.requests] == [
            turn.num_cached_tokens for turn in source.requests
        ]
        assert kept.requests[1].sampling_params == source.requests[1].sampling_params
        assert kept.requests[1].kv_spans == source.requests[1].kv_spans


def test_load_rollouts_refuses_other_files(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("no batch")
    torch.save({"format": "rollout-batch-0"}, tmp_path / "older.pt")
    for name in ("text.pt", "older.pt", "missing.pt"):
        with pytest.raises(ConfigError, match=name):
            load_rollouts(tmp_path / name)


def test_doctor_command_exits_with_0_for_a_sound_batch(tmp_path: Path, capsys: Any) -> None:
    given = SOUND_RUNS["update in flight"](1)
    save(tmp_path / "batch.pt", given)
    given["model"].save_pretrained(tmp_path / "new")
    given["older_models"][0].save_pretrained(tmp_path / "old")
    paths = ["--model", str(tmp_path / "new"), "--older", f"0={tmp_path / 'old'}"]
    output = tmp_path / "[" / "odd].json"
    output.parent.mkdir()
    output.write_text("earlier")
    status = main([str(tmp_path / "batch.pt"), *paths, "--json", str(output)])
    assert status == 0
    printed = capsys.readouterr()
    assert "sound" in printed.out
    assert f"moved the earlier {output} to {output}.previous\n" in printed.err
    assert Path(f"{output}.previous").read_text() == "earlier"
    written = json.loads(output.read_text())
    assert written["verdict"] == "sound"
    assert written["attributions"]["policy_lag"] + written["attributions"]["kv_lag"] > 0.99
    assert len(written["token_table"]) == written["num_tokens"]


def test_doctor_command_exits_with_1_for_a_finding_of_a_run(tmp_path: Path, capsys: Any) -> None:
    given = stale_weights(1)
    save(tmp_path / "batches" / "step_000005.pt", given)
    save(tmp_path / "batches" / "step_000009.pt", given)  # its checkpoint is gone
    for step, version, model in ((3, 0, given["older_models"][0]), (5, 1, given["model"])):
        state = TrainerState(step=step, weights_version=version)
        optimizer = torch.optim.SGD(model.parameters())
        save_checkpoint(tmp_path / "checkpoints", state, model, optimizer)
    assert main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "stale_weights (engine) explains 100.0% of the gap" in " ".join(out.split())
    assert "remedy" in out


def test_doctor_command_refuses_files_that_it_cannot_examine(tmp_path: Path, capsys: Any) -> None:
    assert main([str(tmp_path)]) == 2
    assert "logger.save_batches=true" in capsys.readouterr().err
    save(tmp_path / "batch.pt", several_turns(1))
    assert main([str(tmp_path / "batch.pt")]) == 2
    assert "--model DIR" in capsys.readouterr().err
    model = ["--model", str(tmp_path)]
    assert main([str(tmp_path / "batch.pt"), *model, "--older", "new"]) == 2
    assert "VERSION=DIR" in capsys.readouterr().err
    assert main([str(tmp_path / "batch.pt"), *model]) == 2
    assert "--model=" in capsys.readouterr().err
    weights = tmp_path / "weights"
    model_of(1).save_pretrained(weights)
    paths = ["--model", str(weights), "--older", f"7={tmp_path / 'gone'}"]
    assert main([str(tmp_path / "batch.pt"), *paths]) == 2
    assert "--older=" in capsys.readouterr().err
    assert main(["[/odd].pt"]) == 2
    assert "[/odd].pt does not exist" in capsys.readouterr().err


def test_diagnose_is_inconclusive_if_no_weights_are_known(tmp_path: Path) -> None:
    given = SOUND_RUNS["update in flight"](1)
    del given["older_models"]
    partly = diagnose(**given)
    assert (partly.verdict, partly.num_known_tokens) == ("inconclusive", 0)
    given["model"].save_pretrained(tmp_path)
    save(tmp_path / "batch.pt", given)
    assert main([str(tmp_path / "batch.pt"), "--model", str(tmp_path)]) == 3


def test_diagnose_attributes_declared_lag_without_a_finding() -> None:
    diagnosis = diagnose(**SOUND_RUNS["update in flight"](2))
    shares = diagnosis.attributions
    assert shares["policy_lag"] > 0.0
    assert shares["kv_lag"] > 0.0
    assert sum(shares.values()) == pytest.approx(1.0)
    lags = {(row["policy_lag"], row["kv_lag"] > 0.0) for row in diagnosis.lag_table}
    assert lags >= {(1, False), (0, True)}
    assert diagnosis.unexplained_rms < 1e-4 < diagnosis.gap_rms


def test_diagnose_reports_an_unexplained_gap() -> None:
    model, other = model_of(1), model_of(1)
    randomize(other, seed=5)
    (finding,) = diagnose(**arguments(other, rollouts_of(model, 1))).findings
    assert finding.name == "unexplained"
    assert "weights_checksum" in finding.remedy


def test_max_tokens_limits_diagnose_to_evenly_spread_rows() -> None:
    given = SOUND_RUNS["plain"](1)
    diagnosis = diagnose(**given, max_tokens=50)
    assert diagnosis.num_tokens == 48
    assert diagnosis.verdict == "sound"


def test_choose_rows_stays_within_max_tokens() -> None:
    given = SOUND_RUNS["plain"](1)
    batch = given["batch"]
    is_late_BT = torch.arange(batch.mask_BT.shape[1]) > batch.prompt_lengths_B[:, None]
    is_short_B = torch.arange(len(batch)) % 5 != 2
    short = replace(batch, mask_BT=batch.mask_BT & ~(is_late_BT & is_short_B[:, None]))
    assert short.mask_BT.sum(dim=1).tolist() == [1, 1, 24, 1, 1] * 2
    for limit in range(1, 57):
        rows = choose_rows(short, limit)
        assert len(rows) == 1 or int(short.mask_BT[rows].sum()) <= limit


def test_diagnose_refuses_inputs_that_do_not_fit_the_batch() -> None:
    model = model_of(1)
    sources = rollouts_of(model, 1)
    batch = collated(sources)
    with pytest.raises(ConfigError, match="sources has 1 sequences, the batch 10 rows"):
        diagnose(batch, model, sources[:1])
    with pytest.raises(ConfigError, match=r"trainer_logprobs_BT of shape \[3\]"):
        diagnose(batch, model, trainer_logprobs_BT=torch.zeros(3))
    batch.mask_BT[:] = False
    with pytest.raises(ConfigError, match="mask of the batch is empty"):
        diagnose(batch, model)
    smaller = model_of(1, vocab_size=100)
    with pytest.raises(ConfigError, match="outside the model's vocabulary of 100"):
        diagnose(collated(sources), smaller)
    negative = collated(sources)
    negative.tokens_BT[0, 0] = -2
    with pytest.raises(ConfigError, match="token id -2 is outside"):
        diagnose(negative, model)
