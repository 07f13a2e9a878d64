"""Micro-batches by a budget of tokens, padded or packed, and the update of a policy by them.

Shape letters: B rows, each a rollout or one of its token sequences, T positions, N tokens of all
rows without padding.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rollout.errors import ConfigError
from trainer_hooks.collate import RolloutBatch
from trainer_hooks.logprobs import token_entropies, token_logprobs
from trainer_hooks.losses import PolicyLossConfig, policy_loss
from trainer_hooks.losses.merging import merged_metrics
from trainer_hooks.losses.terms import aggregation_denominator
from trainer_hooks.replay_routing import replay_routing


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """How a batch is cut for the optimizer.

    `num_iterations`: passes over the batch. `num_minibatches`: optimizer steps of a pass, on random
    parts of it. `max_tokens`: of a forward pass, padding included where there is any; None takes a
    minibatch at once. `is_packed`: rollouts lie one behind the other in a single row, for models
    that tell sequences by their position ids, as transformers' do. `temperature`: of the logits.
    `replay_routing`: passes use the experts that the rollouts were computed with (`replay_routing`,
    of a batch that was collated with routing=True).
    """

    num_iterations: int = 1
    num_minibatches: int = 1
    max_tokens: int | None = None
    is_packed: bool = False
    temperature: float = 1.0
    max_grad_norm: float = 1.0
    replay_routing: bool = False

    def __post_init__(self) -> None:
        for name in ("num_iterations", "num_minibatches", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")


def split_by_tokens(
    lengths_B: torch.Tensor, max_tokens: int | None, is_packed: bool = False
) -> list[torch.Tensor]:
    """Row indices of micro-batches: all rows, or with `max_tokens` the longest rollouts first.

    Rows without a token, of rollouts that failed before their first turn, are in none.
    Padded, rows times the longest of them are at most `max_tokens`; packed, the sum of lengths is
    (best fit, longest first). Raises ConfigError for a rollout that is longer.
    """
    if max_tokens is None:
        rows = lengths_B.nonzero().flatten()
        return [rows] if len(rows) else []
    lengths = lengths_B.tolist()
    longest_first = lengths_B.argsort(descending=True, stable=True).tolist()
    order = [row for row in longest_first if lengths[row]]
    if order and lengths[order[0]] > max_tokens:
        raise ConfigError(
            f"max_tokens={max_tokens} is less than the {lengths[order[0]]} tokens of a rollout"
        )
    parts: list[list[int]] = []
    room: list[int] = []  # tokens that fit into each part
    for row in order:
        # A padded row is as long as the first one of its part.
        costs = [lengths[row] if is_packed else lengths[part[0]] for part in parts]
        fitting = [place for place, cost in enumerate(costs) if cost <= room[place]]
        if fitting:
            best = min(fitting, key=lambda place: room[place])
            parts[best].append(row)
            room[best] -= costs[best]
        else:
            parts.append([row])
            room.append(max_tokens - lengths[row])
    return [torch.tensor(part) for part in parts]


def _forward(
    policy: Callable[..., Any], batch: RolloutBatch, is_packed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and tokens of one forward pass, [B, T, ...]; packed, of one row of N tokens."""
    if not is_packed:
        # Padding is on the right, where no token of a causal model attends to it.
        return policy(input_ids=batch.tokens_BT).logits, batch.tokens_BT
    is_token_BT = batch.attention_mask_BT
    tokens_1N = batch.tokens_BT[is_token_BT][None]
    positions_1N = batch.position_ids_BT[is_token_BT][None]  # begin anew at each rollout
    output = policy(input_ids=tokens_1N, position_ids=positions_1N, use_cache=False)
    return output.logits, tokens_1N


def _replayed(
    policy: Callable[..., Any], batch: RolloutBatch, settings: UpdateSettings
) -> AbstractContextManager[None]:
    """Around the passes on this batch, forward and backward."""
    if not settings.replay_routing:
        return nullcontext()
    if batch.routing_BTLK is None and bool(batch.mask_BT.any()):
        raise ConfigError(
            "replay_routing=True wants a batch with routing_BTLK; collate it with routing=True, "
            "from an engine with record_routing=True"
        )
    if not isinstance(policy, nn.Module):
        raise ConfigError(f"replay_routing=True wants a module, not a {type(policy).__name__}")
    if batch.routing_BTLK is None:  # every rollout failed before a pass of the engine
        return nullcontext()
    is_token_BT = batch.attention_mask_BT
    routing = batch.routing_BTLK[is_token_BT][None] if settings.is_packed else batch.routing_BTLK
    return replay_routing(policy, routing)


