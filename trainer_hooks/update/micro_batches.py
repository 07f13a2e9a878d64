"""Micro-batches by a budget of tokens, padded or packed, and the update of a policy by them.

Shape letters: B rows, each a rollout or one of its token sequences, T positions, N tokens of all
rows without padding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import nn

from rollout.errors import ConfigError
from rollout.keyword_hints import refuses_with_hints
from rollout.ranges import PositiveFloat, PositiveInt, check_fields
from rollout.sampling_params import TrainedTemperature
from trainer_hooks.collate import RolloutBatch
from trainer_hooks.losses import PolicyLossConfig, policy_loss
from trainer_hooks.losses.logprobs import token_entropies, token_logprobs
from trainer_hooks.losses.merging import merged_metrics
from trainer_hooks.losses.replay_routing import replay_routing
from trainer_hooks.losses.terms import aggregation_denominator
from trainer_hooks.update.guarded_step import (
    DEFAULT_MAX_SKIPPED_STEPS,
    GuardedStep,
    MaxSkippedSteps,
)
from trainer_hooks.update.packing import require_separate_rollouts
from trainer_hooks.update.token_tree import contiguous_parts, split_into_trees
from trainer_hooks.update.tree_pass import (
    max_depth,
    pair_cost,
    rows_before_last,
    tree_fault,
    tree_logprobs,
)
from trainer_hooks.weight_sync.trainer_ranks import ALONE, TrainerRanks

logger = logging.getLogger(__name__)

# Keywords of TRL, verl and OpenRLHF, and what they are called here.
UPDATE_HINTS = {
    **dict.fromkeys(("ppo_epochs", "num_ppo_epochs", "num_epochs", "max_epochs"), "num_iterations"),
    **dict.fromkeys(("ppo_mini_batch_size", "mini_batch_size"), "num_minibatches, their number"),
    **dict.fromkeys(("steps_per_generation", "num_mini_batches"), "num_minibatches"),
    **dict.fromkeys(("ppo_max_token_len_per_gpu", "max_tokens_per_gpu"), "max_tokens"),
    **dict.fromkeys(("micro_batch_size", "max_tokens_per_forward"), "max_tokens, of a pass"),
    **dict.fromkeys(("use_remove_padding", "packing"), "is_packed"),
    **dict.fromkeys(("use_prefix_grouper", "enable_tree_training"), "share_prefixes"),
    **dict.fromkeys(("grad_clip", "clip_grad", "max_norm"), "max_grad_norm"),
}


@refuses_with_hints(UPDATE_HINTS, ConfigError)
@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """How a batch is cut for the optimizer.

    `num_iterations`: passes over the batch. `num_minibatches`: optimizer steps of a pass, on random
    parts of it. `max_tokens`: of a forward pass, padding included where there is any; None takes a
    minibatch at once. `is_packed`: rollouts lie one behind the other in a single row, for models
    that tell sequences by their position ids; others are refused at the first pass.
    `share_prefixes`: what rows begin with in common, the prompt of a group and a system prompt, is
    computed once, and logits of trained tokens alone, a few at a time; `max_tokens` then bounds the
    tokens that are computed. Gradients are those of the plain passes, up to rounding. Models for
    which they would not be (`tree_fault`), routing replay, and rows beyond a model's sliding window
    take the plain passes, packed or padded.
    `temperature`: of the logits. `max_grad_norm`: gradients are scaled to it. `max_skipped_steps`: so many steps
    in a row whose gradient is not finite are an error (`GuardedStep`).
    `replay_routing`: passes use the experts that the rollouts were computed with (`replay_routing`,
    of a batch that was collated with routing=True).
    """

    num_iterations: PositiveInt = 1
    num_minibatches: PositiveInt = 1
    max_tokens: PositiveInt | None = None
    is_packed: bool = False
    share_prefixes: bool = True
    temperature: TrainedTemperature = 1.0
    max_grad_norm: PositiveFloat = 1.0
    max_skipped_steps: MaxSkippedSteps = DEFAULT_MAX_SKIPPED_STEPS
    replay_routing: bool = False

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)


def split_micro_batches(
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


def split_among_ranks(
    lengths_B: torch.Tensor, settings: UpdateSettings, num_ranks: int
) -> list[list[torch.Tensor]]:
    """Row indices of the passes of each rank; each row with a token is in one of them.

    The ranks have about as many tokens. All make the same number of passes, since each is a
    collective where they share a model: a rank that has fewer ends with passes without a row.
    Raises ConfigError as `split_micro_batches`.
    """
    lengths = lengths_B.tolist()
    rows_of: list[list[int]] = [[] for _ in range(num_ranks)]
    num_tokens = [0] * num_ranks
    for row in lengths_B.argsort(descending=True, stable=True).tolist():
        least = num_tokens.index(min(num_tokens))
        rows_of[least].append(row)
        num_tokens[least] += lengths[row]
    passes = []
    for own in rows_of:
        rows = torch.tensor(sorted(own), dtype=torch.long)
        parts = split_micro_batches(lengths_B[rows], settings.max_tokens, settings.is_packed)
        passes.append([rows[part] for part in parts])
    return _filled(passes)


Way = Literal["trees", "packed", "padded"]


def _way_of(policy: Callable[..., Any], batch: RolloutBatch, settings: UpdateSettings) -> Way:
    """Return how the passes on `batch` go.

    Raises ConfigError where `is_packed` would let rollouts attend to each other.
    """
    reason = _reason_against_trees(policy, batch, settings)
    if reason is None:
        return "trees"
    if settings.share_prefixes:
        _log_once(type(policy).__name__, reason)
    if settings.is_packed:
        require_separate_rollouts(policy, batch.tokens_BT.device)
        return "packed"
    return "padded"


def _reason_against_trees(
    policy: Callable[..., Any], batch: RolloutBatch, settings: UpdateSettings
) -> str | None:
    if not settings.share_prefixes:
        return "share_prefixes=False"
    if settings.replay_routing:
        return "rows that share a prompt have routed it each in its own way"
    if not bool(batch.mask_BT.any()):
        return "no token is trained"
    if (fault := tree_fault(policy, batch.tokens_BT.device)) is not None:
        return fault
    window = max_depth(policy)
    if window is not None and int(batch.lengths_B.max()) > window:
        return f"a rollout is longer than the model's window of {window} tokens"
    return None


@lru_cache(64)
def _log_once(model: str, reason: str) -> None:
    logger.info("%s computes each row whole, shared prefixes as well: %s", model, reason)


def _split(
    policy: Callable[..., Any],
    batch: RolloutBatch,
    settings: UpdateSettings,
    way: Way,
    num_ranks: int,
) -> list[list[torch.Tensor]]:
    """Row indices of the passes of each rank; as many passes for each, the last ones empty."""
    if way != "trees":
        return split_among_ranks(batch.lengths_B, settings, num_ranks)
    rows = rows_before_last(batch.tokens_BT, batch.mask_BT)
    trained = [index for index, row in enumerate(rows) if row]
    longest = max(len(rows[index]) for index in trained)
    if settings.max_tokens is not None and longest > settings.max_tokens:
        raise ConfigError(
            f"max_tokens={settings.max_tokens} is less than the {longest} tokens of a rollout"
        )
    cost = pair_cost(policy)
    passes = []
    for own in contiguous_parts([rows[index] for index in trained], num_ranks):
        indices = [trained[index] for index in own]
        trees = split_into_trees([rows[index] for index in indices], settings.max_tokens, cost)
        passes.append([torch.tensor([indices[i] for i in tree]) for tree in trees])
    return _filled(passes)


def _filled(passes: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Return the passes of each rank, with empty ones up to the number of those that have most."""
    most = max(map(len, passes))
    return [own + [torch.zeros(0, dtype=torch.long)] * (most - len(own)) for own in passes]


