"""save_checkpoint and load_checkpoint: complete or absent, exact, loadable by transformers."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from rollout.errors import ConfigError
from trainer_hooks import (
    TrainerState,
    WeightsVersionCounter,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from trainer_hooks.checkpoint import read_own_state, read_trainer_state, restore_checkpoints


class SavedPolicy(torch.nn.Linear):
    """A module with save_pretrained; `fails` makes it raise halfway, as a kill would."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__(2, 2)
        self._fails = fails

    def save_pretrained(self, save_directory: str) -> None:
        (Path(save_directory) / "model.txt").write_text("weights")
        if self._fails:
            raise KeyboardInterrupt


def trained(policy: torch.nn.Module) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1)
    policy(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def save(root: Path, step: int, policy: SavedPolicy | None = None, keep: int = 2) -> Path:
    policy = policy or SavedPolicy()
    state = TrainerState(
        step=step, weights_version=step + 1, prompts={"position": 3, "unfinished": [1, 2]}
    )
    return save_checkpoint(root, state, policy, trained(policy), keep=keep)


def test_load_checkpoint_restores_state_optimizer_and_random_numbers(tmp_path: Path) -> None:
    policy = SavedPolicy()
    optimizer = trained(policy)
    state = TrainerState(step=7, weights_version=9, prompts={"unfinished": [4]})
    save_checkpoint(tmp_path, state, policy, optimizer)
    drawn = (torch.rand(3), random.random(), np.random.rand(3))

    restored = torch.optim.AdamW(policy.parameters(), lr=0.5)
    assert load_checkpoint(tmp_path / "step_000007", restored) == state
    again = (torch.rand(3), random.random(), np.random.rand(3))
    assert torch.equal(drawn[0], again[0])
    assert drawn[1] == again[1]
    assert np.array_equal(drawn[2], again[2])
    for mine, theirs in zip(optimizer.state.values(), restored.state.values(), strict=True):
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])
    assert restored.param_groups[0]["lr"] == 0.1


def test_load_checkpoint_refuses_other_numbers_of_parameters(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1)
    with_critic = [{"params": SavedPolicy().parameters()}, {"params": SavedPolicy().parameters()}]
    with pytest.raises(ConfigError, match=r"step_000001.*\[2\].*\[2, 2\].*settings of that run"):
        load_checkpoint(checkpoint, torch.optim.AdamW(with_critic))


def test_load_checkpoint_refuses_other_shapes_and_another_optimizer(tmp_path: Path) -> None:
    """The number of parameters is the same. A refused load restores nothing."""
    checkpoint = save(tmp_path, 1)
    shapes = [parameter.shape for parameter in SavedPolicy().parameters()]
    wider = [torch.nn.Parameter(torch.zeros(*shape, 2)) for shape in shapes]
    others = [torch.optim.AdamW(wider), torch.optim.SGD(SavedPolicy().parameters())]
    messages = [r"step_000001 has the shape .* for parameter 0", "optimizer AdamW, this run SGD"]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for optimizer, message in zip(others, messages, strict=True):
        with pytest.raises(ConfigError, match=message):
            load_checkpoint(checkpoint, optimizer)
        assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), before)


def test_load_checkpoint_names_a_truncated_file(tmp_path: Path) -> None:
    policy = SavedPolicy()
    optimizer, state = trained(policy), TrainerState(step=1, weights_version=1)
    scheduler = SCHEDULERS["cosine"](optimizer)
    checkpoint = save_checkpoint(
        tmp_path, state, policy, optimizer, scheduler=scheduler, own_state={"a": torch.ones(9)}
    )

    def read(name: str) -> Any:
        if name == "own_state.pt":
            return read_own_state(checkpoint)
        return load_checkpoint(checkpoint, optimizer, scheduler)

    names = ("optimizer.pt", "optimizer.json", "rng_state.pt", "scheduler.pt", "own_state.pt")
    for name in (*names, "trainer_state.json"):
        path = checkpoint / name
        content = path.read_bytes()
        for length in (0, 3, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:length])
            with pytest.raises(ConfigError, match=name):
                read(name)
        path.write_bytes(content)
    load_checkpoint(checkpoint, optimizer, scheduler)
    for text in ("", "\n", "4x"):
        (tmp_path / "version").write_text(text)
        with pytest.raises(ConfigError, match="version holds"):
            WeightsVersionCounter(tmp_path / "version")


def test_find_checkpoint_returns_the_highest_step_and_save_checkpoint_deletes_older_ones(
    tmp_path: Path,
) -> None:
    assert find_checkpoint(tmp_path / "missing") is None
    for step in (8, 9, 100):
        assert find_checkpoint(tmp_path) != save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000009", "step_000100"]
    assert find_checkpoint(tmp_path) == tmp_path / "step_000100"


def test_save_checkpoint_keeps_checkpoints_of_later_steps(tmp_path: Path) -> None:
    for step in (90, 100):
        save(tmp_path, step)
    for step in (10, 11, 12):
        assert save(tmp_path, step).is_dir()
    kept = [f"step_{step:06d}" for step in (11, 12, 90, 100)]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


