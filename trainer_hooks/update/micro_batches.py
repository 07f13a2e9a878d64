"""The update of a policy on a `RolloutBatch`, in micro-batches of a limited number of tokens.

Used by users' training loops, `trainer_hooks.train.learner` and `trainer_hooks.update.reference`.
Call `compute_logprobs` before the first optimizer step if the loss needs proximal log-probs. Then
call `update_policy`, or `accumulate_gradients` and an optimizer of your own. `accumulate_gradients`
writes the policy's gradients, and `update_policy` also its weights.

Shape letters: B rows, each a token sequence of a rollout, T positions, N tokens of all rows without
padding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
from trainer_hooks.update.guarded_step import GuardedStep
from trainer_hooks.update.lean_passes import checkpointed_layers
from trainer_hooks.update.packing import require_separate_rollouts
from trainer_hooks.update.settings import DEFAULT_MAX_SKIPPED_STEPS, MaxSkippedSteps
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

MAX_NODES = 16_384  # limit on a tree of several rows: its attention mask takes 256 MiB

# Keywords of TRL, verl and OpenRLHF, and the names of the same settings here.
UPDATE_HINTS = {
    **dict.fromkeys(("ppo_epochs", "num_ppo_epochs", "num_epochs", "max_epochs"), "num_iterations"),
    **dict.fromkeys(("ppo_mini_batch_size", "mini_batch_size"), "num_minibatches, their number"),
    **dict.fromkeys(("steps_per_generation", "num_mini_batches"), "num_minibatches"),
    **dict.fromkeys(("ppo_max_token_len_per_gpu", "max_tokens_per_gpu"), "max_tokens"),
    **dict.fromkeys(("micro_batch_size", "max_tokens_per_forward"), "max_tokens of a pass"),
    **dict.fromkeys(("use_remove_padding", "packing"), "is_packed"),
    **dict.fromkeys(("use_prefix_grouper", "enable_tree_training"), "share_prefixes"),
    **dict.fromkeys(("grad_clip", "clip_grad", "max_norm"), "max_grad_norm"),
    **dict.fromkeys(("enable_gradient_checkpointing", "recompute"), "gradient_checkpointing"),
    **dict.fromkeys(("bf16", "mixed_precision"), "autocast='bfloat16'"),
}


@refuses_with_hints(UPDATE_HINTS, ConfigError)
@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """How a batch is divided into optimizer steps and forward passes.

    `num_iterations`: number of passes over the batch.
    `num_minibatches`: number of optimizer steps of each pass, at most one for each rollout. Each
    step takes a random part of the rollouts (`RolloutBatch.split_rollouts`).
    `max_tokens`: limit on the tokens of a forward pass, with padding. None sets no limit. Whole
    rows then take one forward pass per optimizer step.
    `is_packed`: True concatenates the rollouts of a forward pass to a single row without padding.
    The model must separate the rollouts by their position ids. Another model is refused at its
    first packed pass.
    `share_prefixes`: True computes the common beginning of rows once, such as a group's prompt or a
    system prompt. Only the logits of trained tokens are computed. `max_tokens` then limits the
    tokens that are computed. Gradients equal those of whole rows up to rounding. Whole rows, packed
    or padded, are still computed for models whose gradients differ (`tree_fault`), for routing
    replay, and for rows beyond a model's sliding window.
    `temperature`: divisor of the logits, as in the rollouts' sampling.
    `max_grad_norm`: norm to which larger gradients are scaled down.
    `max_skipped_steps`: number of successive skipped steps at which GuardedStep raises.
    `replay_routing`: True makes each pass use the experts that sampled the tokens (see
    `trainer_hooks.replay_routing`). The batch must be collated with routing=True.
    `gradient_checkpointing`: True keeps only the inputs of each layer for the backward pass, which
    computes the layer again (`checkpointed_layers`). Gradients are the same.
    `autocast`: "bfloat16" computes products in bfloat16 by torch.autocast. Weights and gradients
    stay in float32.
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
    gradient_checkpointing: bool = False
    autocast: Literal["bfloat16"] | None = None

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)


