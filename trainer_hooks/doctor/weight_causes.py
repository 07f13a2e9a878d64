"""Hypotheses that logits came from other weights, lower precision, old KV or another head.

Used by `trainer_hooks.doctor.diagnosis`. No function changes the models or the batch.

Shape letters: N tokens, T positions of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from trainer_hooks.doctor.forward import (
    chosen_logprobs,
    evaluation_copy,
    head_in,
    head_of_embeddings,
    model_logprobs,
    replayed_logits,
)
from trainer_hooks.doctor.hypotheses import Case, Hypothesis, rms_of

LOW_PRECISIONS = (torch.bfloat16, torch.float16)


def logprobs_by_version(case: Case) -> dict[int, Tensor]:
    """Return all tokens' log-probs [N] by each version of the weights, or {} for one version."""
    if len(case.models) == 1:
        return {}
    tokens, reference = case.tokens, case.reference
    return {
        version: reference.trainer_N
        if version == tokens.train_version
        else model_logprobs(model, tokens, reference.temperature)
        for version, model in case.models.items()
    }


def stale_weight_causes(case: Case, by_version: Mapping[int, Tensor]) -> Iterator[Hypothesis]:
    """Yield for each version of the weights the hypothesis that it computed all log-probs.

    `by_version`: the result of `logprobs_by_version`.
    """
    for version, logprobs_N in by_version.items():
        yield Hypothesis(
            name="stale_weights",
            predicted_N=logprobs_N,
            evidence=(
                f"the log-probs are those of version {version}; the tokens are stamped "
                f"{_versions_text(case)}"
            ),
            remedy=(
                "the update did not reach the engine, or had the wrong version: push through "
                "WeightSync, and compare weights_checksum() of engine and trainer after an update"
            ),
        )


def stale_kv_causes(case: Case, by_version: Mapping[int, Tensor]) -> Iterator[Hypothesis]:
    """Yield hypotheses that another version wrote KV, although the version stamps do not show it.

    In one kind of hypothesis the weights changed in the middle of a rollout, and the other version
    sampled its earlier tokens. In the others, the other version wrote the KV of the prompt, or of
    the part in the prefix cache.
    `by_version`: the result of `logprobs_by_version`.
    """
    trained = case.tokens.train_version
    for version, old_N in by_version.items():
        if version == trained:
            continue
        for place in ("rollout", "prompt", "prefix"):
            predicted_N = _over_old_kv(case, version, old_N, place)
            yield Hypothesis(
                name="stale_kv",
                predicted_N=predicted_N,
                evidence=(
                    f"weights of version {trained} attend to KV of the {place} that version "
                    f"{version} wrote, which the stamps do not say"
                ),
                remedy=(
                    "update through update_weights or WeightSync, which stamp the KV; suspend in "
                    "mode 'recompute', or set max_kv_staleness_versions=0, so that old KV is "
                    "computed again"
                ),
            )


def precision_causes(case: Case) -> Iterator[Hypothesis]:
    """Yield hypotheses of lower precision: of the head, of the whole model, and of its weights.

    A hypothesis about the weights is yielded only if it explains the gap up to rounding.
    """
    tokens, reference = case.tokens, case.reference
    for dtype in LOW_PRECISIONS:
        name = str(dtype).removeprefix("torch.")
        short = {"bfloat16": "bf16", "float16": "fp16"}[name]
        for rounds_logits in (False, True):
            with head_in(case.trainer_model, dtype, rounds_logits=rounds_logits):
                head_N = model_logprobs(case.trainer_model, tokens, reference.temperature)
            logits = ", logits too" if rounds_logits else ""
            yield Hypothesis(
                name=f"{short}_head",
                predicted_N=head_N,
                evidence=f"the {case.side}'s head multiplies in {name}{logits}; the rest agrees",
                remedy=f"compute the head of the {case.side} in float32",
            )
        model = evaluation_copy(case.trainer_model, dtype)
        low_N = model_logprobs(model, tokens, reference.temperature)
        noise_N = (low_N - reference.trainer_N)[reference.is_known_N]
        remedy = (
            f"run the {case.side} in float32; if {name} is intended, pass engine_dtype={name!r} "
            "to the doctor and correct for it by OffPolicyCorrection with mode='truncate'"
        )
        yield Hypothesis(
            name=f"{short}_model",
            kind="size",
            noise_rms=rms_of(noise_N),
            noise_largest=float(noise_N.abs().max()),
            evidence=(
                f"the gap has the size of {name} rounding: {rms_of(noise_N):.2e} nats, measured by "
                f"a {name} pass of the trainer's model"
            ),
            remedy=remedy,
        )
        yield Hypothesis(
            name=f"{short}_model",
            predicted_N=low_N,
            evidence=f"a {name} pass of the trainer's model has the same errors, token by token",
            remedy=remedy,
        )
        rounded = evaluation_copy(model)
        rounded_N = model_logprobs(rounded, tokens, reference.temperature)
        if not case.tolerance.covers((case.claimed_N - rounded_N)[reference.is_known_N]):
            continue  # a model in low precision has rounded weights, too
        yield Hypothesis(
            name=f"{short}_weights",
            predicted_N=rounded_N,
            evidence=f"the {case.side}'s weights are the trainer's, rounded to {name}",
            remedy="push weights in the trainer's dtype; compare weights_checksum()",
        )


