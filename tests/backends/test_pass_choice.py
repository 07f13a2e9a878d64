"""One product for a whole forward pass: the choice weighs what a pass in one call saves."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollout import SamplingParams
from rollout.backends.base import Backend
from rollout.backends.cpu.product_choice import (
    ONE_BY_ONE,
    FusedPass,
    Measured,
    Times,
    choose,
    choose_pass,
)
from rollout.backends.cpu.products import BUCKETS, LinearHandle, Product
from rollout.backends.forward_batch import ForwardBatch
from rollout.backends.fused_decoder import DecoderParts
from tests.backends.fake_products import (
    PRODUCTS,
    FakeStopwatch,
    PackedProduct,
    names_at,
    products_chosen,
    selection,
    times,
)
from tests.contracts.implementations import kernels
from tests.tiny_models import drain, tiny_engine, tiny_model

# ---- the choice, a pure function of times


def timed(speeds: Mapping[str, float], *, call: float = 10.0, spread: float = 0.0) -> Measured:
    """The same in all buckets; 1000 for products that are not named."""
    return times(lambda name, rows: speeds.get(name, 1000.0), call=call, spread=spread)


def pass_of(num_other_calls: int = 18, **uses: int) -> FusedPass:
    return FusedPass(uses=uses, num_other_calls=num_other_calls)


TIMES = {
    "small": timed({"plain": 3.0, "native-a": 5.0, "native-b": 6.0}),
    "wide": timed({"plain": 30.0, "native-a": 9.0, "native-b": 8.0}),
}


def test_a_small_weight_that_is_faster_elsewhere_is_no_reason_to_leave_the_pass() -> None:
    assert {*choose(TIMES["small"], PRODUCTS).products} == {"plain"}
    of_pass = choose_pass(pass_of(small=2, wide=2), TIMES, PRODUCTS)
    assert {*of_pass.products} == {"native-a"}
    for measured in TIMES.values():
        choice = choose(measured, PRODUCTS, of_pass)
        assert choice.products == of_pass.products
        assert choice.microseconds[0] == measured["native-a"].work[0][0], "without the call"
    assert of_pass.microseconds[0] == 2 * 5.0 + 2 * 9.0


@pytest.mark.parametrize(("count", "expected"), [(1, "native-a"), (20, "native-b")])
def test_of_two_widths_one_serves_the_whole_pass(count: int, expected: str) -> None:
    """The one is better for the small weight, the other for the wide, used so many times."""
    of_pass = choose_pass(pass_of(small=2, wide=count), TIMES, PRODUCTS)
    assert {*of_pass.products} == {expected}
    chosen = {choose(measured, PRODUCTS, of_pass).products for measured in TIMES.values()}
    assert chosen == {of_pass.products}


@pytest.mark.parametrize(
    ("gain", "spread", "is_fused"),
    [
        (150.0, 0.0, True),  # less than the calls: 4 of products and 18 others of 10 us each
        (400.0, 0.0, False),
        (230.0, 0.0, True),  # by less than the margin
        (400.0, 0.7, True),  # by less than the noise
    ],
)
def test_a_pass_is_left_where_other_products_win_more_than_its_calls_cost(
    gain: float, spread: float, is_fused: bool
) -> None:
    """At 1 row, elsewhere the compiled product is the fastest."""

    def speed(name: str, rows: int) -> float:
        if rows == 1 and name == "plain":
            return 250.0 - gain / 4
        return 250.0 if name == "native-a" else 1000.0

    weight = times(speed, call=10.0, spread=spread)
    of_pass = choose_pass(pass_of(weight=4), {"weight": weight}, PRODUCTS)
    assert of_pass.products[0] == ("native-a" if is_fused else ONE_BY_ONE)
    assert {*of_pass.products[1:]} == {"native-a"}
    choice = choose(weight, PRODUCTS, of_pass)
    assert choice.products[0] == ("native-a" if is_fused else "plain")


def test_what_a_pass_saves_grows_with_the_calls_that_its_layers_make() -> None:
    weight = timed({"plain": 150.0, "native-a": 250.0})
    chosen = [
        choose_pass(pass_of(calls, weight=4), {"weight": weight}, PRODUCTS).products[0]
        for calls in (0, 18, 50)
    ]
    assert chosen == [ONE_BY_ONE, ONE_BY_ONE, "native-a"]


def test_a_pass_is_left_for_the_numbers_of_rows_where_that_is_faster() -> None:
    """As where a library's product uses units that the compiled one does not."""

    def speed(name: str, rows: int) -> float:
        own_speed = {"native-a": 10.0, "plain": 2.0 if rows >= 64 else 20.0}
        return 20 + rows * own_speed.get(name, 100.0)

    weight = times(speed, call=10.0)
    of_pass = choose_pass(pass_of(weight=4), {"weight": weight}, PRODUCTS)
    at = names_at(1, 32, 33, 5000, products=of_pass.products)
    assert at == ["native-a", "native-a", ONE_BY_ONE, ONE_BY_ONE]
    choice = choose(weight, PRODUCTS, of_pass)
    assert names_at(1, 32, 33, 5000, products=choice.products) == ["native-a"] * 2 + ["plain"] * 2


