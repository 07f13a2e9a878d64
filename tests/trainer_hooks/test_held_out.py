"""split_sources: held-out prompts are never trained on, for all mixtures and repeated prompts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import ConfigError
from trainer_hooks.prompts.checks import CheckedRows, key_of
from trainer_hooks.prompts.ledger import as_prompt_item
from trainer_hooks.train.prompts import SplitPrompts, split_sources, without_prompts
from trainer_hooks.train.settings import DataSettings, SourceSettings

WEIGHTS = st.sampled_from([0.1, 1.0, 1.5, 7.0])


def checked(prompts: list[str]) -> CheckedRows:
    keys = [key_of(as_prompt_item(prompt)) for prompt in prompts]
    return CheckedRows(rows=prompts, keys=keys, num_skipped=0)


def split_of(
    prompts: dict[str, list[str]], weights: dict[str, float], num_held_out: int
) -> SplitPrompts:
    settings = {
        name: SourceSettings(kind="jsonl", path=name, weight=weights[name]) for name in prompts
    }
    data = DataSettings(sources=settings, num_held_out=num_held_out)
    return split_sources({name: checked(own) for name, own in prompts.items()}, data)


def prompts_of(rows: Any) -> list[str]:
    return [as_prompt_item(rows[i]).prompt for i in range(len(rows))]


@given(
    st.dictionaries(
        st.sampled_from("abcd"),
        # At most 12 of the 121 prompts are held out, so that no source is left without any.
        st.tuples(st.lists(st.integers(0, 120), min_size=13, max_size=60, unique=True), WEIGHTS),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 40),
    st.integers(0, 20),
)
def test_no_prompt_of_data_sources_is_both_held_out_and_trained_on(
    sources: dict[str, tuple[list[int], float]], num_held_out: int, num_repeated: int
) -> None:
    prompts = {
        name: [str(number) for number in (*numbers, *numbers[:num_repeated])]
        for name, (numbers, _) in sources.items()
    }
    weights = {name: weight for name, (_, weight) in sources.items()}
    split = split_of(prompts, weights, num_held_out)
    held_out = [item.prompt for item in split.held_out]
    trained = prompts_of(split.train)
    every = {prompt for own in prompts.values() for prompt in own}
    assert set(held_out).isdisjoint(trained)
    assert set(held_out) | set(trained) == every, "no other prompt is lost"
    assert len(set(held_out)) == len(held_out) <= min(num_held_out, len(every) // 10)
    names = Counter(item.columns["data_source"] for item in split.held_out)
    assert all(10 * count <= len(set(prompts[name])) for name, count in names.items())


def test_split_sources_holds_out_prompts_of_each_source_by_its_weight() -> None:
    # Mixed before it is split, the small source's rows come nine times each.
    prompts = {
        "many": [f"many {i}" for i in range(300)],
        "few": [f"few {i}" for i in range(100)],
    }
    split = split_of(prompts, {"many": 1.0, "few": 3.0}, num_held_out=12)
    assert Counter(item.columns["data_source"] for item in split.held_out) == {"many": 3, "few": 9}
    trained = Counter(prompts_of(split.train))
    assert set(trained).isdisjoint(item.prompt for item in split.held_out)
    assert len(trained) == 388
    # The held-out prompts are spread over the rows, and the sources take turns.
    assert {item.columns["data_source"] for item in split.held_out[:4]} == {"many", "few"}


def test_split_sources_holds_out_every_nth_prompt_with_all_its_rows() -> None:
    rows = checked([f"p{i}" for i in range(40)] + ["p0", "p20", "p20"])
    data = DataSettings(kind="jsonl", path="p", num_held_out=2)
    split = split_sources({"data": rows}, data)
    assert [item.prompt for item in split.held_out] == ["p0", "p20"]
    assert prompts_of(split.train) == [f"p{i}" for i in range(40) if i not in (0, 20)]


def test_split_sources_holds_out_nothing_of_one_repeated_prompt() -> None:
    split = split_sources(
        {"data": checked(["same"] * 50)}, DataSettings(kind="jsonl", path="p", num_held_out=8)
    )
    assert (len(split.held_out), len(split.train)) == (0, 50)


def test_without_prompts_refuses_a_source_that_is_all_held_out() -> None:
    source = checked(["a", "b"])
    with pytest.raises(ConfigError, match=r"'warm-up' is held out.*lower data\.num_held_out"):
        without_prompts(source, frozenset(source.keys), "warm-up")
