"""Every implementation gives the same result on several threads as on one, up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.contracts.attention_cases import Row, attend, make_batch, make_cache, make_spec
from tests.contracts.implementations import ATTENTION, OPS
from tests.contracts.sampling_oracle import Draw, batch_of

NUM_THREADS = 3


@pytest.fixture(autouse=True)
def _threads_kept() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def assert_same_on_threads(compute: Callable[[], Tensor]) -> None:
    torch.set_num_threads(1)
    alone = compute()
    torch.set_num_threads(NUM_THREADS)
    torch.testing.assert_close(compute(), alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", OPS)
def test_sampling_is_the_same_on_several_threads(name: str) -> None:
    count = 6 if name == "triton" else 40  # interpreted kernels are slow
    logits = torch.randn(count, 1000, generator=torch.Generator().manual_seed(0)) * 3
    rows = [Draw(uniform=i / count, top_k=i % 3, top_p=0.9 * (i % 2)) for i in range(count)]
    ops = OPS[name]()
    assert_same_on_threads(lambda: ops.sample(logits, batch_of(rows)).token_ids_S)
    assert_same_on_threads(lambda: ops.score(logits, torch.arange(count), 0).logprobs_P)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_the_same_on_several_threads(name: str) -> None:
    attention = ATTENTION[name]()
    generator = torch.Generator().manual_seed(0)
    rows = [
        Row(num_cached=17 + i % 15, num_new=1, blocks=(2 * i + 1, 2 * i + 2)) for i in range(30)
    ]
    rows += [Row(num_cached=0, num_new=33, blocks=(91, 95, 93))]
    kv = make_cache(attention, make_spec(), 100)
    kv[0].normal_(generator=generator)
    q = torch.randn(63, 4, 16, generator=generator)
    k, v = torch.randn(2, 63, 2, 16, generator=generator)
    assert_same_on_threads(lambda: attend(attention, q, k, v, make_batch(rows, kv, 16)))