def test_products_that_share_a_packed_copy_take_turns_in_a_pass() -> None:
    """As vectors for few rows and a matrix unit for many."""
    wide = PackedProduct("native-wide", kind="native", layout="native-a")
    candidates = [*PRODUCTS, wide]

    def work(name: str, rows: int) -> float:
        return {"native-a": 10.0 * rows, "native-wide": 30.0 + rows}.get(name, 1000.0 * rows)

    weight = {
        product.name: Times(call=1.0, work=tuple((work(product.name, n),) * 2 for n in BUCKETS))
        for product in candidates
    }
    of_pass = choose_pass(pass_of(weight=4), {"weight": weight}, candidates)
    at = names_at(1, 2, 8, 5000, products=of_pass.products)
    assert at == ["native-a", "native-a", "native-wide", "native-wide"]
    assert choose(weight, candidates, of_pass).products == of_pass.products
    assert choose(weight, candidates).products == of_pass.products


def test_where_a_pass_is_left_altogether_each_weight_has_its_own_copy() -> None:
    measured = {
        "small": timed({"tiled": 10.0, "native-a": 900.0}),
        "wide": timed({"onednn": 10.0, "native-a": 900.0}),
    }
    of_pass = choose_pass(pass_of(small=4, wide=4), measured, PRODUCTS)
    assert {*of_pass.products} == {ONE_BY_ONE}
    for key in measured:
        assert choose(measured[key], PRODUCTS, of_pass) == choose(measured[key], PRODUCTS)


def test_what_was_not_timed_leaves_the_pass_in_one_call() -> None:
    weight = timed({"plain": 1.0, "native-a": 900.0})
    weight = {name: replace(t, work=((),) * len(BUCKETS)) for name, t in weight.items()}
    of_pass = choose_pass(pass_of(weight=4), {"weight": weight}, PRODUCTS)
    assert {*of_pass.products} == {"native-a"}
    assert {*of_pass.microseconds} == {None}


def test_without_a_product_that_fuses_the_layers_run_one_by_one() -> None:
    weight = {name: t for name, t in TIMES["small"].items() if not name.startswith("native")}
    of_pass = choose_pass(pass_of(weight=4), {"weight": weight}, PRODUCTS)
    assert {*of_pass.products} == {ONE_BY_ONE}
    assert choose(weight, PRODUCTS, of_pass) == choose(weight, PRODUCTS)


@given(
    speeds=st.lists(
        st.dictionaries(
            st.sampled_from([p.name for p in PRODUCTS]), st.floats(0.5, 2000.0), min_size=1
        ),
        min_size=1,
        max_size=3,
    ),
    num_other_calls=st.integers(0, 60),
    call=st.floats(0.5, 50.0),
)
def test_a_pass_runs_in_one_call_or_costs_clearly_less_otherwise(
    speeds: list[dict[str, float]], num_other_calls: int, call: float
) -> None:
    """And its weights are then all of the product that runs it, or of one copy each."""
    measured = {str(key): timed(each, call=call) for key, each in enumerate(speeds)}
    fused = FusedPass(uses=dict.fromkeys(measured, 2), num_other_calls=num_other_calls)
    of_pass = choose_pass(fused, measured, PRODUCTS)
    chosen = {key: choose(measured[key], PRODUCTS, of_pass) for key in measured}
    in_one_call = min(
        sum(2 * measured[key][name].work[0][0] for key in measured)
        for name in ("native-a", "native-b")
    )
    (name,) = {*of_pass.products}
    if name == ONE_BY_ONE:
        products = sum(
            2 * (call + measured[key][chosen[key].products[0]].work[0][0]) for key in measured
        )
        assert products + num_other_calls * call < in_one_call
    else:
        assert {choice.products for choice in chosen.values()} == {of_pass.products}
        cost = sum(2 * measured[key][name].work[0][0] for key in measured)
        assert cost <= in_one_call * 1.04


