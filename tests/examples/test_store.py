"""The job in an environment: it runs, and slowly, it learns which price to ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.store import (
    ITEMS,
    Store,
    demonstrations,
    next_on_shelf,
    prompts,
    store_tokenizer,
    tasks,
)
from tests.trainer_hooks.train.test_own_data import task_of
from trainer_hooks.environments import ModelTurn
from trainer_hooks.metrics import read_jsonl
from trainer_hooks.train.job import JobSettings, compose_settings
from trainer_hooks.train.main import run_seed

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = [
    "logger=quiet", "trainer.num_threads=1", "trainer.num_steps=2",
    "warmup.max_steps=2", "warmup.first_check=2", "warmup.target_reward=-1",
    "warmup.check_prompts=2", "warmup.batch_size=4", "model.hidden_size=16",
    "model.intermediate_size=16", "model.num_hidden_layers=1", "data.options.num_held_out=2",
    "algorithm.groups_per_step=2", "algorithm.group_size=2", "algorithm.max_new_tokens=8",
    "algorithm.num_minibatches=1",
]  # fmt: skip


def store_settings(*overrides: str) -> JobSettings:
    """The settings of `rollout train --config-dir examples --config-name store`."""
    return compose_settings(overrides, "store", EXAMPLES)


def test_a_job_in_an_environment_logs_its_states_and_reward_terms(tmp_path: Path) -> None:
    summary = run_seed(tmp_path / "store", store_settings(*TINY), seed=0)
    assert summary["num_steps"] == 2
    steps = [row for row in read_jsonl(tmp_path / "store" / "metrics.jsonl") if "reward" in row]
    for row in steps:
        total = row["rewards/asked/mean"] + row["rewards/paid/mean"]
        assert row["reward"] == pytest.approx(total, abs=1e-6)
        assert 1.0 <= row["environment/num_turns"] <= 4.0
    samples = read_jsonl(tmp_path / "store" / "completions.jsonl")
    assert set(samples[0]["state"]["environment"]) == {"price", "paid"}
    assert set(samples[0]["rewards"]) == {"asked", "paid"}
    answers = read_jsonl(tmp_path / "store" / "answers.jsonl")
    assert len(answers[0]["answers"]) == 2


def test_demonstrations_are_the_prompts_and_turns_of_an_episode() -> None:
    tokenizer = store_tokenizer()
    first, second, _ = demonstrations(tokenizer, 0, 1)
    assert second.prompt.startswith(str(first.prompt) + first.columns["answer"])
    assert "pay: pay the price, once" in first.prompt
    assert json.loads(first.columns["answer"][11:-12])["name"] == "price"


def test_the_pupil_asks_mostly_for_the_next_item_and_pays_what_it_costs() -> None:
    turns = list(demonstrations(store_tokenizer(), 0, 200))
    num_careless = 0
    for row, asks, pays in zip(tasks(0, 200), turns[::3], turns[1::3], strict=True):
        prices = dict(zip(ITEMS, row["prices"], strict=True))
        asked, paid = (json.loads(t.columns["answer"][11:-12])["arguments"] for t in (asks, pays))
        assert asked["item"] in (row["item"], next_on_shelf(row["item"]))
        assert paid["amount"] == prices[asked["item"]]
        num_careless += asked["item"] != row["item"]
    assert 0.7 < num_careless / 200 < 0.9


def test_the_store_wants_its_price_once() -> None:
    (row,) = tasks(3, 1)
    price = row["prices"][ITEMS.index(row["item"])]
    store = Store()
    store.reset(row)
    assert store.reward() == {"asked": 0.0, "paid": 0.0}
    assert store.price(row["item"]) == price
    store.pay(price)
    assert store.reward() == {"asked": 0.2, "paid": 0.8}
    assert store.state() == {"price": price, "paid": price}
    assert store.step(ModelTurn(text="Done.", content="Done.")).is_done


def test_random_weights_have_the_range_that_the_job_names() -> None:
    policy = task_of(store_settings()).new_policy()
    embeddings = policy.state_dict()["model.embed_tokens.weight"]
    assert float(embeddings.std()) == pytest.approx(0.1, rel=0.05)


def test_the_rows_held_out_are_not_trained_on_in_the_same_order() -> None:
    assert prompts("held_out", 0)[:4] == prompts("held_out", 1)[:4]
    assert prompts("train", 0)[:4] != prompts("train", 1)[:4]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_model_learns_which_price_to_ask_for(tmp_path: Path, seed: int) -> None:
    settings = store_settings("logger=quiet", "trainer.num_threads=1")
    summary = run_seed(tmp_path / "store", settings, seed)
    assert summary["greedy_reward_before"] < 0.4, "the warm-up is as careless as the pupil"
    assert summary["greedy_gain"] >= 0.5
