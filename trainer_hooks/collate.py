"""Finished rollouts as the padded tensors a trainer computes with.

Shape letters: B rollouts, T positions of prompt + completion, right padded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
from torch.nn.utils.rnn import pad_sequence

from rollout.errors import ConfigError
from rollout.requests import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from trainer_hooks.rollouts import Rollout, as_rollout

# The distribution of the behaviour log-probs: the one a trainer recomputes, or that of the draw.
TrainedLogprobs = Literal["temperature", "processed"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutBatch:
    """One row per rollout, in the order it was given; CPU tensors.

    `mask_BT` is True on the generated tokens, of all turns, of rollouts that did not fail; not on
    prompts and tool output. Log-probs, lags and staleness are 0 where it is False; column t belongs
    to token t.
    `prompt_lengths_B`: tokens before the first generated one. `completion_lengths_B`: generated
    tokens, of all turns, also of failed rollouts, without tool output. `lengths_B`: all tokens.
    `policy_lag_BT`: train_version - version that sampled the token.
    `kv_lag_BT`: version that sampled the token - mean version of the KV it attended to then.
    `kv_staleness_BT`: train_version - version that wrote the token's own KV entry.
    `rewards_B`: NaN for a failed rollout. `is_truncated_B`: the length limit cut its last turn.
    """

    tokens_BT: torch.Tensor  # int64
    position_ids_BT: torch.Tensor  # int64, from 0
    attention_mask_BT: torch.Tensor  # bool, False on padding
    mask_BT: torch.Tensor  # bool
    behaviour_logprobs_BT: torch.Tensor  # float32
    policy_lag_BT: torch.Tensor  # int32
    kv_lag_BT: torch.Tensor  # float32
    kv_staleness_BT: torch.Tensor  # int32
    rewards_B: torch.Tensor  # float32
    prompt_lengths_B: torch.Tensor  # int64
    completion_lengths_B: torch.Tensor  # int64
    lengths_B: torch.Tensor  # int64
    is_truncated_B: torch.Tensor  # bool
    train_version: int

    def __len__(self) -> int:
        """Number of rollouts."""
        return len(self.rewards_B)

    def without_truncated(self) -> RolloutBatch:
        """The same rollouts, of which those that were cut are not trained on.

        Their rewards stay, for the baseline of their group. Source: DAPO, "overlong filtering" (Yu
        et al. 2025), arXiv 2503.14476, sec. 3.4; TRL's `mask_truncated_completions`.
        """
        return replace(self, mask_BT=self.mask_BT & ~self.is_truncated_B[:, None])

    def select(self, rows: torch.Tensor) -> RolloutBatch:
        """The rollouts that an index or bool tensor names, cut to the longest of them."""
        lengths_B = self.lengths_B[rows]
        num_positions = int(lengths_B.max()) if len(lengths_B) else 0
        chosen: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                value = value[rows]
                value = value[:, :num_positions] if value.dim() == 2 else value
            chosen[field.name] = value
        return RolloutBatch(**chosen)


def collate_rollouts(
    requests: Sequence[DynamicInferenceRequest | Rollout],
    rewards: Sequence[float | None] | torch.Tensor,
    train_version: int,
    temperature: float = 1.0,
    pad_id: int = 0,
    logprobs_mode: TrainedLogprobs | None = None,
) -> RolloutBatch:
    """The batch of merged `requests` and their `rewards`, to be trained on at `train_version`.

    A sample of several turns is a Rollout of their requests. `temperature` is the one the trainer
    divides its logits by. `logprobs_mode`: what the engine's log-probs have to be; None takes those
    of the mode sampled with. `temperature`: what the trainer recomputes, so that ratios start from
    1. `processed`: the true probability of the draw; with truncation (top_k, top_p, min_p) ratios
    to it start below 1, and the loss wants proximal log-probs. A reward of None or NaN, like a
    request that failed, marks a failed rollout: it is masked out, never scored 0.
    Raises ConfigError if log-probs are missing or of another mode or temperature, naming both, if
    there is not one reward per request, and for a token sampled after `train_version`.
    """
    if not requests or len(requests) != len(rewards):
        raise ConfigError(
            f"{len(requests)} requests and {len(rewards)} rewards; one reward per request, and at "
            "least one, is wanted"
        )
    rollouts = [as_rollout(request) for request in requests]
    rewards_B = torch.tensor(
        [
            _reward_or_nan(reward) if rollout.succeeded() else math.nan
            for rollout, reward in zip(rollouts, rewards, strict=True)
        ]
    )
    rows = [_untrained_row(rollout) for rollout in rollouts]
    turns = [turn.sampling_params for rollout in rollouts for turn in rollout.requests]
    is_processed = any(params and params.logprobs_mode == "processed" for params in turns)
    wanted = logprobs_mode or ("processed" if is_processed else "temperature")
    for row, rollout, reward in zip(rows, rollouts, rewards_B.tolist(), strict=True):
        if not math.isnan(reward):
            for turn in rollout.requests:
                params = turn.sampling_params or SamplingParams()
                check_logprobs_match(params, temperature, wanted)
                _mark_turn(row, turn, train_version)
    padded = {
        name: pad_sequence(
            [row[name] for row in rows],
            batch_first=True,
            padding_value=pad_id if name == "tokens_BT" else 0,
        )
        for name in rows[0]
    }
    return RolloutBatch(
        **padded,
        rewards_B=rewards_B,
        prompt_lengths_B=torch.tensor([rollout.num_prompt_tokens for rollout in rollouts]),
        completion_lengths_B=torch.tensor([rollout.num_generated_tokens for rollout in rollouts]),
        lengths_B=torch.tensor([rollout.num_tokens for rollout in rollouts]),
        is_truncated_B=torch.tensor(
            [rollout.requests[-1].finish_reason == "length" for rollout in rollouts]
        ),
        train_version=train_version,
    )


def _untrained_row(rollout: Rollout) -> dict[str, torch.Tensor]:
    """One rollout without padding; its mask is still empty."""
    tokens_T = rollout.tokens_T
    num_tokens = len(tokens_T)
    return {
        "tokens_BT": tokens_T,
        "position_ids_BT": torch.arange(num_tokens),
        "attention_mask_BT": torch.ones(num_tokens, dtype=torch.bool),
        "mask_BT": torch.zeros(num_tokens, dtype=torch.bool),
        "behaviour_logprobs_BT": torch.zeros(num_tokens),
        "policy_lag_BT": torch.zeros(num_tokens, dtype=torch.int32),
        "kv_lag_BT": torch.zeros(num_tokens),
        "kv_staleness_BT": torch.zeros(num_tokens, dtype=torch.int32),
    }


def _mark_turn(
    row: dict[str, torch.Tensor],
    request: DynamicInferenceRequest,
    train_version: int,
) -> None:
    """Write the mask, log-probs and lags of the tokens that `request` generated into `row`."""
    versions = request.policy_versions
    if len(versions) and int(versions.max()) > train_version:
        raise ConfigError(
            f"train_version={train_version} is older than version {int(versions.max())} that "
            f"sampled a token of request {request.request_id}; pass the version being trained"
        )
    kv_versions = torch.tensor(request.context_kv_version_mean, dtype=torch.float32)
    start, end = len(request.prompt_tokens), request.num_tokens
    row["mask_BT"][start:end] = True
    row["behaviour_logprobs_BT"][start:end] = _behaviour_logprobs(request)
    row["policy_lag_BT"][start:end] = train_version - versions
    row["kv_lag_BT"][start:end] = versions - kv_versions
    row["kv_staleness_BT"][start:end] = request.staleness_at(train_version)[1][start:]


def check_logprobs_match(
    params: SamplingParams, temperature: float, logprobs_mode: TrainedLogprobs = "temperature"
) -> None:
    """Refuse log-probs that are not what the trainer, dividing its logits by `temperature`, wants.

    Without truncation, biases and penalties both modes are the same number, and at temperature 1
    `raw` is too. With them the mode sampled with must be the one wanted; `raw` does not say which
    is meant.
    Raises ConfigError naming the mode and temperature of both sides.
    """
    if logprobs_mode not in get_args(TrainedLogprobs):
        known = ", ".join(map(repr, get_args(TrainedLogprobs)))
        raise ConfigError(f"logprobs_mode={logprobs_mode!r} is not known; choose one of {known}")
    if not temperature > 0.0:
        raise ConfigError(f"temperature={temperature} must be above 0; greedy tokens train nothing")
    if not params.return_log_probs:
        raise ConfigError("the rollouts carry no log-probs; sample with return_log_probs=True")
    mode, reshaping = params.logprobs_mode, _reshaping(params)
    is_same_mode = mode == logprobs_mode or (
        not reshaping and (mode != "raw" or params.temperature == 1.0)
    )
    if params.temperature != temperature or not is_same_mode:
        remedy = f"sample with logprobs_mode={logprobs_mode!r} and temperature={temperature}"
        if mode == "processed" and params.temperature == temperature:
            remedy += (
                ", or pass logprobs_mode='processed' to collate_rollouts and proximal log-probs to "
                "the loss"
            )
        raise ConfigError(
            f"the rollouts' log-probs have logprobs_mode={mode!r} at temperature="
            f"{params.temperature}{reshaping and f' with {reshaping}'}, the trainer wants "
            f"logprobs_mode={logprobs_mode!r} at temperature={temperature}; {remedy}"
        )


def trained_logprobs(params: SamplingParams, temperature: float) -> TrainedLogprobs:
    """The mode of the log-probs of rollouts sampled with `params`, checked."""
    mode: TrainedLogprobs = "processed" if params.logprobs_mode == "processed" else "temperature"
    check_logprobs_match(params, temperature, mode)
    return mode


def _reshaping(params: SamplingParams) -> str:
    """The settings that draw from another distribution than that of the logits at the temperature,
    as they were given; empty if there are none.
    """
    settings = {
        "top_k": params.top_k > 0,
        "top_p": 0.0 < params.top_p < 1.0,
        "min_p": params.min_p > 0.0,
        "min_tokens": params.min_tokens > 0,
        "logit_bias": bool(params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids is not None,
        "repetition_penalty": params.repetition_penalty != 1.0,
        "presence_penalty": params.presence_penalty != 0.0,
        "frequency_penalty": params.frequency_penalty != 0.0,
    }
    return ", ".join(f"{name}={getattr(params, name)}" for name, is_on in settings.items() if is_on)


def _reward_or_nan(reward: float | None) -> float:
    """A reward as a number; None, which means the rollout failed, as NaN."""
    return math.nan if reward is None else float(reward)


def _behaviour_logprobs(request: DynamicInferenceRequest) -> torch.Tensor:
    """Log-probs of the generated tokens, float32; refused if one is missing."""
    logprobs = request.generated_log_probs
    if logprobs is None or len(logprobs) != len(request.generated_tokens):
        raise ConfigError(
            f"request {request.request_id} has {len(request.generated_tokens)} generated tokens "
            f"and {0 if logprobs is None else len(logprobs)} log-probs"
        )
    logprobs = torch.as_tensor(logprobs, dtype=torch.float32)
    if bool(logprobs.isnan().any()):
        raise ConfigError(f"request {request.request_id} has a token without a log-prob")
    return logprobs