def _passes(
    policy: Callable[..., Any],
    batch: RolloutBatch,
    settings: UpdateSettings,
    ranks: TrainerRanks,
    way: Way,
) -> Iterator[tuple[torch.Tensor, RolloutBatch, bool]]:
    """Yield the rows of each pass of this rank, their batch, and whether they are its own.

    A pass without a row computes the shortest one, of which nothing is trained on.
    """
    for rows in _split(policy, batch, settings, way, ranks.size)[ranks.rank]:
        if len(rows):
            yield rows, batch.select(rows), True
        else:
            shortest = batch.lengths_B.masked_fill(batch.lengths_B == 0, 2**31).argmin()[None]
            part = batch.select(shortest)
            yield shortest, replace(part, mask_BT=torch.zeros_like(part.mask_BT)), False


def _forward(
    policy: Callable[..., Any], batch: RolloutBatch, is_packed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and tokens of one forward pass, [B, T, ...]; packed, of one row of N tokens."""
    if not is_packed:
        # Padding is on the right, where no token of a causal model attends to it.
        return policy(input_ids=batch.tokens_BT).logits, batch.tokens_BT
    is_token_BT = batch.attention_mask_BT
    tokens_1N = batch.tokens_BT[is_token_BT][None]
    positions_1N = batch.position_ids_BT[is_token_BT][None]  # begin anew at each rollout
    output = policy(input_ids=tokens_1N, position_ids=positions_1N, use_cache=False)
    return output.logits, tokens_1N


def _replayed(
    policy: Callable[..., Any], batch: RolloutBatch, settings: UpdateSettings, way: Way
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
    routing = batch.routing_BTLK[is_token_BT][None] if way == "packed" else batch.routing_BTLK
    return replay_routing(policy, routing)


def _unpacked(values: torch.Tensor, batch: RolloutBatch) -> torch.Tensor:
    """Return a column of a packed pass as [B, T]."""
    is_token_BT = batch.attention_mask_BT
    values_BT = values.new_zeros(is_token_BT.shape).masked_scatter(is_token_BT, values)
    # The end of the rollout before it has scored a rollout's first token.
    return values_BT.masked_fill(batch.position_ids_BT == 0, 0.0)


def _logprobs_and_entropies(
    policy: Callable[..., Any],
    batch: RolloutBatch,
    settings: UpdateSettings,
    way: Way,
    entropy_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return those of one pass, [B, T] each; by trees, 0 where no token is trained.

    `entropy_gradient`: a plain pass then keeps another tensor of the logits' size until its
    backward pass.
    """
    if way == "trees" and bool(batch.mask_BT.any()):
        assert isinstance(policy, nn.Module), "other policies have no trees"
        return tree_logprobs(policy, batch.tokens_BT, batch.mask_BT, settings.temperature)
    logits, tokens = _forward(policy, batch, is_packed=way == "packed")
    if entropy_gradient:
        columns = token_logprobs(logits, tokens, settings.temperature, return_entropy=True)
    else:
        logprobs = token_logprobs(logits, tokens, settings.temperature)
        columns = logprobs, token_entropies(logits, settings.temperature)
    if way != "packed":
        return columns
    return _unpacked(columns[0], batch), _unpacked(columns[1], batch)


@torch.no_grad()
def compute_logprobs(
    policy: Callable[..., Any],
    batch: RolloutBatch,
    settings: UpdateSettings,
    ranks: TrainerRanks = ALONE,
) -> torch.Tensor:
    """Return log-probs [B, T] without a gradient, 0 where `mask_BT` is False.

    They are of a reference, or of the policy before an update. All `ranks` call it with the same
    batch, and each gets those of all rows.
    Raises ConfigError where `is_packed` would let rollouts attend to each other.
    """
    way = _way_of(policy, batch, settings)
    logprobs_BT = torch.zeros(batch.tokens_BT.shape, device=batch.tokens_BT.device)
    for rows, part, is_own in _passes(policy, batch, settings, ranks, way):
        with _replayed(policy, part, settings, way):
            own_BT, _ = _logprobs_and_entropies(policy, part, settings, way, entropy_gradient=False)
        if is_own:
            logprobs_BT[rows, : part.tokens_BT.shape[1]] = own_BT
    return ranks.sum(logprobs_BT).masked_fill(~batch.mask_BT, 0.0)


def accumulate_gradients(
    policy: Callable[..., Any],
    batch: RolloutBatch,
    columns: dict[str, torch.Tensor],
    config: PolicyLossConfig,
    settings: UpdateSettings,
    ranks: TrainerRanks = ALONE,
) -> dict[str, float]:
    """Add the gradient of the loss on `batch` to the parameters, micro-batch by micro-batch.

    `columns`: `advantages_BT` and what else `policy_loss` takes, [B, T] each. Returns its metrics,
    of the whole batch (`merged_metrics`).
    All `ranks` call it with the same batch and compute a part of it each; the gradient of the whole
    batch is the mean of theirs, which FSDP and DDP take.
    Raises ConfigError where `is_packed` would let rollouts attend to each other.
    """
    way = _way_of(policy, batch, settings)
    rollout_tokens_B = batch.rollout_tokens_B
    denominator = float(
        aggregation_denominator(batch.mask_BT, config.resolved_aggregation, rollout_tokens_B)
    )
    entropy_gradient = config.entropy_coefficient > 0.0
    reports = []
    for rows, part, _ in _passes(policy, batch, settings, ranks, way):
        own = {name: column[rows, : part.tokens_BT.shape[1]] for name, column in columns.items()}
        with _replayed(policy, part, settings, way):  # backward as well: layers may run again
            logprobs_BT, entropies_BT = _logprobs_and_entropies(
                policy, part, settings, way, entropy_gradient
            )
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
            (loss * ranks.size).backward()
        reports.append((metrics, int(part.mask_BT.sum())))
    return merged_metrics(ranks.gather(reports))


def update_policy(
    policy: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: RolloutBatch,
    columns: dict[str, torch.Tensor],
    config: PolicyLossConfig,
    settings: UpdateSettings,
    ranks: TrainerRanks = ALONE,
    guard: GuardedStep | None = None,
) -> list[dict[str, float]]:
    """All optimizer steps on `batch`; the metrics of each, with `grad_norm` before clipping.

    A step whose gradient is not finite is skipped: its row is {"skipped_steps": 1.0} alone.
    `guard`: of `optimizer`, kept by the caller, so that skipped steps in a row are counted over
    calls; None counts those of this call. There is no row for a batch without a trained token.
    All `ranks` call it with the same batch, and have drawn as many random numbers.
    `columns`: see `accumulate_gradients`. The log-probs that the ratio is clipped around stay the
    same in all steps: proximal ones (of `compute_logprobs`, before the first step) if they are
    among the columns, else the engine's. Source of the passes: GRPO, Shao et al. 2024, arXiv
    2402.03300, algorithm 1, line 10.
    """
    guard = guard or GuardedStep(
        optimizer, settings.max_grad_norm, settings.max_skipped_steps, ranks
    )
    reports = []
    for _ in range(settings.num_iterations):
        for rows in batch.split_rollouts(settings.num_minibatches):
            part = batch.select(rows)
            width = part.tokens_BT.shape[1]
            own = {name: column[rows, :width] for name, column in columns.items()}
            optimizer.zero_grad()
            metrics = accumulate_gradients(policy, part, own, config, settings, ranks)
            norm, is_done = guard.step([policy], part)
            done = {**metrics, "grad_norm": norm, "skipped_steps": 0.0}
            reports.append(done if is_done else {"skipped_steps": 1.0})
    return reports
