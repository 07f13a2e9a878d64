"""ProductRule: the product that it chooses for each weight and number of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout import SamplingParams
from rollout.backends.cpu.kernels import AMX, DOT
from rollout.backends.cpu.linear_ops import CpuOps
from rollout.backends.cpu.products import (
    BUCKETS,
    PLAIN,
    LinearHandle,
    NativeProduct,
    OneDnnProduct,
    Product,
    ProductRule,
    bucket_of,
)
from rollout.errors import ConfigError
from tests.contracts.implementations import kernels
from tests.tiny_models import drain, tiny_engine, tiny_model

WEIGHT = torch.arange(24 * 32.0).view(24, 32) / 100
ROWS = (1, 4, 5, 8, 9, 16, 128, 129, 512)
NO_KERNELS: Any = None  # products that are chosen but never called


def machine(*units: int, lanes: tuple[int, ...] = (16, 8)) -> list[Product]:
    """Return the products of a processor with these vector widths and units (DOT, AMX)."""
    vectors = [NativeProduct(NO_KERNELS, number) for number in lanes]
    return [PLAIN, OneDnnProduct(), *vectors, *(NativeProduct(NO_KERNELS, 16, u) for u in units)]


def names(rule: ProductRule, dtype: torch.dtype, rows: tuple[int, ...] = ROWS) -> list[str]:
    products = rule.products_for(WEIGHT.to(dtype))
    return [products[bucket_of(number)].name for number in rows]


class PackedProduct(Product):
    """A product whose packed copy is a clone of the weight."""

    name = kind = layout = "tiled"

    def __init__(self) -> None:
        self.packed: list[Tensor] = []

    def pack(self, parts: Sequence[Tensor], allocate: Callable[[int], Tensor]) -> Tensor:
        self.packed += parts
        return torch.cat([*parts])

    def __call__(self, x_TK: Tensor, handle: LinearHandle) -> Tensor:
        assert handle.packed is not None
        return x_TK @ handle.packed.T


def test_a_bucket_holds_the_rows_up_to_its_own_number() -> None:
    rows = (1, 2, 3, 4, 5, 8, 9, 64, 65, 128, 129, 256, 257, 5000)
    held_by = [BUCKETS[bucket_of(number)] for number in rows]
    assert held_by == [1, 2, 4, 4, 8, 8, 16, 64, 128, 128, 256, 256, 256, 256]


@pytest.mark.parametrize("units", [(), (DOT,), (DOT, AMX)])
def test_the_rule_takes_the_widest_vectors_for_float32(units: tuple[int, ...]) -> None:
    rule = ProductRule(machine(*units))
    assert {*names(rule, torch.float32)} == {"native-512"}
    assert {*names(ProductRule(machine(lanes=(8,))), torch.float32)} == {"native-256"}


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ((), ["native-512"] * 9),
        ((DOT,), ["native-512"] * 2 + ["native-dot"] * 7),
        ((DOT, AMX), ["native-512"] * 2 + ["native-dot"] * 2 + ["native-amx"] * 5),
        ((AMX,), ["native-512"] * 4 + ["native-amx"] * 5),
    ],
)
def test_the_rule_takes_units_of_pairs_for_more_rows_in_bfloat16(
    units: tuple[int, ...], expected: list[str]
) -> None:
    assert names(ProductRule(machine(*units)), torch.bfloat16) == expected
    without = ProductRule(machine(*units), "0")
    assert {*names(without, torch.bfloat16)} == {"native-512"}


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        ([PLAIN, OneDnnProduct()], ["onednn"] * 7 + ["plain"] * 2),
        ([PLAIN], ["plain"] * 9),
    ],
)
def test_without_kernels_the_rule_takes_onednn_for_few_rows(
    candidates: list[Product], expected: list[str]
) -> None:
    assert names(ProductRule(candidates), torch.float32) == expected


@pytest.mark.parametrize(
    ("switch", "expected"),
    [("plain", "plain"), ("native", "native-512"), ("native-256", "native-256")],
)
def test_rollout_tune_forces_a_product_by_its_name_or_its_kind(switch: str, expected: str) -> None:
    rule = ProductRule(machine(DOT), switch)
    assert {*names(rule, torch.bfloat16)} == {expected}


def test_rollout_tune_that_does_not_suit_a_weight_leaves_it_to_torch() -> None:
    assert {*names(ProductRule(machine(DOT), "native-dot"), torch.float32)} == {"plain"}


def test_rollout_tune_that_names_no_product_is_refused_with_the_legal_ones() -> None:
    with pytest.raises(ConfigError, match=r"ROLLOUT_TUNE='openvino'.*'onednn'"):
        ProductRule(machine(), "openvino")


@pytest.mark.parametrize(
    ("units", "switch", "dtype", "expected"),
    [
        ((), "1", torch.bfloat16, [True, True]),
        ((DOT,), "1", torch.bfloat16, [True, False]),
        ((DOT,), "1", torch.float32, [True, True]),
        ((DOT,), "0", torch.bfloat16, [True, True]),
        ((DOT,), "native", torch.bfloat16, [True, True]),
        ((), "plain", torch.float32, [False, False]),
    ],
)
def test_torch_takes_experts_with_many_tokens_where_it_has_units_of_pairs(
    units: tuple[int, ...], switch: str, dtype: torch.dtype, expected: list[bool]
) -> None:
    rule = ProductRule(machine(*units), switch)
    assert [rule.experts_by_kernel(dtype, number) for number in (16, 17)] == expected


def test_linear_handle_is_plain_until_choose_products_and_then_follows_its_weight() -> None:
    product = PackedProduct()
    ops = CpuOps(ProductRule([PLAIN, product], "tiled"))
    weight, x = WEIGHT.clone(), torch.ones(3, 32)
    handles = [ops.prepare_linear(weight), ops.prepare_linear(torch.ones(30, 10))]
    handle = handles[0]
    assert ops.packed(handle) is None
    torch.testing.assert_close(ops.linear(x, handle), x @ weight.T)
    ops.choose_products(handles)
    assert [w.data_ptr() for w in product.packed] == [h.weight_NK.data_ptr() for h in handles]
    torch.testing.assert_close(ops.linear(x, handle), x @ weight.T)
    weight.mul_(2)
    ops.refresh(handle)
    torch.testing.assert_close(ops.linear(x, handle), x @ weight.T)


def test_the_products_are_logged_in_one_line_and_explained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    ops = CpuOps(ProductRule([PLAIN, OneDnnProduct()]))
    ops.choose_products([ops.prepare_linear(WEIGHT)])
    line = "24x32 float32: onednn from 1, plain from 129 rows"
    assert ops.explain() == line
    assert [record.getMessage() for record in caplog.records] == [f"products: {line}"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_rule_runs_every_pass_of_a_model_in_one_call(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels()  # skips without a compiler
    monkeypatch.delenv("ROLLOUT_TUNE")
    engine = tiny_engine(tiny_model("qwen3"), dtype=dtype, num_threads=1)
    decoder: Any = engine.build.model.fused
    assert decoder.explain() == "for any number of rows"
    ran = []
    run = decoder.run
    monkeypatch.setattr(decoder, "run", lambda *given: ran.append(run(*given)) or ran[-1])
    for row in range(9):
        engine.add_request([1 + row, 2, 3], SamplingParams(num_tokens_to_generate=3))
    drain(engine)
    assert ran
    assert all(result is not None for result in ran)
