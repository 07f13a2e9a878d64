"""Hypotheses that log-probs have another temperature, truncation, penalties or biases.

Used by `trainer_hooks.doctor.diagnosis`, and by `trainer_hooks.doctor.facts` to find truncation in
the drawn tokens.

Shape letters: N tokens, V vocabulary, H tokens of the longest history.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rollout.backends.ops.truncation import keep_mask
from rollout.sampling_params import SamplingParams
from trainer_hooks.collate import RolloutBatch, reshaping_text
from trainer_hooks.doctor.forward import chosen_logprobs
from trainer_hooks.doctor.hypotheses import Case, Hypothesis
from trainer_hooks.doctor.reference import Reference
from trainer_hooks.doctor.tokens import ExaminedTokens

_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
TOP_P_LEVELS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99)
TOP_K_LEVELS = (1, 2, 4, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100, 128)
MIN_P_LEVELS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
RESHAPING_REMEDY = (
    "sample without truncation, penalties and biases; or with logprobs_mode='processed', give the "
    "loss proximal log-probs, and pass logprobs_mode='processed' to the doctor"
)


def temperature_causes(case: Case) -> Iterator[Hypothesis]:
    """Yield the hypothesis that the log-probs have another temperature, the best fit in [0.1, 10].

    A fit of 1 suggests that the engine ran with logprobs_mode="raw".
    """
    tokens, reference = case.tokens, case.reference

    def squared_gap(temperature: float) -> float:
        predicted_N = chosen_logprobs(reference.logits_NV, tokens.id_N, temperature)
        return float((case.claimed_N - predicted_N)[reference.is_known_N].square().sum())

    fitted = minimize(squared_gap, 0.1, 10.0)
    yield Hypothesis(
        name="temperature",
        kind="fit",
        predicted_N=chosen_logprobs(reference.logits_NV, tokens.id_N, fitted),
        evidence=(
            f"the {case.side}'s log-probs are those at temperature {fitted:.4g}, not "
            f"{reference.temperature:g}"
        ),
        remedy=(
            "sample with logprobs_mode='temperature' and the temperature by which the trainer "
            "divides its logits (token_logprobs(..., temperature=))"
        ),
    )


def declared_causes(case: Case) -> Iterator[Hypothesis]:
    """Yield the hypothesis that the log-probs include the reshaping that requests declare, if any.

    Reshaping is truncation, penalties and biases, as with logprobs_mode="processed".
    """
    declared = [params for params in declared_params(case.tokens) if reshaping_text(params)]
    if declared:
        yield Hypothesis(
            name=reshaping_name(declared[0]),
            predicted_N=processed_logprobs(case.tokens, case.reference, case.batch, case.end_ids),
            evidence=(
                f"the log-probs are those after {reshaping_text(declared[0])} "
                "(logprobs_mode='processed'), the trainer's are those of the logits"
            ),
            remedy=RESHAPING_REMEDY,
        )


def truncation_causes(case: Case) -> Iterator[Hypothesis]:
    """Yield the hypothesis of an undeclared truncation, the best fit of `truncation_levels`."""
    known = case.reference.is_known_N
    # Truncation only raises log-probs. If they are not higher, the search is skipped.
    if float((case.gap_N > -case.tolerance.largest).double().mean()) < 0.99:
        return
    vocabulary = case.reference.logits_NV.shape[1]
    best, best_left, best_level = None, math.inf, (0, 0.0, 0.0)
    for level in truncation_levels(vocabulary):
        predicted_N = case.reference.stamped_N - kept_log_mass(case.tokens, case.reference, *level)
        left = float((case.claimed_N - predicted_N)[known].square().sum())
        if left < best_left:
            best, best_left, best_level = predicted_N, left, level
    if best is not None:
        yield Hypothesis(
            name="truncation",
            kind="fit",
            predicted_N=best,
            evidence=(
                f"the log-probs are renormalised over what {level_text(*best_level)} leaves, the "
                "trainer's are over the whole vocabulary"
            ),
            remedy=RESHAPING_REMEDY,
        )


def truncation_levels(vocabulary: int) -> list[tuple[int, float, float]]:
    """Return usual settings (top_k, top_p, min_p). One value is set, and two are 0 (off)."""
    return [
        *((k, 0.0, 0.0) for k in TOP_K_LEVELS if k < vocabulary),
        *((0, p, 0.0) for p in TOP_P_LEVELS),
        *((0, 0.0, p) for p in MIN_P_LEVELS),
    ]


def processed_logprobs(
    tokens: ExaminedTokens, reference: Reference, batch: RolloutBatch, end_ids: Sequence[int]
) -> Tensor:
    """Return the reference's log-probs after the declared reshaping, float64 [N].

    Reshaping is truncation, penalties, biases and `min_tokens`. Tokens with unknown sampling
    parameters are unchanged. `end_ids`: end tokens of requests that name none themselves.
    """
    history = histories_of(tokens, batch.prompt_lengths_B)
    own: dict[SamplingParams, list[int]] = {}
    for index in range(len(tokens)):
        params = tokens.params_of(index)
        if params is not None and reshaping_text(params):
            own.setdefault(params, []).append(index)
    logprobs_N, temperature = reference.stamped_N.clone(), reference.temperature
    for params, indices in own.items():
        logits_NV = penalized_logits(reference.logits_NV[indices], history.select(indices), params)
        if params.min_tokens:
            is_early_N = [tokens.num_generated_before(i) < params.min_tokens for i in indices]
            logits_NV = without_ends(logits_NV, torch.tensor(is_early_N), params, end_ids)
        level = params.top_k, params.top_p, params.min_p
        kept_NV = kept_tokens(logits_NV, temperature, *level)
        logits_NV = logits_NV.masked_fill(~kept_NV, -torch.inf)
        logprobs_N[indices] = chosen_logprobs(logits_NV, tokens.id_N[indices], temperature)
    return logprobs_N


def without_ends(
    logits_NV: Tensor, is_early_N: Tensor, params: SamplingParams, end_ids: Sequence[int]
) -> Tensor:
    """Return logits without the request's end tokens where `is_early_N` is True.

    `is_early_N`: True where `min_tokens` forbids end tokens.
    """
    ends = set(params.stop_token_ids or ())
    if not params.ignore_eos:
        ends.update(end_ids if params.termination_id is None else [params.termination_id])
    is_end_V = torch.zeros(logits_NV.shape[1], dtype=torch.bool)
    is_end_V[[token_id for token_id in ends if 0 <= token_id < len(is_end_V)]] = True
    return logits_NV.masked_fill(is_early_N[:, None] & is_end_V, -torch.inf)


def penalized_logits(logits_NV: Tensor, history: Histories, params: SamplingParams) -> Tensor:
    """Return logits [N, V] after allowed ids, biases and penalties, in the engine's order."""
    if params.allowed_token_ids is not None:
        is_allowed_V = torch.zeros(logits_NV.shape[1], dtype=torch.bool)
        is_allowed_V[list(params.allowed_token_ids)] = True
        logits_NV = logits_NV.masked_fill(~is_allowed_V, -torch.inf)
    if params.logit_bias:
        ids, values = zip(*params.logit_bias, strict=True)
        biases = torch.tensor(values).expand(len(logits_NV), -1)
        logits_NV = logits_NV.index_add(1, torch.tensor(ids), biases)
    if not params.has_penalties:
        return logits_NV
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    old_NH = logits_NV.gather(1, history.id_NH)
    change_NH = (history.penalized(old_NH, *penalties) - old_NH).nan_to_num(nan=0.0)
    return logits_NV.scatter_add(1, history.id_NH, change_NH * history.is_first_NH)


