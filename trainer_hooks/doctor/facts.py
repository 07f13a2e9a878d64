"""Finds faults of a batch in its masks, token ids, prompts, end tokens and improbable draws.

Used by `trainer_hooks.doctor.diagnosis`. No function changes the batch.

Shape letters: B rows, T positions, N tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.errors import ConfigError
from trainer_hooks.collate import RolloutBatch, reshaping_text
from trainer_hooks.doctor.reference import Reference
from trainer_hooks.doctor.sampling_causes import (
    RESHAPING_REMEDY,
    declared_params,
    kept_log_mass,
    level_text,
    reshaping_name,
    truncation_levels,
)
from trainer_hooks.doctor.tokens import ExaminedTokens, Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A fault of the batch, with its evidence and remedy, in `num_rows` rows.

    `hides_logprobs`: True if the fault makes it useless to examine the log-probs.
    """

    name: str
    evidence: str
    remedy: str
    num_rows: int
    hides_logprobs: bool = False


def facts_of(
    batch: RolloutBatch,
    turns: Sequence[Turns] | None,
    prompt_ids: Sequence[Sequence[int]] | None,
    end_ids: Sequence[int],
) -> Iterator[Fact]:
    """Yield faults of the batch's masks and tokens.

    `turns`: each row's requests, to compare with. None skips this.
    `prompt_ids`: the trainer's own prompts, to compare with. None skips this.
    """
    yield from wrong_ends(batch, end_ids)
    others = [] if turns is None else list(other_tokens(batch, turns))
    yield from others
    # If the requests have other tokens, they cannot show where the batch's were generated.
    yield from shifted_masks(batch, None if others else turns)
    if prompt_ids is not None:
        yield from template_drift(batch, prompt_ids)


def check_ids(batch: RolloutBatch, vocab_size: int) -> None:
    """Raise ConfigError for a token id outside the vocabulary of the trainer's model."""
    lowest, highest = map(int, batch.tokens_BT[batch.attention_mask_BT].aminmax())
    for token in (lowest, highest):
        if not 0 <= token < vocab_size:
            raise ConfigError(
                f"token id {token} is outside the model's vocabulary of {vocab_size}; give engine "
                "and trainer the same checkpoint and tokenizer"
            )


def shifted_masks(batch: RolloutBatch, turns: Sequence[Turns] | None) -> Iterator[Fact]:
    """Yield a fact if the masks of trained rows do not cover exactly the generated tokens."""
    wanted_BT = _generated(batch, turns)
    differs_B = (batch.mask_BT != wanted_BT).any(1) & batch.mask_BT.any(1)
    if not bool(differs_B.any()):
        return
    shifts = [
        shift
        for shift in (-1, 1)
        if torch.equal(batch.mask_BT[differs_B], wanted_BT.roll(shift, dims=1)[differs_B])
    ]
    row = int(differs_B.nonzero()[0])
    own, wanted = (int(mask.nonzero()[0]) for mask in (batch.mask_BT[row], wanted_BT[row]))
    how = "one column too early" if shifts == [-1] else "one column too late"
    yield Fact(
        name="shifted_mask",
        hides_logprobs=True,
        num_rows=int(differs_B.sum()),
        evidence=(
            f"the mask is not on the generated tokens{f' but {how}' if shifts else ''}: in row "
            f"{row} it has {int(batch.mask_BT[row].sum())} tokens from column {own}, generated are "
            f"{int(wanted_BT[row].sum())} from column {wanted}"
        ),
        remedy="use mask_BT of collate_rollouts: column t is on where token t was generated",
    )


def wrong_ends(batch: RolloutBatch, end_ids: Sequence[int]) -> Iterator[Fact]:
    """Yield a fact if a trained token directly follows a trained end token."""
    if not end_ids:
        return
    is_end_BT = torch.isin(batch.tokens_BT, torch.tensor(list(end_ids))) & batch.mask_BT
    goes_on_B = (is_end_BT[:, :-1] & batch.mask_BT[:, 1:]).any(1)
    if bool(goes_on_B.any()):
        yield Fact(
            name="end_token",
            num_rows=int(goes_on_B.sum()),
            evidence=(
                f"tokens after an end token ({', '.join(map(str, end_ids))}) are trained on, "
                f"first in row {int(goes_on_B.nonzero()[0])}"
            ),
            remedy=(
                "give the engine the trainer's end token (SamplingParams.termination_id, "
                "stop_token_ids), or set ignore_eos=False"
            ),
        )