def _unpacked(values: torch.Tensor, batch: RolloutBatch, is_packed: bool) -> torch.Tensor:
    """A column of the forward pass as [B, T]."""
    if not is_packed:
        return values
    is_token_BT = batch.attention_mask_BT
    values_BT = values.new_zeros(is_token_BT.shape).masked_scatter(is_token_BT, values)
    # The end of the rollout before it has scored a rollout's first token.
    return values_BT.masked_fill(batch.position_ids_BT == 0, 0.0)


@torch.no_grad()
def fixed_logprobs(
    policy: Callable[..., Any], batch: RolloutBatch, settings: UpdateSettings
) -> torch.Tensor:
    """Log-probs [B, T] without a gradient: of a reference, or of the policy before an update."""
    logprobs_BT = torch.zeros(batch.tokens_BT.shape, device=batch.tokens_BT.device)
    for rows in split_by_tokens(batch.lengths_B, settings.max_tokens, settings.is_packed):
        part = batch.select(rows)
        with _replayed(policy, part, settings):
            logits, tokens = _forward(policy, part, settings.is_packed)
        values = token_logprobs(logits, tokens, settings.temperature)
        logprobs_BT[rows, : part.tokens_BT.shape[1]] = _unpacked(values, part, settings.is_packed)
    return logprobs_BT


def accumulate_gradients(
    policy: Callable[..., Any],
    batch: RolloutBatch,
    columns: dict[str, torch.Tensor],
    config: PolicyLossConfig,
    settings: UpdateSettings,
) -> dict[str, float]:
    """Add the gradient of the loss on `batch` to the parameters, micro-batch by micro-batch.

    `columns`: `advantages_BT` and what else `policy_loss` takes, [B, T] each. Returns its metrics,
    of the whole batch (`merged_metrics`).
    """
    rollout_tokens_B = batch.rollout_tokens_B
    denominator = float(
        aggregation_denominator(batch.mask_BT, config.resolved_aggregation, rollout_tokens_B)
    )
    reports = []
    for rows in split_by_tokens(batch.lengths_B, settings.max_tokens, settings.is_packed):
        part = batch.select(rows)
        own = {name: column[rows, : part.tokens_BT.shape[1]] for name, column in columns.items()}
        with _replayed(policy, part, settings):
            logprobs_BT, entropies_BT = _logprobs_and_entropies(policy, part, config, settings)
            loss, metrics = policy_loss(
                logprobs_BT,
                part.behaviour_logprobs_BT,
                own.pop("advantages_BT"),
                part.mask_BT,
                config,
                policy_lag_BT=part.policy_lag_BT,
                kv_lag_BT=part.kv_lag_BT,
                entropies_BT=entropies_BT,
                aggregation_denominator=denominator,
                rollout_tokens_B=rollout_tokens_B[rows],
                **own,
            )
            loss.backward()
        reports.append((metrics, int(part.mask_BT.sum())))
    return merged_metrics(reports)


def _logprobs_and_entropies(
    policy: Callable[..., Any],
    batch: RolloutBatch,
    config: PolicyLossConfig,
    settings: UpdateSettings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one forward pass, [B, T] each. Entropies have a gradient if there is a bonus for them:
    it keeps another tensor of the logits' size until the backward pass."""
    logits, tokens = _forward(policy, batch, settings.is_packed)
    if config.entropy_coefficient > 0.0:
        columns = token_logprobs(logits, tokens, settings.temperature, return_entropy=True)
    else:
        logprobs = token_logprobs(logits, tokens, settings.temperature)
        columns = logprobs, token_entropies(logits, settings.temperature)
    logprobs_BT, entropies_BT = (_unpacked(each, batch, settings.is_packed) for each in columns)
    return logprobs_BT, entropies_BT


def update_policy(
    policy: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: RolloutBatch,
    columns: dict[str, torch.Tensor],
    config: PolicyLossConfig,
    settings: UpdateSettings,
) -> list[dict[str, float]]:
    """All optimizer steps on `batch`; the metrics of each, with `grad_norm` before clipping.

    There is none on a batch without a trained token.
    `columns`: see `accumulate_gradients`. The log-probs that the ratio is clipped around stay the
    same in all steps: proximal ones (of `fixed_logprobs`, before the first step) if they are among
    the columns, else the engine's. Source of the passes: GRPO, Shao et al. 2024, arXiv 2402.03300,
    algorithm 1, line 10.
    """
    reports = []
    for _ in range(settings.num_iterations):
        for rows in batch.split_rollouts(settings.num_minibatches):
            part = batch.select(rows)
            width = part.tokens_BT.shape[1]
            own = {name: column[rows, :width] for name, column in columns.items()}
            optimizer.zero_grad()
            metrics = accumulate_gradients(policy, part, own, config, settings)
            norm = nn.utils.clip_grad_norm_(policy.parameters(), settings.max_grad_norm)
            optimizer.step()
            reports.append({**metrics, "grad_norm": float(norm)})
    return reports
