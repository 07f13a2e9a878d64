"""diagnose: explains the gap between the log-probs of trainer and engine, and suggests remedies.

Used by `trainer_hooks.doctor.command` and by users. `trainer_hooks.doctor.report` formats a
Diagnosis. `diagnose` checks facts of the batch, then tests hypotheses about the gap. `diagnose`
changes neither batch nor models.

Shape letters: B rows, T positions, N tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rollout.errors import ConfigError
from rollout.models.spec import union_of_ids
from rollout.requests import DynamicInferenceRequest
from trainer_hooks.collate import RolloutBatch, TrainedLogprobs
from trainer_hooks.doctor import alignment_causes as alignment
from trainer_hooks.doctor import sampling_causes as sampling
from trainer_hooks.doctor import weight_causes as weights
from trainer_hooks.doctor.facts import Fact, check_ids, draw_facts, facts_of
from trainer_hooks.doctor.forward import evaluation_copy, model_logits, model_logprobs
from trainer_hooks.doctor.hypotheses import (
    Case,
    Explanation,
    Hypothesis,
    Tolerance,
    explain,
    longest_sum_of,
    rank,
    rms_of,
    tolerance_of,
)
from trainer_hooks.doctor.reference import Reference, reference_of
from trainer_hooks.doctor.tokens import (
    ExaminedTokens,
    Turns,
    choose_rows,
    examined_tokens,
    turns_of_rows,
)
from trainer_hooks.doctor.weight_causes import places
from trainer_hooks.rollouts import Rollout

Verdict = Literal["sound", "fault", "inconclusive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault, with the side that has it, evidence and remedy.

    `share`: part of the squared gap that the fault explains, or None if it was not measured.
    `is_whole`: True if the fault explains the gap up to rounding.
    """

    name: str
    side: Literal["engine", "trainer", "batch"]
    share: float | None = None
    is_whole: bool = False
    evidence: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The result of `diagnose`. Gaps are in nats, as root mean squares over tokens.

    `attributions`: shares of the squared gap by cause.
    `explanations`: all tested hypotheses, the engine's before the trainer's, and the best first for
    each side.
    `num_known_tokens`: number of examined tokens whose reference log-prob is known.
    `gap_rms`: gap between the behaviour log-probs and the log-probs of the trainer's weights.
    `unexplained_rms`: gap between the behaviour log-probs and the log-probs of the weights and KV
    versions stamped on each token, over known tokens.
    Each table has one dictionary per row.
    `notes`: what limits the diagnosis.
    """

    verdict: Verdict
    findings: Sequence[Finding]
    attributions: Mapping[str, float]
    explanations: Sequence[Explanation]
    num_tokens: int
    num_known_tokens: int
    gap_rms: float
    unexplained_rms: float
    tolerance: Tolerance
    lag_table: Sequence[Mapping[str, Any]]
    place_table: Sequence[Mapping[str, Any]]
    token_table: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the whole diagnosis as a dictionary for json.dumps."""
        return asdict(self)