def split_micro_batches(
    lengths_B: torch.Tensor, max_tokens: int | None, is_packed: bool = False
) -> list[torch.Tensor]:
    """Return the row indices of each micro-batch.

    `lengths_B`: number of tokens of each row. Rows without a token are left out.
    `max_tokens`: limit on the tokens of a micro-batch. None puts all rows into one micro-batch. A
    packed micro-batch has the sum of its rows' lengths. A padded one has its number of rows times
    its longest row.
    Rows are placed longest first, each into the fullest micro-batch that has room for it (best
    fit). Raises ConfigError for a row longer than `max_tokens`.
    """
    if max_tokens is None:
        rows = lengths_B.nonzero().flatten()
        return [rows] if len(rows) else []
    lengths = lengths_B.tolist()
    longest_first = lengths_B.argsort(descending=True, stable=True).tolist()
    order = [row for row in longest_first if lengths[row]]
    _require_room(max((lengths[row] for row in order), default=0), max_tokens)
    parts: list[list[int]] = []
    room: list[int] = []  # number of tokens that still fit into each part
    for row in order:
        # With padding, each row costs as much as the first, longest row of its part.
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


def _require_room(longest: int, max_tokens: int | None) -> None:
    if max_tokens is not None and longest > max_tokens:
        raise ConfigError(
            f"max_tokens={max_tokens} is less than the {longest} tokens of a rollout; "
            "raise it to the longest rollout"
        )


def split_among_ranks(
    lengths_B: torch.Tensor, settings: UpdateSettings, num_ranks: int
) -> list[list[torch.Tensor]]:
    """Return for each rank the row indices of each of its forward passes.

    Each row with a token occurs once. The ranks get about equal numbers of tokens. A rank with
    fewer passes than others gets empty ones at its end, because a pass of a sharded model is a
    collective. Raises ConfigError for a row longer than `settings.max_tokens`.
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


@lru_cache(64)  # once for each pair
def _log_once(model: str, reason: str) -> None:
    logger.info("%s computes each row whole, shared prefixes as well: %s", model, reason)


def _split(
    policy: Callable[..., Any],
    batch: RolloutBatch,
    settings: UpdateSettings,
    way: Way,
    num_ranks: int,
) -> list[list[torch.Tensor]]:
    if way != "trees":
        return split_among_ranks(batch.lengths_B, settings, num_ranks)
    rows = rows_before_last(batch.tokens_BT, batch.mask_BT)
    trained = [index for index, row in enumerate(rows) if row]
    longest = max(len(rows[index]) for index in trained)
    _require_room(longest, settings.max_tokens)
    cost, max_nodes = pair_cost(policy), min(settings.max_tokens or MAX_NODES, MAX_NODES)
    passes = []
    for own in contiguous_parts([rows[index] for index in trained], num_ranks):
        indices = [trained[index] for index in own]
        trees = split_into_trees([rows[index] for index in indices], max_nodes, cost)
        passes.append([torch.tensor([indices[i] for i in tree]) for tree in trees])
    return _filled(passes)


def _filled(passes: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    most = max(map(len, passes))
    return [own + [torch.zeros(0, dtype=torch.long)] * (most - len(own)) for own in passes]


def _passes(
    policy: Callable[..., Any],
    batch: RolloutBatch,
    settings: UpdateSettings,
    ranks: TrainerRanks,
    way: Way,
) -> Iterator[tuple[torch.Tensor, RolloutBatch, bool]]:
    """Yield each pass of this rank: its row indices, its batch, and whether its result counts."""
    for rows in _split(policy, batch, settings, way, ranks.size)[ranks.rank]:
        if len(rows):
            yield rows, batch.select(rows), True
        else:  # the shortest row with an empty mask, since a pass can be a collective
            shortest = batch.lengths_B.masked_fill(batch.lengths_B == 0, 2**31).argmin()[None]
            part = batch.select(shortest)
            yield shortest, replace(part, mask_BT=torch.zeros_like(part.mask_BT)), False


def _forward(
    policy: Callable[..., Any], batch: RolloutBatch, settings: UpdateSettings, is_packed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits and the tokens of one pass, [B, T, ...], or [1, N, ...] if packed."""
    if not is_packed:
        # Padding is on the right, where no token of a causal model attends to it, so no mask.
        # A layer that is computed again must not extend a KV cache again.
        options = {"use_cache": False} if settings.gradient_checkpointing else {}
        return policy(input_ids=batch.tokens_BT, **options).logits, batch.tokens_BT
    is_token_BT = batch.attention_mask_BT
    tokens_1N = batch.tokens_BT[is_token_BT][None]
    positions_1N = batch.position_ids_BT[is_token_BT][None]  # each rollout starts at 0
    output = policy(input_ids=tokens_1N, position_ids=positions_1N, use_cache=False)
    return output.logits, tokens_1N


