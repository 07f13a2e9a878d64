"""unlikely_draws reports honest draws as rarely as promised, and reports draws of another
distribution.
"""

from __future__ import annotations

import pytest
import torch

from trainer_hooks.doctor.facts import FALSE_ALARM, unlikely_draws
from trainer_hooks.doctor.reference import Reference
from trainer_hooks.doctor.tokens import ExaminedTokens


def names_of(id_N: list[int], p_V: list[float]) -> list[str]:
    """Return the names of the facts found if each of these ids was drawn from `p_V`."""
    ids, count = torch.tensor(id_N), len(id_N)
    zero_N = torch.zeros(count, dtype=torch.int64)
    logits_NV = torch.tensor(p_V).log().expand(count, -1)
    logprob_N = logits_NV.gather(1, ids[:, None]).squeeze(1).double()
    tokens = ExaminedTokens(
        rows=[torch.cat([zero_N[:1], ids])], turns=None, row_N=zero_N,
        column_N=torch.arange(1, count + 1), id_N=ids, version_N=zero_N,
        kv_version_N=zero_N.double(), behaviour_N=logprob_N, train_version=0,
    )  # fmt: skip
    reference = Reference(
        trainer_N=logprob_N, sampler_N=logprob_N, stamped_N=logprob_N,
        is_known_N=torch.ones(count, dtype=torch.bool), logits_NV=logits_NV, temperature=1.0,
    )  # fmt: skip
    return [fact.name for fact in unlikely_draws(tokens, reference)]


@pytest.mark.parametrize("num_tokens", [1, 3, 200])
@pytest.mark.parametrize("rare", [1e-2, 1e-4])
def test_unlikely_draws_reports_honest_draws_once_in_a_million(
    num_tokens: int, rare: float
) -> None:
    """With two tokens, the number of rare draws is binomial."""
    chances = torch.distributions.Binomial(num_tokens, torch.tensor(rare, dtype=torch.float64))
    alarm = 0.0
    for num_rare in range(min(num_tokens, 12) + 1):
        ids = [1] * num_rare + [0] * (num_tokens - num_rare)
        if names_of(ids, [1.0 - rare, rare]):
            alarm += float(chances.log_prob(torch.tensor(float(num_rare))).exp())
    assert alarm <= FALSE_ALARM


@pytest.mark.parametrize(("num_likely", "found"), [(100, []), (160, ["draws"]), (40, ["draws"])])
def test_unlikely_draws_reports_draws_at_another_temperature(
    num_likely: int, found: list[str]
) -> None:
    """Half of 200 draws should be the first token."""
    ids = [0] * num_likely + [1, 2] * ((200 - num_likely) // 2)
    assert names_of(ids, [0.5, 0.25, 0.25]) == found
