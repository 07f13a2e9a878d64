"""PromptLedger: each prompt once per epoch, across kills, resumes and prompts given back."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import ConfigError
from trainer_hooks.prompts.ledger import PromptItem, PromptLedger, PromptTicket

WORDS = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu"]


def issue_all(ledger: PromptLedger) -> list[PromptTicket]:
    tickets = []
    while (ticket := ledger.issue()) is not None:
        tickets.append(ticket)
    return tickets


def stored(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))


def test_prompt_ledger_draws_another_seeded_permutation_each_epoch() -> None:
    tickets = issue_all(PromptLedger(WORDS * 10, seed=3, num_epochs=2))
    first, second = tickets[:70], tickets[70:]
    for epoch in (first, second):
        assert sorted(ticket.index for ticket in epoch) == list(range(70))
    assert [t.index for t in first] != [t.index for t in second]
    assert tickets == issue_all(PromptLedger(WORDS * 10, seed=3, num_epochs=2))
    assert tickets != issue_all(PromptLedger(WORDS * 10, seed=4, num_epochs=2))
    assert tickets == sorted(tickets)


def test_prompt_ledger_shuffled_order_is_pinned() -> None:
    # A changed order would make checkpoints of earlier releases repeat and skip prompts.
    indices = [ticket.index for ticket in issue_all(PromptLedger(WORDS, seed=0, num_epochs=1))]
    assert indices == [5, 3, 1, 0, 6, 4, 2]


def test_prompt_ledger_without_shuffle_keeps_the_order_of_the_source() -> None:
    tickets = issue_all(PromptLedger(WORDS, shuffle=False, num_epochs=1))
    assert [ticket.index for ticket in tickets] == list(range(7))


def test_give_back_makes_a_prompt_the_next_one_issued() -> None:
    ledger = PromptLedger(WORDS, num_epochs=1)
    first, second, third = (ledger.issue() for _ in range(3))
    ledger.give_back(third, "stale")
    ledger.give_back(first, "oversampled")
    assert [ledger.issue(), ledger.issue()] == [first, third]
    assert ledger.num_out == 3
    for ticket, reason in ((first, "trained"), (second, "filtered"), (third, "failed")):
        ledger.consume(ticket, reason)
    assert ledger.consumed == {"trained": 1, "filtered": 1, "failed": 1}
    assert ledger.given_back == {"stale": 1, "oversampled": 1}
    assert not ledger.is_exhausted
    issue_all(ledger)
    assert ledger.is_exhausted


def test_consume_refuses_a_ticket_that_is_not_out() -> None:
    ledger = PromptLedger(WORDS)
    ticket = ledger.issue()
    ledger.consume(ticket)
    for act in (ledger.consume, ledger.give_back):
        with pytest.raises(ConfigError, match="not out: it was consumed or given back already"):
            act(ticket, "late")


def test_load_state_dict_issues_unconsumed_prompts_again_in_order() -> None:
    ledger = PromptLedger(WORDS * 3, seed=1)
    tickets = [ledger.issue() for _ in range(6)]
    for i in (0, 2, 3):
        ledger.consume(tickets[i])
    ledger.give_back(tickets[4], "oversampled")
    state = stored(ledger.state_dict())
    resumed = PromptLedger(WORDS * 3, seed=1)
    resumed.load_state_dict(state)
    assert [resumed.issue() for _ in range(3)] == [tickets[1], tickets[4], tickets[5]]
    assert (resumed.issue() or tickets[0]).position == 6
    assert resumed.consumed == {"trained": 3}


def test_state_dict_can_leave_out_an_untrained_batch() -> None:
    ledger = PromptLedger(WORDS, seed=1)
    tickets = [ledger.issue() for _ in range(4)]
    for ticket in tickets:
        ledger.consume(ticket)
    state = stored(ledger.state_dict(untrained=tickets[2:]))
    assert state["consumed"] == {"trained": 2}
    resumed = PromptLedger(WORDS, seed=1)
    resumed.load_state_dict(state)
    assert [resumed.issue(), resumed.issue()] == tickets[2:]


def test_state_dict_does_not_grow_with_the_number_of_prompts() -> None:
    ledger = PromptLedger(range_of_prompts(50_000), max_histories=0)
    for _ in range(30_000):
        ticket = ledger.issue()
        if ticket.position % 10_000:
            ledger.consume(ticket)
    assert len(json.dumps(ledger.state_dict())) < 500
    assert len(ledger.state_dict()["unfinished"]) == 3


def range_of_prompts(count: int) -> list[list[int]]:
    return [[i] for i in range(count)]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (PromptLedger([*WORDS, "hen"], seed=1), "num_prompts=7 instead of 8"),
        (PromptLedger(["hen", *WORDS[1:]], seed=1), "fingerprint="),
        (PromptLedger(WORDS, seed=2), "seed=1 instead of 2"),
        (PromptLedger(WORDS, seed=1, shuffle=False), "shuffle=True instead of False"),
    ],
)
def test_load_state_dict_refuses_a_state_of_other_prompts(other: PromptLedger, named: str) -> None:
    with pytest.raises(ConfigError, match=f"state is that of other prompts.*{named}"):
        other.load_state_dict(PromptLedger(WORDS, seed=1).state_dict())


def test_load_state_dict_refuses_while_prompts_are_out() -> None:
    ledger = PromptLedger(WORDS)
    state = ledger.state_dict()
    ledger.issue()
    with pytest.raises(ConfigError, match="1 prompts are out"):
        ledger.load_state_dict(state)


class ReadAgain:
    """An iterable without a length."""

    def __iter__(self) -> Any:
        return iter(WORDS)


class ReadByNumber:
    """A dataset that makes its rows when they are read."""

    def __init__(self) -> None:
        self.num_read = 0

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.num_read += 1
        return {"prompt": f"{index} + 1 =", "answer": index + 1}


def test_prompt_ledger_accepts_rows_items_texts_ids_and_iterables() -> None:
    sources: list[Any] = [
        ["a"],
        [[1, 2]],
        [torch.tensor([1, 2])],
        [PromptItem("a", {"answer": 1})],
        [{"prompt": "a", "answer": 1}],
    ]
    items = []
    for source in sources:
        ledger = PromptLedger(source)
        items.append(ledger.item(ledger.issue()))
    assert [item.prompt for item in items] == ["a", [1, 2], [1, 2], "a", "a"]
    assert [dict(item.columns) for item in items] == [{}, {}, {}, {"answer": 1}, {"answer": 1}]
    assert len(PromptLedger(ReadAgain())) == 7


def test_prompt_ledger_reads_rows_of_a_dataset_when_issued() -> None:
    dataset = ReadByNumber()
    ledger = PromptLedger(dataset)
    assert dataset.num_read <= 64, "those of the fingerprint"
    ticket = ledger.issue()
    assert ledger.item(ticket).columns == {"answer": ticket.index + 1}


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ([], "no prompts"),
        ("one text", "one str"),
        (iter(WORDS), "iterator"),
        ([3], "row 0.*neither text nor token ids"),
        ([{"question": "?"}], "row 0.*'prompt'"),
        ([""], "row 0"),
    ],
)
def test_prompt_ledger_refuses_sources_that_cannot_be_resumed(source: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        PromptLedger(source)


@given(
    seed=st.integers(0, 2**32),
    num_prompts=st.integers(1, 40),
    num_epochs=st.integers(1, 3),
    kill_rate=st.floats(0.0, 0.3),
)
def test_prompt_ledger_consumes_each_prompt_once_per_epoch_across_kills(
    seed: int, num_prompts: int, num_epochs: int, kill_rate: float
) -> None:
    rng = random.Random(seed)
    source = range_of_prompts(num_prompts)

    def fresh() -> PromptLedger:
        return PromptLedger(source, seed=seed, num_epochs=num_epochs)

    ledger, out, done = fresh(), [], Counter()
    saved, saved_done, expected = stored(ledger.state_dict()), Counter(), None
    num_kills = 0
    while not (ledger.is_exhausted and not out):
        act = rng.random()
        if act < kill_rate and num_kills < 20:
            num_kills += 1
            ledger, out, done = fresh(), [], saved_done.copy()
            ledger.load_state_dict(saved)
            expected = [tuple(pair) for pair in saved["unfinished"]]
        elif act < 0.4:
            saved, saved_done = stored(ledger.state_dict()), done.copy()
        elif act < 0.7 and (ticket := ledger.issue()) is not None:
            if expected:
                assert (ticket.epoch, ticket.position) == expected.pop(0)
            out.append(ticket)
        elif out:
            ticket = out.pop(rng.randrange(len(out)))
            if rng.random() < 0.3:
                ledger.give_back(ticket, "returned")
                expected = None  # it comes before what the crash left over
            else:
                ledger.consume(ticket, rng.choice(["trained", "filtered", "failed"]))
                done[ticket.epoch, ticket.index] += 1
    wanted = {(epoch, index) for epoch in range(num_epochs) for index in range(num_prompts)}
    assert set(done) == wanted
    assert set(done.values()) == {1}
    assert sum(ledger.consumed.values()) == len(wanted)