@torch.no_grad()
def diagnose(
    batch: RolloutBatch,
    model: nn.Module,
    sources: Sequence[DynamicInferenceRequest | Rollout] | None = None,
    *,
    older_models: Mapping[int, nn.Module] | None = None,
    temperature: float = 1.0,
    logprobs_mode: TrainedLogprobs = "temperature",
    trainer_logprobs_BT: Tensor | None = None,
    prompt_ids: Sequence[Sequence[int]] | None = None,
    end_ids: Sequence[int] = (),
    engine_dtype: torch.dtype | None = None,
    max_tokens: int = 2048,
) -> Diagnosis:
    """Recompute the log-probs of `batch` and explain their gap to the batch's own log-probs.

    `model`: a transformers causal LM with the weights of `batch.train_version`, in the mode (eval
    or train) in which the trainer computes log-probs. The model is copied and not changed.
    `sources`: all the rollouts from which `collate_rollouts` made the batch. The rollouts give
    sampling parameters, exact version stamps and prefix hits.
    `older_models`: models with older weights, by version. Tokens sampled by an older version are
    compared only if its model is given.
    `temperature`: divisor of the trainer's logits.
    `logprobs_mode`: mode of the behaviour log-probs, as in `collate_rollouts`.
    `trainer_logprobs_BT`: log-probs that the trainer itself computed for the batch, with padding,
    packing and autocast. These log-probs are examined like the engine's.
    `prompt_ids`: token ids of each row's prompt as the trainer renders it.
    `end_ids`: ids after which the engine must generate nothing. `min_tokens` forbids these ids and
    the end ids of the model's configs.
    `engine_dtype`: dtype of the engine's computation. None means the dtype of `model`.
    `max_tokens`: limit on the examined tokens, whose logits are held in memory. The examined rows
    are spread evenly over the batch, and there is at least one.

    Makes some forward passes over each row, and more for each hypothesis if there is a fault.
    Raises ConfigError for a batch without trained tokens, for a token id outside the model's
    vocabulary, and for inputs that do not fit the batch's rows.
    """
    turns_of_all = None if sources is None else turns_of_rows(sources)
    check_rows(batch, turns_of_all, prompt_ids, trainer_logprobs_BT)
    rows = choose_rows(batch, max_tokens)
    chosen, turns, prompts = batch.select(rows), _at(turns_of_all, rows), _at(prompt_ids, rows)
    check_ids(chosen, _vocabulary_of(model))
    facts = list(facts_of(chosen, turns, prompts, end_ids))
    findings = [finding_of_fact(fact) for fact in facts]
    tokens = examined_tokens(chosen, turns)
    models = {version: evaluation_copy(m) for version, m in (older_models or {}).items()}
    models[batch.train_version] = evaluation_copy(model)
    engine = engine_case(
        tokens, chosen, models, temperature, logprobs_mode, engine_dtype, model, end_ids
    )
    explanations: list[Explanation] = []
    if not any(fact.hides_logprobs for fact in facts):
        explanations = examine(engine)
        findings += main_causes(engine, explanations)
    if logprobs_mode == "temperature" and not findings:
        findings += [finding_of_fact(fact) for fact in draw_facts(tokens, engine.reference)]
    if trainer_logprobs_BT is not None:
        trainer = trainer_case(engine, trainer_logprobs_BT[rows], model)
        tried = examine(trainer, model)
        explanations, findings = explanations + tried, findings + main_causes(trainer, tried)
    else:
        for cause in alignment.dropout_noise(model, engine):
            name, evidence = cause.name, cause.evidence
            findings += [Finding(name=name, side="trainer", evidence=evidence, remedy=cause.remedy)]
    return replace(diagnosis_of(engine, findings, explanations), notes=notes_on(turns))


def notes_on(turns: Sequence[Turns] | None) -> list[str]:
    """Return a note if the versions of any request's KV are bounds.

    `turns`: each row's requests, or None if unknown.
    """
    bounded = [turn for row in turns or () for turn in row if turn.kv_versions_are_bounds]
    if not bounded:
        return []
    oldest = max(
        policy - kv
        for turn in bounded
        for policy, kv in zip(
            turn.policy_versions.tolist(), turn.context_kv_version_min, strict=True
        )
    )
    return [
        f"KV versions are bounds: KV is at most {oldest} versions old ({len(bounded)} requests). "
        "Shares of kv_lag hold only for tokens whose KV has the version of their policy"
    ]


def engine_case(
    tokens: ExaminedTokens,
    batch: RolloutBatch,
    models: dict[int, nn.Module],
    temperature: float,
    logprobs_mode: TrainedLogprobs,
    dtype: torch.dtype | None,
    model: nn.Module,
    end_ids: Sequence[int],
) -> Case:
    """Return the engine's case: the batch's behaviour log-probs and the reference for them.

    `dtype`: dtype of the engine's computation. None means the dtype of `model`.
    `end_ids`: end tokens beside those of the model's configs.
    """
    reference = reference_of(tokens, models, temperature)
    end_ids = union_of_ids(end_ids, *_end_ids_of(model))
    if logprobs_mode == "processed":
        processed_N = sampling.processed_logprobs(tokens, reference, batch, end_ids)
        reference = replace(reference, stamped_N=processed_N)
    return Case(
        side="engine",
        tokens=tokens,
        batch=batch,
        claimed_N=tokens.behaviour_N,
        reference=reference,
        models=models,
        tolerance=rounding_in(dtype or _dtype_of(model), tokens, reference, models),
        end_ids=end_ids,
    )


def trainer_case(engine: Case, logprobs_BT: Tensor, model: nn.Module) -> Case:
    """Return the trainer's case: its log-probs, and the log-probs of its weights as reference."""
    reference, tokens = engine.reference, engine.tokens
    return replace(
        engine,
        side="trainer",
        claimed_N=tokens.gather(logprobs_BT),
        reference=replace(
            reference,
            stamped_N=reference.trainer_N,
            logits_NV=model_logits(engine.trainer_model, tokens),
            is_known_N=torch.ones_like(reference.is_known_N),
        ),
        tolerance=rounding_in(_dtype_of(model), tokens, reference, engine.models),
    )


