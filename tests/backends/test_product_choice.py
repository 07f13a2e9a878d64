"""The choice of products from measured times: pure functions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollout.backends.cpu.product_choice import choose, choose_by_rule
from rollout.backends.cpu.products import BUCKETS, bucket_of
from tests.backends.fake_products import PRODUCTS, names_at, times


def test_a_bucket_holds_the_rows_up_to_its_own_number() -> None:
    rows = (1, 2, 3, 4, 5, 8, 9, 64, 65, 128, 129, 256, 257, 5000)
    held_by = [BUCKETS[bucket_of(number)] for number in rows]
    assert held_by == [1, 2, 4, 4, 8, 8, 16, 64, 128, 128, 256, 256, 256, 256]


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ((), ["native-a"] * 5),
        (("native-a", "native-b"), ["onednn", "onednn", "onednn", "onednn", "plain"]),
        (("native-a", "native-b", "onednn"), ["plain"] * 5),
    ],
)
def test_the_rule_takes_native_or_else_onednn_and_plain_for_many_rows(
    missing: tuple[str, ...], expected: list[str]
) -> None:
    candidates = [product for product in PRODUCTS if product.name not in missing]
    products = choose_by_rule(candidates).products
    assert names_at(1, 16, 17, 128, 129, products=products) == expected


def test_the_fastest_product_of_each_bucket_is_taken() -> None:
    fastest = {1: "plain", 8: "plain", 64: "tiled", 128: "tiled", 256: "plain"}
    choice = choose(times(lambda name, rows: 1 if fastest.get(rows) == name else 2), PRODUCTS)
    assert names_at(1, 8, 64, 128, 256, products=choice.products) == list(fastest.values())
    assert choice.microseconds[0] == 1


def test_only_one_packed_copy_is_wanted_and_it_is_the_better_one_over_all_buckets() -> None:
    """The tiled product is the fastest at 32 rows, oneDNN at 64 and 128."""

    def speed(name: str, rows: int) -> float:
        fastest = {32: "tiled", 64: "onednn", 128: "onednn"}.get(rows, "plain")
        return {fastest: 1.0, "plain": 1.2}.get(name, 1.5)

    products = choose(times(speed), PRODUCTS).products
    assert names_at(16, 32, 64, 128, products=products) == ["plain", "plain", "onednn", "onednn"]


def test_no_packed_copy_is_wanted_where_it_is_nowhere_faster() -> None:
    choice = choose(times(lambda name, rows: 1 if name == "plain" else 2), PRODUCTS)
    assert set(choice.products) == {"plain"}


@pytest.mark.parametrize(("gain", "expected"), [(0.05, "tiled"), (0.025, "native-a")])
def test_another_packed_copy_than_the_default_must_be_better_by_a_margin(
    gain: float, expected: str
) -> None:
    choice = choose(times(lambda name, rows: 1 - gain * (name == "tiled")), PRODUCTS)
    assert set(choice.products) == {expected}


@pytest.mark.parametrize(
    ("gain", "spread", "num_rounds", "is_taken"),
    [
        (0.05, 0.0, 2, True),
        (0.025, 0.0, 2, False),  # not worth a second copy of the weight
        (0.05, 0.07, 2, False),  # the two fastest rounds are further apart
        (0.05, 0.0, 1, False),  # one round says nothing of the noise
        (0.15, 0.0, 1, True),
    ],
)
def test_a_challenger_replaces_the_default_only_beyond_the_noise(
    gain: float, spread: float, num_rounds: int, is_taken: bool
) -> None:
    measured = times(
        lambda name, rows: 1 - gain * (name == "plain" and rows == 1), num_rounds, spread
    )
    choice = choose(measured, PRODUCTS)
    assert choice.products[0] == ("plain" if is_taken else "native-a")


def test_a_bucket_that_was_not_reached_keeps_the_default() -> None:
    measured = times(lambda name, rows: 1 if name == "tiled" else 2)
    measured = {name: replace(t, work=(*t.work[:-2], (), ())) for name, t in measured.items()}
    choice = choose(measured, PRODUCTS)
    # oneDNN, the default of 128 rows, would need a packed copy of its own.
    assert choice.products == ("tiled",) * 7 + ("plain",) * 2
    assert choice.microseconds[-2:] == (None, None)


def test_a_packed_copy_that_cannot_be_unpacked_is_never_wanted() -> None:
    measured = times(lambda name, rows: 1 if name == "mkl" else 2)
    choice = choose(measured, PRODUCTS)
    assert choice == choose({n: t for n, t in measured.items() if n != "mkl"}, PRODUCTS)
    assert "mkl" not in choice.products


def test_a_product_that_was_not_timed_is_never_taken() -> None:
    measured = times(lambda name, rows: 1 if name == "tiled" else 2)
    del measured["tiled"]
    assert "tiled" not in choose(measured, PRODUCTS).products
