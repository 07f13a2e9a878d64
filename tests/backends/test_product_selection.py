"""Measuring once, keeping the choices, and doing without where that fails."""

from __future__ import annotations

import fcntl
import json
import logging
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from rollout.backends.cpu.linear_ops import CpuOps
from rollout.backends.cpu.product_choice import choosable
from rollout.backends.cpu.product_selection import ProductSelection
from rollout.backends.cpu.product_timing import Stopwatch
from rollout.backends.cpu.products import BUCKETS
from rollout.errors import ConfigError
from tests.backends.fake_products import (
    MACHINE,
    PRODUCTS,
    FakeStopwatch,
    products_chosen,
    selection,
)
from tests.processes import PROCESSES

WEIGHT = torch.arange(24 * 32.0).view(24, 32) / 100
WIDE = torch.ones(64, 32)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the choices are kept: an empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "cache" / "rollout" / "products"


def files_in(folder: Path) -> list[Path]:
    """The kept choices, without locks."""
    return [*folder.glob("*.json")]


def tiled_is_fastest(name: str, rows: int) -> float:
    return 1.0 if name == "tiled" else 2.0


def names(products: ProductSelection, weight: Tensor = WEIGHT) -> set[str]:
    return products_chosen(products, weight)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def measured_choices() -> set[str]:
    stopwatch = FakeStopwatch(tiled_is_fastest)
    products = selection(stopwatch)
    products.choose([WEIGHT])
    assert stopwatch.calls
    return names(products)


def test_each_shape_is_measured_once_and_then_read_from_the_file() -> None:
    first, second, third, fourth = (FakeStopwatch(tiled_is_fastest) for _ in range(4))
    selection(first).choose([WEIGHT, WEIGHT.clone()])
    again = selection(second)
    again.choose([WEIGHT])
    assert (names(again), second.calls) == ({"tiled"}, [])
    more = selection(third)
    more.choose([WEIGHT, WIDE])
    assert len(third.calls) == len(first.calls) > 0
    assert names(more) == names(more, WIDE) == {"tiled"}
    last = selection(fourth)
    last.choose([WIDE])
    assert (names(last, WIDE), fourth.calls) == ({"tiled"}, [])


def test_an_engine_of_another_machine_has_a_file_of_its_own(folder: Path) -> None:
    other = FakeStopwatch(lambda name, rows: 1.0)
    assert measured_choices() == {"tiled"}
    products = selection(other, machine={"cpu": "another"})
    products.choose([WEIGHT])
    assert other.calls
    assert len(files_in(folder)) == 2


