"""Curriculum and PromptHistory: draws by history, once per epoch, and equal after a kill."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import ConfigError
from trainer_hooks import Curriculum, PromptHistory, PromptLedger, learnability_weight
from trainer_hooks.prompts.ledger import PromptTicket

PROMPTS = [[number] for number in range(1, 21)]


def stored(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))


def issued(ledger: PromptLedger, count: int) -> list[PromptTicket]:
    tickets = [ledger.issue() for _ in range(count)]
    assert None not in tickets
    return tickets  # type: ignore[return-value]


def reward_of(ticket: PromptTicket) -> float:
    return random.Random(f"{ticket.epoch} {ticket.index}").random()


def train_batch(ledger: PromptLedger, num_prompts: int = 4) -> list[int]:
    """Train one batch, whose first group is filtered. Returns the rows."""
    tickets = issued(ledger, num_prompts)
    for number, ticket in enumerate(reversed(tickets)):
        ledger.consume(ticket, "trained" if number else "filtered", reward_of(ticket), version=3)
    return [ticket.index for ticket in tickets]


def test_prompt_history_counts_the_outcomes_of_a_prompt() -> None:
    ledger = PromptLedger([[1]], num_epochs=None)
    fates: list[tuple[str, float | None, int | None]] = [
        ("trained", 0.5, 2), ("filtered", 1.0, 4), ("failed", None, None), ("trained", 0.0, 7)
    ]  # fmt: skip
    for reason, reward, version in fates:
        (ticket,) = issued(ledger, 1)
        ledger.consume(ticket, reason, reward, version)
    (ticket,) = issued(ledger, 1)
    ledger.give_back(ticket, "stale")
    (ticket,) = issued(ledger, 1)
    ledger.consume(ticket, "trained", 0.5, 8)
    assert ledger.history(0) == PromptHistory(
        num_trained=3, num_filtered=1, num_failed=1, num_given_back=1,
        num_scored=4, mean_reward=0.5, last_reward=0.5, last_version=8,
    )  # fmt: skip
    assert ledger.history(0).num_issued == 6


def test_prompt_histories_keep_the_prompts_seen_last() -> None:
    ledger = PromptLedger(PROMPTS, shuffle=False, max_histories=5)
    for _ in range(4):
        train_batch(ledger)
    issued(ledger, 1)
    known = [row for row in range(20) if ledger.history(row) != PromptHistory()]
    assert known == [11, 12, 13, 14, 15]
    assert len(ledger.state_dict()["histories"]) == 5


def test_state_leaves_out_outcomes_of_untrained_groups() -> None:
    ledger = PromptLedger(PROMPTS, seed=1)
    train_batch(ledger)
    before = ledger.state_dict()
    tickets = issued(ledger, 3)
    for ticket in tickets:
        ledger.consume(ticket, "trained", 1.0, 9)
    issued(ledger, 2)  # the next batch has begun
    state = ledger.state_dict(untrained=tickets)
    assert state["histories"] == before["histories"]
    assert ledger.state_dict()["histories"] != before["histories"]


@given(
    seed=st.integers(0, 1000),
    weights=st.lists(st.floats(0, 10), min_size=20, max_size=20),
    num_epochs=st.integers(1, 3),
)
def test_curriculum_draws_each_prompt_once_per_epoch_whatever_the_weights(
    seed: int, weights: list[float], num_epochs: int
) -> None:
    curriculum = Curriculum(weight=lambda index, history: weights[index] * (history.num_issued < 2))
    ledger = PromptLedger(PROMPTS, seed, num_epochs=num_epochs, curriculum=curriculum)
    rng, trained = random.Random(seed), Counter[tuple[int, int]]()
    while (ticket := ledger.issue()) is not None:
        if rng.random() < 0.2:
            ledger.give_back(ticket, "stale")
        else:
            ledger.consume(ticket, "trained", rng.random(), 0)
            trained[ticket.epoch, ticket.index] += 1
    assert trained == Counter((epoch, row) for epoch in range(num_epochs) for row in range(20))


def test_curriculum_draws_heavier_prompts_earlier() -> None:
    places = []
    for seed in range(50):
        curriculum = Curriculum(weight=lambda index, history: 10.0 if index == 3 else 1.0)
        ledger = PromptLedger(PROMPTS, seed, num_epochs=1, curriculum=curriculum)
        places.append([ticket.index for ticket in issued(ledger, 20)].index(3))
    assert sum(places) / 50 < 4.0  # 9.5 without weights


def test_curriculum_with_replacement_draws_in_proportion_to_weights() -> None:
    curriculum = Curriculum(
        weight=lambda index, history: float(index < 2) * (index + 1), with_replacement=True
    )
    ledger = PromptLedger(PROMPTS, seed=0, num_epochs=15, curriculum=curriculum)
    drawn = Counter(ticket.index for ticket in issued(ledger, 300))
    assert ledger.issue() is None, "an epoch has as many draws as there are prompts"
    assert set(drawn) == {0, 1}
    assert 1.5 < drawn[1] / drawn[0] < 2.7


def test_curriculum_weights_follow_histories_up_to_the_last_trained_batch() -> None:
    """The order in which the groups of a batch finish changes nothing."""
    rows = []
    for order in (1, -1):
        ledger = PromptLedger(PROMPTS, curriculum=Curriculum(weight=learnability_weight))
        tickets = issued(ledger, 6)
        for ticket in tickets[::order]:
            ledger.consume(ticket, "filtered" if ticket.position < 2 else "trained", 0.25, 0)
        rows.append([ticket.index for ticket in issued(ledger, 6)])
    assert rows[0] == rows[1]


@pytest.mark.parametrize("with_replacement", [False, True])
@given(seed=st.integers(0, 1000), num_before=st.integers(0, 12), num_out=st.integers(0, 4))
def test_resumed_curriculum_draws_the_same_prompts_as_an_uninterrupted_one(
    with_replacement: bool, seed: int, num_before: int, num_out: int
) -> None:
    def new_ledger() -> PromptLedger:
        curriculum = Curriculum(weight=learnability_weight, with_replacement=with_replacement)
        return PromptLedger(PROMPTS, seed, curriculum=curriculum, max_histories=12)

    whole, killed = new_ledger(), new_ledger()
    for _ in range(num_before):
        assert train_batch(whole) == train_batch(killed)
    issued(killed, num_out)
    resumed = new_ledger()
    resumed.load_state_dict(stored(killed.state_dict()))
    assert [train_batch(whole) for _ in range(12)] == [train_batch(resumed) for _ in range(12)]
    assert stored(whole.state_dict()) == stored(resumed.state_dict())


def test_learnability_weight_is_greatest_for_new_and_half_solved_prompts() -> None:
    def weight(reward: float | None) -> float:
        return learnability_weight(0, PromptHistory(last_reward=reward))

    assert weight(None) == weight(0.5) == 0.26
    assert weight(0.0) == weight(1.0) == weight(-1.0) == weight(7.0) == 0.01


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_curriculum_refuses_a_negative_or_infinite_weight(bad: float) -> None:
    curriculum = Curriculum(weight=lambda index, history: bad if index == 7 else 1.0)
    with pytest.raises(ConfigError, match=r"weight of row 7 is .*finite and 0 or more"):
        PromptLedger(PROMPTS, curriculum=curriculum)


def test_prompt_ledger_refuses_a_state_with_another_curriculum() -> None:
    by_weight = Curriculum(weight=learnability_weight)
    with pytest.raises(ConfigError, match="shuffle=False with a curriculum"):
        PromptLedger(PROMPTS, shuffle=False, curriculum=by_weight)
    with pytest.raises(ConfigError, match="of a run without a curriculum, and this run is with"):
        PromptLedger(PROMPTS, curriculum=by_weight).load_state_dict(
            PromptLedger(PROMPTS).state_dict()
        )
    state = PromptLedger(PROMPTS, curriculum=by_weight).state_dict()
    with pytest.raises(ConfigError, match="of a run with a curriculum, and this run is without"):
        PromptLedger(PROMPTS).load_state_dict(state)
    other = Curriculum(weight=learnability_weight, with_replacement=True)
    with pytest.raises(ConfigError, match="with_replacement=False instead of True"):
        PromptLedger(PROMPTS, curriculum=other).load_state_dict(state)


def test_a_group_whose_rollouts_all_failed_has_no_reward_in_its_history() -> None:
    ledger = PromptLedger([[1]], curriculum=Curriculum(weight=learnability_weight))
    for reward in (0.25, float("nan"), 0.75):
        (ticket,) = issued(ledger, 1)
        ledger.consume(ticket, "trained", reward, 3)
    history = ledger.history(0)
    assert (history.num_trained, history.num_scored) == (3, 2)
    assert (history.mean_reward, history.last_reward) == (0.5, 0.75)