def head_causes(case: Case) -> Iterator[Hypothesis]:
    """Yield the hypothesis that the head is tied to the embeddings, if the trainer's is not."""
    model = case.trainer_model
    head, table = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    if head is None or head.weight is table.weight or head.weight.shape != table.weight.shape:
        return
    with head_of_embeddings(model):
        predicted_N = model_logprobs(model, case.tokens, case.reference.temperature)
    yield Hypothesis(
        name="tied_head",
        predicted_N=predicted_N,
        evidence="the logits are products with the input embeddings; the trainer's head is not",
        remedy="make tie_word_embeddings equal on both sides, and push the head's weight",
    )


def place_causes(case: Case) -> Iterator[Hypothesis]:
    """Yield a hypothesis for each kind of place if rounding explains the gap everywhere else."""
    reference = case.reference
    for name, (is_there_N, evidence, remedy) in places(case).items():
        if not bool(is_there_N.any()) or not case.tolerance.covers(case.gap_N[~is_there_N]):
            continue
        if bool((is_there_N | ~reference.is_known_N).all()):  # no token is elsewhere
            continue
        predicted_N = torch.where(is_there_N, case.claimed_N, reference.stamped_N)
        yield Hypothesis(
            name=name, kind="place", predicted_N=predicted_N, evidence=evidence, remedy=remedy
        )


def places(case: Case) -> dict[str, tuple[Tensor, str, str]]:
    """Return kinds of places in a rollout, by name.

    A kind has three parts: which tokens are there (bool [N]), and the evidence and remedy of a
    fault that occurs only there.
    """
    tokens = case.tokens
    turns = [tokens.turn_of(i) for i in range(len(tokens))]
    starts_N = torch.tensor([-1 if turn is None else len(turn.prompt_tokens) for turn in turns])
    first_of_row_N = case.batch.prompt_lengths_B[tokens.row_N]
    starts_N = torch.where(starts_N < 0, first_of_row_N, starts_N)
    hits_N = torch.tensor([bool(turn is not None and turn.num_cached_tokens) for turn in turns])
    return {
        "prefix_hits": (
            hits_N,
            "only rollouts whose prompt was found in the prefix cache are off",
            "enable_prefix_caching=False; prefix_reuse_across_versions=False after updates",
        ),
        "prefill": (
            tokens.column_N == starts_N,
            "only the first token of each turn is off, which the prefill draws",
            "enable_chunked_prefill=False; another attention backend; please report it",
        ),
        "decode": (
            tokens.column_N > starts_N,
            "first tokens agree, later ones, which decode steps draw, are off",
            "another attention backend; InferenceConfig(deterministic=True); please report it",
        ),
        "later_turns": (
            starts_N > first_of_row_N,
            "only turns after the first are off",
            "check the tokens between the turns; enable_prefix_caching=False",
        ),
    }


def _over_old_kv(case: Case, version: int, old_N: Tensor, place: str) -> Tensor:
    """Return log-probs of the trainer's weights over KV whose first part `version` wrote.

    `old_N`: log-probs by `version`. `place`: the first part is the "prompt", the "prefix" in the
    prefix cache, or in a "rollout" the tokens that `version` sampled.
    """
    tokens, trained = case.tokens, case.tokens.train_version
    predicted_N = case.reference.trainer_N.clone()
    # In a "rollout", `version` sampled the tokens whose claimed log-prob equals `old_N`.
    is_old_N = (case.claimed_N - old_N).abs() <= case.tolerance.largest
    for row, tokens_T in enumerate(tokens.rows):
        own = (tokens.row_N == row).nonzero().flatten()
        num_old = 0
        if place == "rollout":
            num_old = int(is_old_N[own].long().cumprod(0).sum())
            if num_old in (0, len(own)):
                predicted_N[own] = old_N[own] if num_old else predicted_N[own]
                continue
            end = int(tokens.column_N[own[num_old]]) - 1
        elif place == "prompt":
            end = int(case.batch.prompt_lengths_B[row]) - 1
        else:
            turns = tokens.turns[row] if tokens.turns else ()
            end = (turns[0].num_cached_tokens or 0) if turns else 0
        if end <= 0:
            continue
        kv_versions = [version] * end + [trained] * (len(tokens_T) - end)
        logits_TV = replayed_logits(case.models, tokens_T, kv_versions).float().cpu()
        late = own[num_old:]
        predicted_N[own[:num_old]] = old_N[own[:num_old]]
        predicted_N[late] = chosen_logprobs(
            logits_TV[tokens.column_N[late] - 1], tokens.id_N[late], case.reference.temperature
        )
    return predicted_N


def _versions_text(case: Case) -> str:
    versions = sorted(set(case.tokens.version_N.tolist()))
    spans = all(b == a + 1 for a, b in pairwise(versions)) and len(versions) > 1
    return f"{versions[0]}-{versions[-1]}" if spans else ", ".join(map(str, versions))