# ---- measuring and keeping


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where times are kept. The compiled kernels stay where they are."""
    folder = tmp_path / "products"
    folder.mkdir()
    monkeypatch.setattr("rollout.backends.cpu.product_cache.private_folder", lambda name: folder)
    return folder


SMALL, WIDE, HEAD = torch.ones(24, 32), torch.ones(64, 32), torch.ones(40, 32)
LAYERS = [SMALL, WIDE, WIDE]
OTHER_CALLS = 18
ALL_BUCKETS = frozenset(range(len(BUCKETS)))
MICROSECOND = 1e-6


@dataclass(slots=True)
class ShapedStopwatch(FakeStopwatch):
    """Microseconds by shape and product, and a call of 10; 100 for products that are not named."""

    by_shape: dict[tuple[int, ...], dict[str, float]] = field(default_factory=dict)

    def overhead(self, product: Product, x_TK: Tensor, handle: LinearHandle) -> float:
        return 10 * MICROSECOND

    def seconds(self, product: Product, x_TK: Tensor, handle: LinearHandle) -> float:
        self.calls.append((product.name, x_TK.shape[0]))
        named = self.by_shape[tuple(handle.weight_NK.shape)]
        return (10 + named.get(product.name, 100)) * MICROSECOND


def shaped(**by_shape: dict[str, float]) -> ShapedStopwatch:
    shapes = {"small": (24, 32), "wide": (64, 32), "head": (40, 32)}
    named = {shapes[name]: speeds for name, speeds in by_shape.items()}
    return ShapedStopwatch(lambda name, rows: 0.0, by_shape=named)


# Plain is 2 us faster for the small one, and wider vectors are for the other.
MIXED = {
    "small": {"plain": 3.0, "native-a": 5.0, "native-b": 5.5},
    "wide": {"plain": 30.0, "native-a": 9.0, "native-b": 8.0},
    "head": {"plain": 20.0, "native-a": 25.0, "native-b": 25.0},
}


def test_a_small_shape_that_is_faster_elsewhere_does_not_stop_the_whole_pass() -> None:
    products = selection(shaped(**MIXED))
    products.choose([*LAYERS, HEAD], LAYERS, OTHER_CALLS)
    assert products_chosen(products, SMALL) == products_chosen(products, WIDE)
    assert products_chosen(products, SMALL) <= {"native-a", "native-b"}
    assert products_chosen(products, HEAD) == {"plain"}, "the head is no part of the pass"
    alone = selection(shaped(**MIXED))
    alone.choose([*LAYERS, HEAD])
    assert products_chosen(alone, SMALL) == {"plain"}


def test_two_models_that_share_a_shape_decide_by_the_same_times() -> None:
    """The first has the small weight alone; for the second it is a part of a pass."""
    head = selection(shaped(**MIXED))
    head.choose([SMALL, WIDE, HEAD])
    stopwatch = shaped(**MIXED)
    decoder = selection(stopwatch)
    decoder.choose([*LAYERS, HEAD], LAYERS, OTHER_CALLS)
    assert stopwatch.calls == []
    assert products_chosen(head, SMALL) == {"plain"} != products_chosen(decoder, SMALL)


def test_an_engine_that_reads_the_file_decides_as_the_one_that_measured() -> None:
    measuring, reading = shaped(**MIXED), shaped()
    decisions = []
    for stopwatch in (measuring, reading):
        products = selection(stopwatch)
        products.choose([*LAYERS, HEAD], LAYERS, OTHER_CALLS)
        decisions.append(products.choices())
    assert decisions[0] == decisions[1]
    assert measuring.calls
    assert reading.calls == []


def test_a_rank_with_another_share_runs_the_pass_as_rank_0_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own times it would take the other width, and another product for its own shape."""
    lead = selection(shaped(**MIXED))
    lead.choose(LAYERS, LAYERS, OTHER_CALLS)
    (product,) = products_chosen(lead, SMALL)
    other = {"native-a", "native-b"} - {product}
    monkeypatch.setattr("rollout.backends.cpu.product_cache.private_folder", lambda name: tmp_path)
    follower = selection(shaped(small={name: 1.0 for name in other}, head={"plain": 1.0}))
    follower.take_choices(lead.choices())
    follower.choose([SMALL, HEAD, HEAD], [SMALL, HEAD, HEAD], OTHER_CALLS)
    assert products_chosen(follower, SMALL) == products_chosen(follower, HEAD) == {product}