def _replayed(
    policy: Callable[..., Any], batch: RolloutBatch, settings: UpdateSettings, way: Way
) -> AbstractContextManager[None]:
    if not settings.replay_routing:
        return nullcontext()
    if batch.routing_BTLK is None and bool(batch.mask_BT.any()):
        raise ConfigError(
            "replay_routing=True needs a batch with routing_BTLK: set record_routing=True for the "
            "engine and routing=True for collate_rollouts"
        )
    if not isinstance(policy, nn.Module):
        raise ConfigError(
            f"replay_routing=True needs an nn.Module as the policy, not a {type(policy).__name__}"
        )
    if batch.routing_BTLK is None:  # every rollout failed before the engine computed a token
        return nullcontext()
    is_token_BT = batch.attention_mask_BT
    routing = batch.routing_BTLK[is_token_BT][None] if way == "packed" else batch.routing_BTLK
    return replay_routing(policy, routing)


def _unpacked(values: torch.Tensor, batch: RolloutBatch) -> torch.Tensor:
    is_token_BT = batch.attention_mask_BT
    values_BT = values.new_zeros(is_token_BT.shape).masked_scatter(is_token_BT, values)
    # The log-prob of a rollout's first token came from the last logits of the rollout before it.
    return values_BT.masked_fill(batch.position_ids_BT == 0, 0.0)


@contextmanager
def _computing(
    policy: Callable[..., Any], settings: UpdateSettings, device: torch.device
) -> Iterator[None]:
    with ExitStack() as stack:
        if settings.gradient_checkpointing:
            stack.enter_context(checkpointed_layers(policy))
        if settings.autocast is not None:
            dtype: torch.dtype = getattr(torch, settings.autocast)
            stack.enter_context(torch.autocast(device.type, dtype=dtype))
        yield


def _logprobs_and_entropies(
    policy: Callable[..., Any],
    batch: RolloutBatch,
    settings: UpdateSettings,
    way: Way,
    entropy_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies of one forward pass, [B, T] each."""
    with _computing(policy, settings, batch.tokens_BT.device):
        if way == "trees" and bool(batch.mask_BT.any()):  # leaves 0 where no token is trained
            assert isinstance(policy, nn.Module), "other policies have no trees"
            return tree_logprobs(policy, batch.tokens_BT, batch.mask_BT, settings.temperature)
        logits, tokens = _forward(policy, batch, settings, is_packed=way == "packed")
    # A gradient of the entropies would keep another tensor of the logits' size.
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
    """Return the log-probs [B, T] of trained tokens under `policy`, without a gradient.

    The result is 0 where `mask_BT` is False.
    `policy`: the reference, or the policy before an update (for proximal log-probs).
    All `ranks` call this with the same batch. Each computes a part and gets the log-probs of all
    rows.
    Raises ConfigError for a policy that mixes packed rollouts, for a row longer than
    `settings.max_tokens`, and for replay without recorded routing.
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
    """Add the gradient of the loss on `batch` to the policy's gradients, in micro-batches.

    `columns`: `advantages_BT` and further arguments of `policy_loss`, each [B, T]. The advantages
    may be [B, 1].
    Returns the metrics of `policy_loss` for the whole batch.
    All `ranks` call this with the same batch, and each computes a part of it. Each rank scales its
    loss by the number of ranks. The mean over ranks, which FSDP and DDP take, is then the gradient
    of the batch.
    Raises ConfigError in the cases of `compute_logprobs` and of `policy_loss`.
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
    """Make all optimizer steps on `batch`. Returns the metrics of each step.

    The metrics of a step are those of `accumulate_gradients`, `skipped_steps` (0), and `grad_norm`,
    the norm before clipping. A step whose gradient is not finite is skipped, and its only metric is
    `skipped_steps` (1). A batch without a trained token has no steps.
    `columns`: as for `accumulate_gradients`. The ratio is clipped around the column
    `proximal_logprobs_BT`, which `compute_logprobs` returns before the first step. Without this
    column it is clipped around the engine's log-probs. All steps use the same values.
    `guard`: GuardedStep of `optimizer` that the caller keeps to count successive skipped steps
    across calls. None counts within this call.
    All `ranks` call this with the same batch and equal states of torch's generator.
    Raises the ConfigErrors of `accumulate_gradients`, and the NonFiniteGradientError of
    GuardedStep.
    Source of the passes: GRPO, Shao et al. 2024, arXiv 2402.03300, algorithm 1, line 10.
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