def other_tokens(batch: RolloutBatch, turns: Sequence[Turns]) -> Iterator[Fact]:
    """Yield a fact for prompts that differ from the engine's, and one for differing completions."""
    found: dict[str, list[str]] = {"template_drift": [], "retokenised": []}
    for row, own in enumerate(turns):
        last = own[-1]
        engine = [*last.prompt_tokens.tolist(), *last.generated_tokens]
        tokens = batch.tokens_BT[row, : int(batch.lengths_B[row])].tolist()
        if tokens != engine:
            position = _first_difference(tokens, engine)
            is_prompt = position < len(own[0].prompt_tokens)
            found["template_drift" if is_prompt else "retokenised"].append(
                f"row {row}, position {position}: the batch has {_at(tokens, position)}, the "
                f"engine had {_at(engine, position)}"
            )
    if found["template_drift"]:
        yield _drift(found["template_drift"], hides_logprobs=True)
    if found["retokenised"]:
        yield Fact(
            name="retokenised",
            hides_logprobs=True,
            num_rows=len(found["retokenised"]),
            evidence=f"completions are not the sampled tokens: {found['retokenised'][0]}",
            remedy="train on the ids of the requests; never decode and encode completions",
        )


def template_drift(batch: RolloutBatch, prompt_ids: Sequence[Sequence[int]]) -> Iterator[Fact]:
    """Yield a fact if the trainer renders prompts differently."""
    found = []
    for row, wanted in enumerate(prompt_ids):
        own = batch.tokens_BT[row, : int(batch.prompt_lengths_B[row])].tolist()
        if own != list(wanted):
            position = _first_difference(own, wanted)
            found.append(
                f"row {row}, position {position}: the engine had {_at(own, position)}, the trainer "
                f"renders {_at(wanted, position)}"
            )
    if found:
        yield _drift(found)


def _drift(found: Sequence[str], hides_logprobs: bool = False) -> Fact:
    return Fact(
        name="template_drift",
        hides_logprobs=hides_logprobs,
        num_rows=len(found),
        evidence=f"prompts differ between engine and trainer: {found[0]}",
        remedy=(
            "render prompts once, with one tokenizer, template and its options, and pass token ids "
            "to the engine"
        ),
    )


def _generated(batch: RolloutBatch, turns: Sequence[Turns] | None) -> Tensor:
    """Return where tokens were generated, bool [B, T]."""
    # Without requests the batch's lengths decide. For a row of several turns they give only the
    # first generated column, and the mask gives the later ones.
    columns = torch.arange(batch.tokens_BT.shape[1])
    starts_B1 = batch.prompt_lengths_B[:, None]
    if turns is None:
        is_inside_BT = (columns >= starts_B1) & (columns < batch.lengths_B[:, None])
        is_one_turn_B = batch.prompt_lengths_B + batch.completion_lengths_B == batch.lengths_B
        later_BT = batch.mask_BT & (columns > starts_B1)
        several_BT = later_BT | (columns == starts_B1)
        return torch.where(is_one_turn_B[:, None], is_inside_BT, several_BT)
    wanted_BT = torch.zeros_like(batch.mask_BT)
    for row, own in enumerate(turns):
        for turn in own:
            wanted_BT[row, len(turn.prompt_tokens) : turn.num_tokens] = True
    return wanted_BT


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    equal = min(len(left), len(right))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), equal)


def _at(tokens: Sequence[int], position: int) -> str:
    return f"token {tokens[position]}" if position < len(tokens) else "its end"


# The probability that a test of the draws reports a sound batch. One in a million is rare even in
# a run of many batches. Each test divides the probability among the alternatives that it tries.
FALSE_ALARM = 1e-6
# `unlikely_draws` compares p with p^k for these k: flatter below 1, sharper above.
_POWERS = (0.2, 0.5, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0)


def draw_facts(tokens: ExaminedTokens, reference: Reference) -> Iterator[Fact]:
    """Yield a fact if tokens were drawn from a distribution that their log-probs do not describe.

    The declared sampling parameters can show it. If they do not, the drawn tokens are tested.
    """
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
    """Yield a fact if the drawn tokens show an undeclared truncation.

    Some truncation then keeps all drawn tokens, although the probability of such draws without
    truncation, prod(kept mass), is below FALSE_ALARM.
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
    """Yield a fact if a flatter or sharper distribution explains the drawn tokens much better.

    The test is the ratio of two likelihoods of the draws: by p^k / sum p^k and by p. The ratio's
    mean under p is 1 in any context, and so is the mean of its average over `_POWERS`. By Markov's
    inequality the average exceeds 1 / FALSE_ALARM with a probability of at most FALSE_ALARM, for
    any p and any number of tokens.
    """
    # A normal approximation would be wrong by orders of magnitude for a policy that is nearly sure
    # of each token.
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
                "check the sampler for another temperature, truncation, penalties or biases, and "
                "for a filter on rollouts by their length or text. " + RESHAPING_REMEDY
            ),
        )