def start_engine(folder: Path, own: int, start: Barrier, results: Connection) -> None:
    """Measure a weight that all engines have and one of its own; each finds another speed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        fastest = choosable(PRODUCTS)[own].name
        stopwatch = FakeStopwatch(lambda name, rows: 1.0 if name == fastest else 2.0)
        products = selection(stopwatch)
        own_weight = torch.ones(24 + 8 * (own + 1), 32)
        start.wait(60.0)  # all have read the empty file
        products.choose([WEIGHT, own_weight])
        results.send((names(products), names(products, own_weight)))


def fastest_in(measured: dict[str, Any]) -> str:
    """The product whose first round of all is the shortest, by the times in a file."""
    return min(measured, key=lambda name: measured[name]["work"][0][0])


def test_engines_that_start_together_go_on_with_the_same_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # multiprocessing keeps its sockets there until all tests are over.
    monkeypatch.setattr(tempfile, "tempdir", None)
    count = len(choosable(PRODUCTS))
    start, folder = PROCESSES.Barrier(count), tmp_path / "cache"
    pipes = [PROCESSES.Pipe(duplex=False) for _ in range(count)]
    processes = [
        PROCESSES.Process(target=start_engine, args=(folder, own, start, results))
        for own, (_, results) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    found = []
    for receiver, _ in pipes:
        assert receiver.poll(60.0)
        found.append(receiver.recv())
    for process in processes:
        process.join(60.0)
    shared = [names_of_shared for names_of_shared, _ in found]
    assert shared == [shared[0]] * count
    (file,) = files_in(folder / "rollout" / "products")
    times_by_key = json.loads(file.read_text())["times"]
    kept = {key: {fastest_in(measured)} for key, measured in times_by_key.items()}
    of_own = {f"{24 + 8 * (own + 1)}x32 float32": found[own][1] for own in range(count)}
    assert kept == of_own | {"24x32 float32": shared[0]}


def test_a_choice_that_another_engine_saved_meanwhile_replaces_the_own() -> None:
    fast, slow = FakeStopwatch(tiled_is_fastest), FakeStopwatch(lambda name, rows: 1.0)
    late = selection(slow)
    selection(fast).choose([WEIGHT])
    late.choose([WEIGHT])
    assert slow.calls
    assert names(late) == {"tiled"}


def test_a_file_that_cannot_be_locked_costs_one_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert measured_choices() == {"tiled"}
    (warning,) = warnings_in(caplog)
    assert "without a lock" in warning
    assert len(files_in(folder)) == 1


def test_every_product_is_timed_in_the_first_round_and_losers_in_no_other() -> None:
    stopwatch = FakeStopwatch(lambda name, rows: 1.0 + [p.name for p in PRODUCTS].index(name))
    selection(stopwatch).choose([WEIGHT])
    names_of_timed = {name for name, _ in stopwatch.calls}
    assert names_of_timed == {product.name for product in PRODUCTS} - {"mkl"}
    # The four fastest go on; native-a and not native-b, for it is the default of a few rows.
    assert stopwatch.calls.count(("native-b", 1)) == 1
    assert stopwatch.calls.count(("native-a", 1)) == stopwatch.calls.count(("tiled", 1)) > 1


def test_a_product_whose_copy_cannot_be_unpacked_is_neither_timed_nor_taken() -> None:
    stopwatch = FakeStopwatch(lambda name, rows: 1.0 if name == "mkl" else 2.0)
    products = selection(stopwatch)
    products.choose([WEIGHT])
    assert "mkl" not in {name for name, _ in stopwatch.calls} | names(products)


def test_a_sample_is_gone_before_the_next_weight_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: WeakSet[Tensor] = WeakSet()
    widths: list[set[int]] = []

    def pack(weight: Tensor) -> Tensor:
        copy = weight.clone()
        packed.add(copy)
        widths.append({sample.shape[1] for sample in packed})
        return copy

    for product in PRODUCTS:
        if product.packs:
            monkeypatch.setattr(product, "pack", pack)
    weights = [torch.ones(64, width) for width in (8, 16, 32)]
    selection(FakeStopwatch(tiled_is_fastest)).choose(weights)
    assert [*map(len, widths)] == [1] * len(widths)
    assert set.union(*widths) == {8, 16, 32}


def test_of_a_large_weight_only_the_first_rows_are_packed_and_times_are_scaled_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_bytes = []

    def pack(weight: Tensor) -> Tensor:
        num_bytes.append(weight.nbytes)
        return weight.clone()

    for product in PRODUCTS:
        if product.packs:
            monkeypatch.setattr(product, "pack", pack)
    ops = CpuOps(selection(FakeStopwatch(lambda name, rows: 1e-6)))
    ops.tune([ops.prepare_linear(torch.ones(32_768, 128))])  # 16 MiB
    *samples, whole = num_bytes
    assert (max(samples), whole) == (2 << 20, 16 << 20)
    assert ops.explain().splitlines()[1].split()[-1] == "8"


def test_what_the_budget_does_not_reach_goes_by_rule() -> None:
    products = selection(FakeStopwatch(lambda name, rows: 1.0, max_calls=3))
    products.choose([WEIGHT])
    assert names(products) == {"native-a"}


def test_what_was_timed_once_is_measured_again_by_the_next_engine() -> None:
    num_calls = len(choosable(PRODUCTS)) * len(BUCKETS)
    hasty, second = FakeStopwatch(tiled_is_fastest, num_calls), FakeStopwatch(tiled_is_fastest)
    products = selection(hasty)
    products.choose([WEIGHT])
    assert names(products) == {"tiled"}
    selection(second).choose([WEIGHT])
    assert second.calls


def test_a_stopwatch_ends_with_its_budget_or_with_a_part_of_it() -> None:
    assert Stopwatch(budget_s=0.0).is_over()
    stopwatch = Stopwatch(budget_s=1e6)
    assert not stopwatch.is_over()
    stopwatch.start_part(1 << 62)
    assert stopwatch.is_over()
    stopwatch.start_part(1)
    assert not stopwatch.is_over()


def test_switched_off_nothing_is_measured_or_read(folder: Path) -> None:
    measured_choices()
    stopwatch = FakeStopwatch(tiled_is_fastest)
    products = selection(stopwatch, "0")
    products.choose([WEIGHT])
    assert stopwatch.calls == []
    assert names(products) == {"native-a"}


@pytest.mark.parametrize(
    ("switch", "expected"),
    [("plain", "plain"), ("mkl", "mkl"), ("native", "native-a"), ("native-b", "native-b")],
)
def test_a_product_is_forced_by_its_name_or_its_kind(switch: str, expected: str) -> None:
    stopwatch = FakeStopwatch(tiled_is_fastest)
    products = selection(stopwatch, switch)
    products.choose([WEIGHT])
    assert (names(products), stopwatch.calls) == ({expected}, [])


def test_a_name_of_no_product_is_refused_with_the_legal_ones() -> None:
    with pytest.raises(ConfigError, match=r"ROLLOUT_TUNE='openvino'.*'onednn'"):
        selection(FakeStopwatch(tiled_is_fastest), "openvino")


def of_another_machine(text: str) -> str:
    return text.replace("this one", "another")


def truncated(text: str) -> str:
    return text[: len(text) // 2]


def of_unknown_products(text: str) -> str:
    return text.replace('"tiled"', '"cublas"')


def of_negative_times(text: str) -> str:
    content = json.loads(text)
    content["times"]["24x32 float32"]["tiled"]["work"][0] = [-1.0]
    return json.dumps(content)


def of_few_buckets(text: str) -> str:
    content = json.loads(text)
    content["times"]["24x32 float32"]["tiled"]["work"].pop()
    return json.dumps(content)


def without_the_plain_product(text: str) -> str:
    content = json.loads(text)
    del content["times"]["24x32 float32"]["plain"]
    return json.dumps(content)


def of_rounds_that_are_not_sorted(text: str) -> str:
    content = json.loads(text)
    content["times"]["24x32 float32"]["tiled"]["work"][0] = [2.0, 1.0]
    return json.dumps(content)


def another_kind(text: str) -> str:
    return "[1, 2]"


def without_times(text: str) -> str:
    return json.dumps({"machine": MACHINE, "times": [1]})


SPOILT = [of_another_machine, truncated, of_unknown_products, of_negative_times, of_few_buckets]
SPOILT += [without_the_plain_product, of_rounds_that_are_not_sorted, another_kind, without_times]


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_spoilt_file_costs_one_warning_and_is_written_anew(
    spoil: Callable[[str], str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    measured_choices()
    (file,) = files_in(folder)
    good = file.read_text()
    file.write_text(spoil(good))
    assert measured_choices() == {"tiled"}
    (warning,) = warnings_in(caplog)
    assert file.name in warning
    assert file.read_text() == good
    assert {*folder.iterdir()} == {file, file.with_suffix(".lock")}


def test_bytes_that_are_no_text_cost_one_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    measured_choices()
    (file,) = files_in(folder)
    file.write_bytes(b"\xff\xfe\x00")
    assert measured_choices() == {"tiled"}
    assert len(warnings_in(caplog)) == 1


def test_a_cache_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(tempfile, "tempdir", str(blocked))
    assert measured_choices() == {"tiled"}
    (warning,) = warnings_in(caplog)
    assert "OSError" in warning


def test_a_handle_is_plain_until_it_is_tuned_and_then_follows_the_choice() -> None:
    ops = CpuOps(selection(FakeStopwatch(tiled_is_fastest)))
    weight, x = WEIGHT.clone(), torch.ones(3, 32)
    handle = ops.prepare_linear(weight)
    assert ops.packed(handle) is None
    torch.testing.assert_close(ops.linear(x, handle), x @ weight.T)
    ops.tune([handle])
    assert handle.packing is not None
    assert handle.packing.name == "tiled"
    torch.testing.assert_close(ops.linear(x, handle), x @ weight.T)
    weight.mul_(2)
    ops.refresh(handle)
    torch.testing.assert_close(ops.linear(x, handle), x @ weight.T)


@pytest.mark.parametrize("switch", ["1", "0", "tiled"])
def test_a_weight_is_packed_once_when_an_engine_starts(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = []
    for product in PRODUCTS:
        if product.packs:
            monkeypatch.setattr(product, "pack", lambda w: packed.append(w) or w.clone())
    ops = CpuOps(selection(FakeStopwatch(tiled_is_fastest), switch))
    handles = [ops.prepare_linear(torch.ones(3000, 1000)) for _ in range(2)]
    ops.tune(handles)
    whole = [weight for weight in packed if weight.shape[0] == 3000]  # samples are measured
    assert [w.data_ptr() for w in whole] == [handle.weight_NK.data_ptr() for handle in handles]


def test_the_choice_is_logged_in_one_line_and_explained_in_a_table(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    ops = CpuOps(
        selection(FakeStopwatch(lambda name, rows: 1e-5 * (2 - (name == "tiled") * (rows > 8))))
    )
    ops.tune([ops.prepare_linear(WEIGHT)])
    (line,) = (r.getMessage() for r in caplog.records)
    assert "1 of 1 shapes measured" in line
    assert "24x32 float32: plain from 1, tiled from 9 rows" in line
    table = [row.split() for row in ops.explain().splitlines()]
    assert table[1:3] == [
        ["24x32", "float32", "1", "plain", "20"],
        ["24x32", "float32", "2", "plain", "20"],
    ]
    assert table[-1] == ["24x32", "float32", "256+", "tiled", "10"]


def test_choices_by_rule_are_explained_without_times() -> None:
    ops = CpuOps(selection(FakeStopwatch(tiled_is_fastest), "0"))
    ops.tune([ops.prepare_linear(WEIGHT)])
    assert ops.explain().splitlines()[1].split()[-3:] == ["native-a", "not", "measured"]


# ---- a choice between two ways of something else than a weight


def two_ways(stopwatch: Stopwatch) -> tuple[list[list[float]], list[list[float]]]:
    """The plain way is faster from 64 rows on."""
    plain = [[1.0 if rows >= 64 else 3.0] * 3 for rows in BUCKETS]
    return plain, [[2.0] * 3 for _ in BUCKETS]


def never(stopwatch: Stopwatch) -> tuple[list[list[float]], list[list[float]]]:
    raise AssertionError("measured again")


def test_the_faster_of_two_ways_is_chosen_for_each_bucket_and_kept() -> None:
    choice = selection(FakeStopwatch(tiled_is_fastest)).choose_for("experts", two_ways)
    expected = ["plain" if rows >= 64 else "native-a" for rows in BUCKETS]
    assert [*choice.products] == expected
    later = selection(FakeStopwatch(tiled_is_fastest))
    assert [*later.choose_for("experts", never).products] == expected
    assert "experts" in later.explain()


@pytest.mark.parametrize(
    ("switch", "name"),
    [("0", "native-a"), ("native", "native-a"), ("native-b", "native-a"), ("onednn", "plain")],
)
def test_a_way_that_is_forced_or_ruled_is_not_measured(switch: str, name: str) -> None:
    choice = selection(FakeStopwatch(tiled_is_fastest), switch).choose_for("experts", never)
    assert {*choice.products} == {name}