def check_rows(
    batch: RolloutBatch,
    turns: Sequence[Any] | None,
    prompt_ids: Sequence[Any] | None,
    trainer_logprobs_BT: Tensor | None,
) -> None:
    """Raise ConfigError for inputs that do not match the rows of the batch."""
    num_rows = len(batch.tokens_BT)
    for name, given in {"sources": turns, "prompt_ids": prompt_ids}.items():
        if given is not None and len(given) != num_rows:
            raise ConfigError(f"{name} has {len(given)} sequences, the batch {num_rows} rows")
    if trainer_logprobs_BT is not None and trainer_logprobs_BT.shape != batch.tokens_BT.shape:
        given_shape, wanted = list(trainer_logprobs_BT.shape), list(batch.tokens_BT.shape)
        raise ConfigError(
            f"trainer_logprobs_BT of shape {given_shape} must have the shape {wanted}"
        )


def rounding_in(
    dtype: torch.dtype,
    tokens: ExaminedTokens,
    reference: Reference,
    models: Mapping[int, nn.Module],
) -> Tolerance:
    """Return the gap that rounding explains if one side computes in `dtype`.

    Measures it on these tokens, by the trained weights in `dtype` and in float64.
    """
    trainer = models[tokens.train_version]
    logprobs_N = reference.trainer_N
    if dtype != torch.float32:
        low = evaluation_copy(trainer, dtype)
        logprobs_N = model_logprobs(low, tokens, reference.temperature)
    exact = evaluation_copy(trainer, torch.float64)
    noise_N = logprobs_N - model_logprobs(exact, tokens, reference.temperature)
    largest = float(logprobs_N.abs().max())
    return tolerance_of(noise_N, largest, longest_sum_of(trainer, tokens))


def examine(case: Case, model: nn.Module | None = None) -> list[Explanation]:
    """Test all hypotheses about the case. Returns their explanations, the best first.

    Tests none if rounding explains the gap, or if the weights of no token are known.
    `model`: the trainer's own model, to test for dropout. None leaves that test out.
    """
    if not bool(case.reference.is_known_N.any()) or case.tolerance.covers(case.gap_N):
        return []
    by_version = weights.logprobs_by_version(case)
    causes: list[Iterator[Hypothesis]] = [
        sampling.temperature_causes(case),
        alignment.shift_causes(case),
        alignment.batch_position_causes(case),
        weights.stale_weight_causes(case, by_version),
        weights.precision_causes(case),
        weights.head_causes(case),
    ]
    if case.side == "engine":
        causes += [
            sampling.declared_causes(case),
            sampling.truncation_causes(case),
            sampling.penalty_causes(case),
            weights.stale_kv_causes(case, by_version),
            weights.place_causes(case),
        ]
    else:
        causes.append(alignment.padding_causes(case))
    if model is not None:
        causes.append(alignment.dropout_noise(model, case))
    return rank([explain(case, hypothesis) for hypothesis in chain.from_iterable(causes)])


def main_causes(case: Case, explanations: Sequence[Explanation]) -> list[Finding]:
    """Return the main cause as a finding, or "unexplained" if no cause is sufficient.

    Returns [] if rounding explains the gap. `explanations`: the best first.
    """
    if case.tolerance.covers(case.gap_N):
        return []
    best = explanations[0] if explanations else None
    if best is not None and best.is_main_cause:
        return [
            Finding(
                name=best.name,
                side=case.side,
                share=best.share,
                is_whole=best.is_whole,
                evidence=best.evidence,
                remedy=best.remedy,
            )
        ]
    return [
        Finding(
            name="unexplained",
            side=case.side,
            share=0.0,
            evidence=(
                f"the {case.side}'s log-probs are {rms_of(case.gap_N):.2e} nats from those of the "
                "trainer's weights, and no known cause explains half of the gap"
            ),
            remedy=(
                "compare weights_checksum() of engine and trainer; give the doctor older weights "
                "(older_models), sources and prompt_ids; look at the table of places"
            ),
        )
    ]


def finding_of_fact(fact: Fact) -> Finding:
    return Finding(
        name=fact.name,
        side="batch",
        evidence=f"{fact.evidence} ({fact.num_rows} rows)",
        remedy=fact.remedy,
    )


def diagnosis_of(
    case: Case, findings: Sequence[Finding], explanations: Sequence[Explanation]
) -> Diagnosis:
    """Return the diagnosis with its tables and shares. `case`: the engine's case."""
    reference, tokens = case.reference, case.tokens
    num_known = int(reference.is_known_N.sum())
    verdict: Verdict = "fault" if findings else "sound" if num_known else "inconclusive"
    return Diagnosis(
        verdict=verdict,
        findings=findings,
        attributions=shares_of(case, findings),
        explanations=explanations,
        num_tokens=len(tokens),
        num_known_tokens=num_known,
        gap_rms=rms_of(reference.trainer_N - tokens.behaviour_N),
        unexplained_rms=rms_of(case.gap_N[reference.is_known_N]),
        tolerance=case.tolerance,
        lag_table=by_lag(case),
        place_table=by_place(case),
        token_table=by_token(case),
    )


