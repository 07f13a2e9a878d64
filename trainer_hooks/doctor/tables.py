"""The gap in tables: by lag, by the kind of place, and token by token. Gaps in nats.

Shape letters: N tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer_hooks.doctor.hypotheses import Case
from trainer_hooks.doctor.noise import rms_of
from trainer_hooks.doctor.weight_causes import places

Row = dict[str, Any]


def by_lag(case: Case) -> list[Row]:
    """A row for each policy lag and KV lag, the latter rounded to halves of a version."""
    tokens = case.tokens
    policy_N = tokens.train_version - tokens.version_N
    kv_N = ((tokens.version_N - tokens.kv_version_N) * 2.0).round() / 2.0
    keys = sorted(set(zip(policy_N.tolist(), kv_N.tolist(), strict=True)))
    return [
        {"policy_lag": policy, "kv_lag": kv, **_summary(case, (policy_N == policy) & (kv_N == kv))}
        for policy, kv in keys
    ]


def by_place(case: Case) -> list[Row]:
    """A row for each kind of place that has tokens."""
    found = {name: is_there_N for name, (is_there_N, _, _) in places(case).items()}
    return [
        {"place": name, **_summary(case, is_there_N)}
        for name, is_there_N in found.items()
        if bool(is_there_N.any())
    ]


def by_token(case: Case) -> list[Row]:
    """A row for each token, the largest gap to the stamped weights first."""
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
    """How many tokens, and both gaps of them: to the trainer's weights, to the stamped ones."""
    reference, known_N = case.reference, is_own_N & case.reference.is_known_N
    trainer_gap_N = (reference.trainer_N - case.tokens.behaviour_N)[is_own_N]
    return {
        "num_tokens": int(is_own_N.sum()),
        "trainer_gap_mean": float(trainer_gap_N.mean()),
        "trainer_gap_rms": rms_of(trainer_gap_N),
        "stamped_gap_rms": rms_of(case.gap_N[known_N]) if bool(known_N.any()) else None,
        "stamped_gap_max": float(case.gap_N[known_N].abs().max()) if bool(known_N.any()) else None,
    }
