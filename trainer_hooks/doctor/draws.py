"""Whether the tokens are draws from the distribution that their log-probs speak of.

Log-probs of mode `temperature` agree with the trainer's however the token was drawn; so truncation,
penalties and biases show only in which tokens came. Shape letters: N tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from trainer_hooks.collate import reshaping_text
from trainer_hooks.doctor.facts import Fact
from trainer_hooks.doctor.reference import Reference
from trainer_hooks.doctor.sampling_causes import (
    RESHAPING_REMEDY,
    declared_params,
    kept_log_mass,
    level_text,
    reshaping_name,
    truncation_levels,
)
from trainer_hooks.doctor.tokens import ExaminedTokens

# The chance that a sound batch is called unsound by a test of its draws. One in a million, below
# what a run of many batches meets; each test shares it among the alternatives that it tries.
FALSE_ALARM = 1e-6
# The powers of the honest distribution that `unlikely_draws` compares it with: flatter and sharper.
_POWERS = (0.2, 0.5, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0)


def draw_facts(tokens: ExaminedTokens, reference: Reference) -> Iterator[Fact]:
    """Declared reshaping of the draws, and what the drawn tokens show of an undeclared one."""
    declared = [params for params in declared_params(tokens) if reshaping_text(params)]
    if declared:
        yield Fact(
            name=reshaping_name(declared[0]),
            num_rows=len(tokens.rows),
            evidence=(
                f"tokens were drawn with {reshaping_text(declared[0])}, and the log-probs are "
                "those without it"
            ),
            remedy=RESHAPING_REMEDY,
        )
    else:
        truncated = list(undeclared_truncation(tokens, reference))
        yield from truncated or unlikely_draws(tokens, reference)


def undeclared_truncation(tokens: ExaminedTokens, reference: Reference) -> Iterator[Fact]:
    """No token was drawn that some truncation would drop, although that was to be expected.

    Were draws honest, all N would fall into the kept tokens with probability prod(mass).
    """
    known = reference.is_known_N
    levels = truncation_levels(reference.logits_NV.shape[1])
    best, best_level = 0.0, levels[0]
    for level in levels:
        log_mass_N = kept_log_mass(tokens, reference, *level)[known]
        if not bool(log_mass_N.isnan().any()) and float(log_mass_N.sum()) < best:
            best, best_level = float(log_mass_N.sum()), level
    if best + math.log(len(levels)) < math.log(FALSE_ALARM):
        yield Fact(
            name="truncation",
            num_rows=len(tokens.rows),
            evidence=(
                f"no token was drawn outside {level_text(*best_level)}, which honest draws would "
                f"do with a probability of e^{best:.0f}; the log-probs are those without it"
            ),
            remedy=RESHAPING_REMEDY,
        )


def unlikely_draws(tokens: ExaminedTokens, reference: Reference) -> Iterator[Fact]:
    """The drawn tokens are much likelier as draws from a flatter or sharper distribution.

    The likelihood of draws from p^k / sum p^k over that of draws from p has the mean 1 under p, for
    any context, and so has its average over `_POWERS`. Above 1 / FALSE_ALARM it is seen with a
    probability of at most FALSE_ALARM, however few the tokens and however peaked p: Markov's
    inequality. A normal approximation is wrong by orders of magnitude for the draws of a policy
    that is nearly sure of each token.
    """
    known = reference.is_known_N
    log_p_NV = (reference.logits_NV[known] / reference.temperature).log_softmax(1).clamp(min=-1e4)
    drawn_N = log_p_NV.gather(1, tokens.id_N[known][:, None]).squeeze(1)
    log_ratios = torch.tensor(
        [
            float(((k - 1.0) * drawn_N - (k * log_p_NV).logsumexp(1)).double().sum())
            for k in _POWERS
        ],
        dtype=torch.float64,
    )
    log_evidence = float(log_ratios.logsumexp(0)) - math.log(len(_POWERS))
    if log_evidence > -math.log(FALSE_ALARM):
        word = "more" if _POWERS[int(log_ratios.argmax())] > 1.0 else "less"
        yield Fact(
            name="draws",
            num_rows=len(tokens.rows),
            evidence=(
                f"the drawn tokens are {word} probable than draws from their own log-probs, which "
                f"are e^{log_evidence:.0f} times less likely to give {int(known.sum())} such tokens"
            ),
            remedy=(
                "look for another temperature, truncation, penalties or biases in the sampler, or "
                "for a filter on rollouts by their length or text. " + RESHAPING_REMEDY
            ),
        )