def test_where_rank_0_leaves_the_pass_a_rank_with_another_share_leaves_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its weights have one compiled product: in one call it would add up other numbers."""
    small = {"plain": 1.0, "native-a": 900.0, "native-b": 900.0}
    lead = selection(shaped(small=small, wide={"native-a": 1.0}))
    assert lead.fused_buckets() == ALL_BUCKETS
    lead.choose(LAYERS, LAYERS, OTHER_CALLS)
    assert products_chosen(lead, WIDE) == {"native-a"} != products_chosen(lead, SMALL)
    monkeypatch.setattr("rollout.backends.cpu.product_cache.private_folder", lambda name: tmp_path)
    follower = selection(shaped(head={"native-a": 1.0}))
    follower.take_choices(lead.choices())
    follower.choose([HEAD, WIDE], [HEAD, WIDE], OTHER_CALLS)
    assert products_chosen(follower, HEAD) == products_chosen(follower, WIDE) == {"native-a"}
    assert lead.fused_buckets() == follower.fused_buckets() == frozenset()


def test_the_table_says_what_runs_the_pass() -> None:
    products = selection(shaped(**MIXED))
    products.choose(LAYERS, LAYERS, OTHER_CALLS)
    rows = [line.split() for line in products.explain().splitlines()]
    (first, *_) = [row for row in rows if row[:2] == ["forward", "pass"]]
    (product,) = products_chosen(products, SMALL)
    work = sum(MIXED[key][product] for key in ("small", "wide", "wide"))
    assert first == ["forward", "pass", "1", product, f"{work:.0f}"]


@dataclass(slots=True)
class DisturbedStopwatch(ShapedStopwatch):
    """Now and then a call with next to no work takes longer than one with the weight."""

    num_overheads: int = 0

    def overhead(self, product: Product, x_TK: Tensor, handle: LinearHandle) -> float:
        self.num_overheads += 1
        return (1000 if self.num_overheads % 7 == 0 else 10) * MICROSECOND


def test_a_disturbed_measurement_of_the_call_makes_no_product_fast() -> None:
    speeds = {"plain": 130.0, "onednn": 120.0, "native-a": 100.0, "native-b": 100.0}
    products = selection(DisturbedStopwatch(lambda n, r: 0.0, by_shape={(24, 32): speeds}))
    products.choose([SMALL])
    assert products_chosen(products, SMALL) == {"native-a"}
    (choice,) = products.choices().values()
    assert {*choice.microseconds} == {110.0}


# ---- an engine


@dataclass
class CountedDecoder:
    """A fused decoder that counts passes by their numbers of rows: those it ran, and others."""

    decoder: Any
    ran: Counter[int] = field(default_factory=Counter)
    left: Counter[int] = field(default_factory=Counter)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def run(self, tables: Sequence[tuple[Tensor, Tensor]], batch: ForwardBatch) -> Tensor | None:
        result: Tensor | None = self.decoder.run(tables, batch)
        counter = self.left if result is None else self.ran
        counter[len(batch.token_ids_T)] += 1
        return result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_steps_of_a_tiny_model_run_in_one_call_when_products_were_just_measured(
    dtype: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its products take some microseconds, and calls of layers one by one hundreds."""
    kernels()  # skips without a compiler
    monkeypatch.setenv("ROLLOUT_TUNE", "1")
    caplog.set_level(logging.INFO)
    made: list[CountedDecoder] = []

    def counted(backend: Backend) -> Backend:
        def fuse(parts: DecoderParts | None) -> CountedDecoder:
            assert backend.fuse_decoder is not None
            made.append(CountedDecoder(backend.fuse_decoder(parts)))
            return made[-1]

        return replace(backend, fuse_decoder=fuse)

    engine = tiny_engine(tiny_model("qwen3"), change_backend=counted, dtype=dtype, num_threads=1)
    (times_file,) = folder.glob("*.json")
    assert "native" in times_file.read_text()
    assert any("forward passes in one call: for" in r.getMessage() for r in caplog.records)
    for num_rows in (1, 5):
        params = SamplingParams(num_tokens_to_generate=6, ignore_eos=True)
        for row in range(num_rows):
            engine.add_request([1 + row, 2, 3], params)
        drain(engine)
    (decoder,) = made
    assert decoder.ran[1] >= 5
    assert decoder.ran[5] >= 5
    assert not decoder.left


def test_passes_that_are_not_allowed_in_one_call_run_layer_by_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels()  # skips without a compiler
    monkeypatch.setenv("ROLLOUT_TUNE", "native")
    engine = tiny_engine(tiny_model("qwen3"), dtype="float32", num_threads=1)
    decoder: Any = engine.build.model.fused
    assert decoder.explain() == "for any number of rows"
    counted = engine.build.model.fused = CountedDecoder(decoder)
    for num_allowed in (len(BUCKETS), 0):
        decoder.allow(frozenset(range(num_allowed)))
        counted.ran.clear()
        params = SamplingParams(num_tokens_to_generate=3, ignore_eos=True)
        engine.add_request([1, 2, 3], params)
        drain(engine)
        assert bool(counted.ran) == bool(num_allowed)
    assert decoder.explain().startswith("never: the layers run one by one")