def test_save_checkpoint_refuses_to_keep_none(tmp_path: Path) -> None:
    before = save(tmp_path, 1)
    with pytest.raises(ConfigError, match="keep=0 must be at least 1"):
        save(tmp_path, 2, keep=0)
    assert list(tmp_path.iterdir()) == [before], "nothing was written"
    after = save(tmp_path, 2, keep=1)
    assert list(tmp_path.iterdir()) == [after]


def test_kill_in_save_checkpoint_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    before = save(tmp_path, 1)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, SavedPolicy(fails=True))
    assert find_checkpoint(tmp_path) == before
    after = save(tmp_path, 2)
    assert find_checkpoint(tmp_path) == after
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000002"]


def test_save_checkpoint_replaces_a_checkpoint_of_the_same_step(tmp_path: Path) -> None:
    save(tmp_path, 1)
    again = save(tmp_path, 1)
    assert read_trainer_state(again).step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_read_trainer_state_refuses_another_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a trainer's checkpoint.*trainer_state.json"):
        read_trainer_state(tmp_path)


def test_from_pretrained_loads_a_checkpoint(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        tie_word_embeddings=True,
    )
    policy = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(policy.parameters())
    saved = save_checkpoint(tmp_path, TrainerState(step=1, weights_version=1), policy, optimizer)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(saved)
    tokens = torch.arange(5)[None]
    assert torch.equal(loaded(tokens).logits, policy(tokens).logits)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0 / (step + 1)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=9),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=20),
    "chain": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[3]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_load_checkpoint_restores_a_scheduler(tmp_path: Path, kind: str) -> None:
    def rates(scheduler: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        found = []
        for _ in range(6):
            optimizer.step()
            scheduler.step()
            found.append(scheduler.get_last_lr()[0])
        return found

    policy = SavedPolicy()
    optimizer = trained(policy)
    scheduler = SCHEDULERS[kind](optimizer)
    rates(scheduler, optimizer)
    state = TrainerState(step=1, weights_version=1)
    saved = save_checkpoint(tmp_path, state, policy, optimizer, scheduler=scheduler)
    restored = torch.optim.AdamW(policy.parameters())
    scheduler_again = SCHEDULERS[kind](restored)
    load_checkpoint(saved, restored, scheduler_again)
    assert rates(scheduler_again, restored) == rates(scheduler, optimizer)
    assert len(set(rates(scheduler, optimizer))) > 1 or kind == "milestones"


def test_load_checkpoint_with_a_scheduler_refuses_a_checkpoint_without_one(tmp_path: Path) -> None:
    saved, policy = save(tmp_path, 1), SavedPolicy()
    optimizer = trained(policy)
    with pytest.raises(ConfigError, match="step_000001 was saved without a scheduler"):
        load_checkpoint(saved, optimizer, SCHEDULERS["cosine"](optimizer))


def test_read_own_state_returns_the_saved_state(tmp_path: Path) -> None:
    policy = SavedPolicy()
    optimizer, state = trained(policy), TrainerState(step=1, weights_version=1)
    own = {"average": torch.arange(3.0), "best": 0.5, "names": ["a", None], "at": {2: (1, 2)}}
    saved = save_checkpoint(tmp_path, state, policy, optimizer, own_state=own)
    again = read_own_state(saved)
    assert torch.equal(again.pop("average"), own.pop("average"))
    assert again == own
    assert read_own_state(save(tmp_path, 2)) is None


def test_save_checkpoint_refuses_own_state_with_objects_of_other_classes(
    tmp_path: Path,
) -> None:
    policy, state = SavedPolicy(), TrainerState(step=1, weights_version=1)
    with pytest.raises(ConfigError, match="own_state holds more than tensors"):
        save_checkpoint(tmp_path, state, policy, trained(policy), own_state={"path": tmp_path})
    assert find_checkpoint(tmp_path) is None


def test_restore_checkpoints_after_a_kill_between_two_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, replace = save(tmp_path, 1), os.replace

    def killed(source: Path, target: Path) -> None:
        if Path(target) == first:
            raise KeyboardInterrupt
        replace(source, target)

    for restore in (lambda: restore_checkpoints(tmp_path), lambda: save(tmp_path, 2)):
        monkeypatch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 1)
        monkeypatch.undo()
        assert not first.exists()
        restore()
        assert read_trainer_state(first).step == 1


def test_weights_version_counter_rises_by_one_from_the_floor(tmp_path: Path) -> None:
    counter = WeightsVersionCounter(tmp_path / "version", floor=4)
    assert [counter.reserve(), counter.reserve()] == [5, 6]
    assert counter.highest == 6


def test_weights_version_counter_continues_above_the_highest_version(tmp_path: Path) -> None:
    path = tmp_path / "run" / "version"
    killed = WeightsVersionCounter(path)
    for _ in range(12):
        killed.reserve()
    assert WeightsVersionCounter(path, floor=10).reserve() == 13


def test_weights_version_counter_never_starts_below_its_floor(tmp_path: Path) -> None:
    path = tmp_path / "version"
    WeightsVersionCounter(path).reserve()
    assert WeightsVersionCounter(path, floor=30).reserve() == 31