def shares_of(case: Case, findings: Sequence[Finding]) -> dict[str, float]:
    """Split the squared gap between trainer and behaviour log-probs into shares by cause.

    `policy_lag` is the decrease of the gap if each token's log-prob is computed by the weights that
    sampled it. `kv_lag` is the further decrease if these weights attend to KV of the stamped
    versions. The remainder is `rounding`, or the engine's findings and `unexplained`. `unknown` is
    the part of tokens whose weights were not given. A negative share means that its step increased
    the gap.
    Returns the shares other than 0, the largest first, or {} if there is no gap.
    """
    reference, known = case.reference, case.reference.is_known_N
    behaviour_N = case.tokens.behaviour_N
    steps = [reference.trainer_N, reference.sampler_N, reference.stamped_N]
    squares = [(step_N - behaviour_N).square() for step_N in steps]
    total = float(squares[0].sum())
    if total == 0.0:
        return {}
    left = [float(square_N[known].sum()) / total for square_N in squares]
    rest = "rounding" if case.tolerance.covers(case.gap_N) else "unexplained"
    shares = {"policy_lag": left[0] - left[1], "kv_lag": left[1] - left[2], rest: left[2]}
    for finding in findings:
        if finding.side == "engine" and finding.share and rest == "unexplained":
            shares[finding.name] = finding.share * left[2]
            shares[rest] = (1.0 - finding.share) * left[2]
    shares["unknown"] = float(squares[0][~known].sum()) / total
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    return {name: share for name, share in ranked if share != 0.0}


def _at(values: Sequence[Any] | None, rows: Tensor) -> list[Any] | None:
    return None if values is None else [values[i] for i in rows.tolist()]


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def _end_ids_of(model: nn.Module) -> Iterator[Any]:
    for name in ("config", "generation_config"):
        yield getattr(getattr(model, name, None), "eos_token_id", None)


def _vocabulary_of(model: nn.Module) -> int:
    count: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    return count


Row = dict[str, Any]


def by_lag(case: Case) -> list[Row]:
    """Return a table row for each pair of policy lag and KV lag, rounded to half a version."""
    tokens = case.tokens
    policy_N = tokens.train_version - tokens.version_N
    kv_N = ((tokens.version_N - tokens.kv_version_N) * 2.0).round() / 2.0
    keys = sorted(set(zip(policy_N.tolist(), kv_N.tolist(), strict=True)))
    return [
        {"policy_lag": policy, "kv_lag": kv, **_summary(case, (policy_N == policy) & (kv_N == kv))}
        for policy, kv in keys
    ]


def by_place(case: Case) -> list[Row]:
    """Return a table row for each kind of place in a rollout (see `places`) that has tokens."""
    found = {name: is_there_N for name, (is_there_N, _, _) in places(case).items()}
    return [
        {"place": name, **_summary(case, is_there_N)}
        for name, is_there_N in found.items()
        if bool(is_there_N.any())
    ]


def by_token(case: Case) -> list[Row]:
    """Return a table row for each token, the largest known gap to the stamped weights first."""
    tokens, reference = case.tokens, case.reference
    gap_N = case.gap_N.abs()
    order = torch.where(reference.is_known_N, gap_N, -1.0).argsort(descending=True, stable=True)
    columns = {
        "row": tokens.row_N,
        "column": tokens.column_N,
        "token": tokens.id_N,
        "version": tokens.version_N,
        "kv_version": tokens.kv_version_N,
        "behaviour": tokens.behaviour_N,
        "trainer": reference.trainer_N,
        "stamped": reference.stamped_N,
        "is_known": reference.is_known_N,
    }
    values = zip(*(column[order].tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in values]


def _summary(case: Case, is_own_N: Tensor) -> Row:
    reference, known_N = case.reference, is_own_N & case.reference.is_known_N
    trainer_gap_N = (reference.trainer_N - case.tokens.behaviour_N)[is_own_N]
    return {
        "num_tokens": int(is_own_N.sum()),
        "trainer_gap_mean": float(trainer_gap_N.mean()),
        "trainer_gap_rms": rms_of(trainer_gap_N),
        "stamped_gap_rms": rms_of(case.gap_N[known_N]) if bool(known_N.any()) else None,
        "stamped_gap_max": float(case.gap_N[known_N].abs().max()) if bool(known_N.any()) else None,
    }