def kept_log_mass(
    tokens: ExaminedTokens, reference: Reference, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """Return the log of the total probability of the kept tokens, float64 [N].

    NaN where truncation drops the drawn token itself.
    """
    kept_NV = kept_tokens(reference.logits_NV, reference.temperature, top_k, top_p, min_p)
    log_p_NV = (reference.logits_NV / reference.temperature).log_softmax(1)
    mass_N = log_p_NV.masked_fill(~kept_NV, -torch.inf).logsumexp(1).double()
    is_kept_N = kept_NV.gather(1, tokens.id_N[:, None]).squeeze(1)
    return mass_N.masked_fill(~is_kept_N, math.nan)


def kept_tokens(
    logits_NV: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """Return which tokens the engine's truncation keeps, bool [N, V]."""
    num = len(logits_NV)
    weights_NV = ((logits_NV - logits_NV.amax(1, keepdim=True)) / temperature).exp()
    return keep_mask(
        logits_NV,
        weights_NV,
        torch.full((num,), 1.0 / temperature),
        torch.full((num,), top_k),
        torch.full((num,), top_p),
        torch.full((num,), min_p),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Histories:
    """The ids `id_NH` that precede each drawn token in its row, padded with 0.

    `is_first_NH`: True at the first occurrence of an id in the row.
    `num_outputs_NH`: number of times that the id occurs in the output before the drawn token.
    """

    id_NH: Tensor
    is_first_NH: Tensor
    num_outputs_NH: Tensor

    def select(self, indices: list[int]) -> Histories:
        """Return the histories of the drawn tokens at `indices`."""
        return Histories(
            self.id_NH[indices], self.is_first_NH[indices], self.num_outputs_NH[indices]
        )

    def penalized(
        self, logits_NH: Tensor, repetition: float, presence: float, frequency: float
    ) -> Tensor:
        """Return the logits [N, H] of the history's ids after the penalties."""
        new_NH = torch.where(logits_NH > 0.0, logits_NH / repetition, logits_NH * repetition)
        return new_NH - frequency * self.num_outputs_NH - presence * (self.num_outputs_NH > 0)


def histories_of(tokens: ExaminedTokens, num_prompt_B: Tensor) -> Histories:
    """Return each token's history, which is all earlier tokens of its row.

    The output starts after the prompt of the token's turn, or after the first prompt of the row if
    the turn is unknown. `num_prompt_B`: length of that first prompt.
    """
    ids, firsts, counts = [], [], []
    for row, tokens_T in enumerate(tokens.rows):
        kinds, kind_T = tokens_T.unique(return_inverse=True)
        places_T = torch.arange(len(tokens_T))
        first_of_kind = torch.full_like(kinds, len(tokens_T))
        first_of_kind = first_of_kind.scatter_reduce(0, kind_T, places_T, "amin")
        is_first_T = first_of_kind[kind_T] == places_T
        for index in (tokens.row_N == row).nonzero().flatten().tolist():
            column, turn = int(tokens.column_N[index]), tokens.turn_of(index)
            start = int(num_prompt_B[row]) if turn is None else len(turn.prompt_tokens)
            count_of_kind = kind_T[start:column].bincount(minlength=len(kinds))
            ids.append(tokens_T[:column])
            firsts.append(is_first_T[:column])
            counts.append(count_of_kind[kind_T[:column]])
    return Histories(*(pad_sequence(part, batch_first=True) for part in (ids, firsts, counts)))


def penalty_causes(case: Case) -> Iterator[Hypothesis]:
    """Yield a hypothesis for each kind of penalty, undeclared, with the value that fits best."""
    history = histories_of(case.tokens, case.batch.prompt_lengths_B)
    known = case.reference.is_known_N
    ranges = {
        "repetition_penalty": (0.5, 2.0),
        "presence_penalty": (-2.0, 2.0),
        "frequency_penalty": (-2.0, 2.0),
    }
    for name, (low, high) in ranges.items():

        def predicted(value: float, name: str = name) -> Tensor:
            return penalized_logprobs(case, history, **{name: value})

        def squared_gap(value: float, predicted: Callable[[float], Tensor] = predicted) -> float:
            return float((case.claimed_N - predicted(value))[known].square().sum())

        value = minimize(squared_gap, low, high, in_logarithms=low > 0.0)
        yield Hypothesis(
            name="penalties",
            kind="fit",
            predicted_N=predicted(value),
            evidence=f"the log-probs are those after {name}={value:.3g}, which no request declares",
            remedy=RESHAPING_REMEDY,
        )


def penalized_logprobs(
    case: Case,
    history: Histories,
    *,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
) -> Tensor:
    """Return the reference's log-probs after penalties, float64 [N]."""
    logits_NV, id_N1 = case.reference.logits_NV, case.tokens.id_N[:, None]
    temperature = case.reference.temperature
    old_NH = logits_NV.gather(1, history.id_NH).double()
    new_NH = history.penalized(old_NH, repetition_penalty, presence_penalty, frequency_penalty)
    new_NH = torch.where(history.is_first_NH, new_NH, old_NH)
    # Penalties change only logits of ids in the history, and the normaliser by these.
    norm_N1 = (logits_NV / temperature).logsumexp(1, keepdim=True).double()
    change_NH = (new_NH / temperature - norm_N1).exp() - (old_NH / temperature - norm_N1).exp()
    mass_N = (1.0 + change_NH.sum(1)).clamp(min=1e-300)
    own_change_N = ((new_NH - old_NH) * (history.id_NH == id_N1)).sum(1)
    chosen_N = logits_NV.gather(1, id_N1).squeeze(1).double() + own_change_N
    return chosen_N / temperature - norm_N1.squeeze(1) - mass_N.log()


def minimize(
    function: Callable[[float], float], low: float, high: float, in_logarithms: bool = True
) -> float:
    """Return the argument in [low, high] with the least value, by a grid and golden-section search.

    `in_logarithms`: True searches on a logarithmic scale.
    """
    into, back = (math.log, math.exp) if in_logarithms else (float, float)
    start, end = into(low), into(high)
    grid = [start + (end - start) * i / 24 for i in range(25)]
    best = min(range(25), key=lambda i: function(back(grid[i])))
    start, end = grid[max(best - 1, 0)], grid[min(best + 1, 24)]
    for _ in range(30):
        inner, outer = end - _GOLDEN * (end - start), start + _GOLDEN * (end - start)
        if function(back(inner)) < function(back(outer)):
            end = outer
        else:
            start = inner
    return back((start + end) / 2.0)


def level_text(top_k: int, top_p: float, min_p: float) -> str:
    """Return the settings other than 0 as text, such as "top_p=0.9"."""
    levels = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    return ", ".join(f"{name}={value:.4g}" for name, value in levels.items() if value)


def reshaping_name(params: SamplingParams) -> str:
    """Return a finding's name: "truncation" if the settings truncate, else "penalties"."""
    truncates = params.top_k > 0 or 0.0 < params.top_p < 1.0 or params.min_p > 0.0
    return "truncation" if truncates else "penalties"


def declared_params(tokens: ExaminedTokens) -> list[SamplingParams]:
    """Return the known sampling parameters of the examined rows, without repeats."""
    turns = [turn for own in tokens.turns or () for turn in own]
    return list(dict.fromkeys(t.sampling_params for t in turns if t.sampling_params is not None))
