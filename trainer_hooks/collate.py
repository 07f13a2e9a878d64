"""collate_rollouts: makes the padded tensors of a RolloutBatch from finished rollouts.

Used by users' training loops and `trainer_hooks.producer.producer`. RolloutBatch is read by
`trainer_hooks.update`, `trainer_hooks.metrics.measure`, `trainer_hooks.producer.batches`,
`trainer_hooks.train.samples` and `trainer_hooks.doctor`. Arguments are not changed.

Shape letters: R rollouts, B rows, T positions of prompt and completion (padded on the right), L
layers with experts, K experts of a token, P prompts, G rollouts of a prompt. A row is one token
sequence of a rollout. Most rollouts have one row.
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
from rollout.requests.routing import UNKNOWN, first_known
from rollout.sampling_params import SamplingParams
from trainer_hooks.rollouts import Rollout, as_rollout, sequence_tokens

# Distribution of the behaviour log-probs. "temperature": softmax of logits / temperature, as a
# trainer recomputes it. "processed": distribution after truncation, biases and penalties.
TrainedLogprobs = Literal["temperature", "processed"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutBatch:
    """CPU tensors of a batch, one row per token sequence. The rows of a rollout are adjacent.

    Column t belongs to token t. B equals R if every rollout has one token sequence (see `Rollout`).
    `mask_BT`: True on the tokens to train on, which are the generated tokens of rollouts that did
    not fail. False on prompts, tool output and padding. `collate_rollouts` sets log-probs, lags and
    staleness to 0 where the mask is False.
    `rewards_R`: reward of each rollout, NaN for a failed one.
    `rollout_index_B`: index of each row's rollout.
    `prompt_lengths_B`: number of tokens before the row's first generated token.
    `completion_lengths_B`: number of the row's generated tokens, without tool output. Tokens of
    failed rollouts count.
    `lengths_B`: number of the row's tokens.
    `policy_lag_BT`: `train_version` minus the version that sampled the token.
    `kv_lag_BT`: version that sampled the token, minus the mean version of the KV entries it
    attended to.
    `kv_staleness_BT`: `train_version` minus the version that wrote the token's own KV entry.
    `is_truncated_B`: True if a length or turn limit ended the rollout.
    `routing_BTLK`: experts that computed each token, for `replay_routing`. -1 where no engine pass
    computed the token, as for padding and the last token of a sequence. None if no routing was
    recorded or requested.
    """

    tokens_BT: torch.Tensor  # int64
    position_ids_BT: torch.Tensor  # int64, from 0
    attention_mask_BT: torch.Tensor  # bool, False on padding
    mask_BT: torch.Tensor  # bool
    behaviour_logprobs_BT: torch.Tensor  # float32
    policy_lag_BT: torch.Tensor  # int32
    kv_lag_BT: torch.Tensor  # float32
    kv_staleness_BT: torch.Tensor  # int32
    rewards_R: torch.Tensor  # float32
    rollout_index_B: torch.Tensor  # int64, indices of rewards_R
    prompt_lengths_B: torch.Tensor  # int64
    completion_lengths_B: torch.Tensor  # int64
    lengths_B: torch.Tensor  # int64
    is_truncated_B: torch.Tensor  # bool
    train_version: int
    routing_BTLK: torch.Tensor | None = None  # int16

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.lengths_B)

    @property
    def num_rollouts(self) -> int:
        return len(self.rewards_R)

    @property
    def rewards_B(self) -> torch.Tensor:
        """Reward of each row, float32. Raises ConfigError if a rollout has several rows."""
        num_several = int((self.rollout_index_B.bincount(minlength=self.num_rollouts) > 1).sum())
        if num_several:
            raise ConfigError(
                f"{num_several} of {self.num_rollouts} rollouts have several token sequences, "
                f"{len(self)} rows in all, so rewards_B is not one reward per rollout; group "
                "rewards_R, and give each row its rollout's advantage: "
                "batch.per_row(group_advantages(batch.rewards_R.view(-1, group_size)))"
            )
        return self.rewards_R[self.rollout_index_B]

    @property
    def first_row_R(self) -> torch.Tensor:
        """Index of the first row of each rollout, int64."""
        rows_B = torch.arange(len(self))
        last_R = torch.full((self.num_rollouts,), len(self))
        return last_R.scatter_reduce(0, self.rollout_index_B, rows_B, "amin")

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name. `RolloutBatch(**batch.as_dict())` makes an equal batch."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def per_row(self, values_R: torch.Tensor) -> torch.Tensor:
        """Return each row's value in `values_R`, [B], the value of its rollout.

        `values_R`: one value per rollout, [R] or [P, G] with P * G = R. Raises ConfigError
        otherwise.
        """
        if values_R.numel() != self.num_rollouts:
            raise ConfigError(
                f"{values_R.numel()} values of shape {tuple(values_R.shape)} for "
                f"{self.num_rollouts} rollouts; pass one value for each rollout"
            )
        return values_R.reshape(-1)[self.rollout_index_B]

    def per_rollout(self, values_B: torch.Tensor) -> torch.Tensor:
        """Return the sums of `values_B` over the rows of each rollout, [R]."""
        return values_B.new_zeros(self.num_rollouts).index_add(0, self.rollout_index_B, values_B)

    @property
    def rollout_tokens_B(self) -> torch.Tensor:
        """For each row, the number of trained tokens in all rows of its rollout, int64."""
        return self.per_row(self.per_rollout(self.mask_BT.sum(dim=1)))

    def split_rollouts(
        self, num_parts: int, kept_R: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Split the rollouts at random into parts. Returns the row indices of each part.

        There are `num_parts` parts, or one per rollout if there are fewer rollouts. Parts differ by
        at most one rollout. All rows of a rollout are in one part. Rollouts without a trained
        token, or with False in `kept_R`, are left out. Draws from torch's generator.
        """
        is_trained_R = self.per_rollout(self.mask_BT.sum(dim=1)) > 0
        rollouts = (is_trained_R if kept_R is None else is_trained_R & kept_R).nonzero().flatten()
        rollouts = rollouts[torch.randperm(len(rollouts))]
        parts = rollouts.tensor_split(min(num_parts, len(rollouts))) if len(rollouts) else ()
        matches = (part[:, None] == self.rollout_index_B for part in parts)
        return [match.nonzero()[:, 1] for match in matches]

    def without_truncated(self) -> RolloutBatch:
        """Return the batch with False in `mask_BT` for all tokens of truncated rollouts.

        The rewards of truncated rollouts stay and count for the baseline of their group. Source:
        DAPO, "overlong filtering" (Yu et al. 2025), arXiv 2503.14476, sec. 3.4; TRL's
        `mask_truncated_completions`.
        """
        return replace(self, mask_BT=self.mask_BT & ~self.is_truncated_B[:, None])

    def select(self, rows: torch.Tensor) -> RolloutBatch:
        """Return a batch of the given rows and their rollouts, cut to the longest of these rows.

        `rows`: indices (int64) or a bool mask [B]. Rollouts are numbered from 0 in order.
        """
        lengths_B = self.lengths_B[rows]
        num_positions = int(lengths_B.max()) if len(lengths_B) else 0
        kept_R, index_B = self.rollout_index_B[rows].unique(return_inverse=True)
        chosen: dict[str, Any] = {"rewards_R": self.rewards_R[kept_R], "rollout_index_B": index_B}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor) and field.name not in chosen:
                value = value[rows]
                value = value[:, :num_positions] if value.dim() > 1 else value
            chosen.setdefault(field.name, value)
        return RolloutBatch(**chosen)


def collate_rollouts(
    requests: Sequence[DynamicInferenceRequest | Rollout],
    rewards: Sequence[float | None] | torch.Tensor,
    train_version: int,
    temperature: float = 1.0,
    pad_id: int = 0,
    logprobs_mode: TrainedLogprobs | None = None,
    routing: bool = False,
) -> RolloutBatch:
    """Return the batch of `requests` and their `rewards`.

    `requests`: finished requests, or Rollouts for samples of several turns.
    `rewards`: one per request. None or NaN marks a failed rollout, whose tokens are masked out.
    `train_version`: version of the weights to train. Lags count from it.
    `temperature`: divisor of the trainer's logits.
    `pad_id`: token id on padding.
    `logprobs_mode`: required mode of the engine's log-probs. "temperature" means the log-probs that
    the trainer recomputes, so importance ratios start at 1. "processed" means the probability with
    which each token was drawn. With top_k, top_p or min_p, "processed" makes the ratios start below
    1, and the loss needs proximal log-probs. None requires "processed" if a request was sampled in
    that mode, else "temperature".
    `routing`: True adds `routing_BTLK`. The engine needs record_routing=True.
    Raises ConfigError if there are no requests or not one reward for each. Raises ConfigError if a
    rollout that did not fail lacks log-probs, prompt tokens or requested routing, if its log-probs
    have another mode or temperature, or if a token was sampled after `train_version`.
    """
    rollouts = [as_rollout(request) for request in requests]
    rewards_R = _valid_rewards(rollouts, rewards)
    all_params = [turn.sampling_params for rollout in rollouts for turn in rollout.requests]
    is_processed = any(params and params.logprobs_mode == "processed" for params in all_params)
    wanted = logprobs_mode or ("processed" if is_processed else "temperature")
    sequences = [(i, turns) for i, each in enumerate(rollouts) for turns in each.sequences]
    rows = [_untrained_row(turns) for _, turns in sequences]
    for row, (i, turns) in zip(rows, sequences, strict=True):
        if not math.isnan(rewards_R[i]):
            for turn in turns:
                check_logprobs_match(turn.sampling_params or SamplingParams(), temperature, wanted)
                _mark_turn(row, turn, train_version)
                if routing:
                    _require_routing(turn)
    all_turns = [turns for _, turns in sequences]
    lengths = [len(row["tokens_BT"]) for row in rows]
    return RolloutBatch(
        **_padded(rows, pad_id),
        rewards_R=rewards_R,
        rollout_index_B=torch.tensor([i for i, _ in sequences]),
        prompt_lengths_B=torch.tensor([_num_prompt_tokens(turns) for turns in all_turns]),
        completion_lengths_B=torch.tensor(
            [sum(len(turn.generated_tokens) for turn in turns) for turns in all_turns]
        ),
        lengths_B=torch.tensor(lengths),
        is_truncated_B=torch.tensor([rollouts[i].finish_reason == "length" for i, _ in sequences]),
        train_version=train_version,
        routing_BTLK=_routing(all_turns, max(lengths)) if routing else None,
    )


def _valid_rewards(
    rollouts: Sequence[Rollout], rewards: Sequence[float | None] | torch.Tensor
) -> torch.Tensor:
    if not rollouts or len(rollouts) != len(rewards):
        raise ConfigError(
            f"{len(rollouts)} requests and {len(rewards)} rewards; there must be one reward per "
            "request, and at least one"
        )
    return torch.tensor(
        [
            _reward_or_nan(reward) if rollout.succeeded() else math.nan
            for rollout, reward in zip(rollouts, rewards, strict=True)
        ]
    )


def _routing(
    sequences: Sequence[Sequence[DynamicInferenceRequest]], num_positions: int
) -> torch.Tensor | None:
    rows = [
        first_known([turn.routing_indices for turn in turns], num_positions) for turns in sequences
    ]
    known = [row for row in rows if row is not None]
    if not known:
        return None
    if len(shapes := {tuple(row.shape[1:]) for row in known}) > 1:
        raise ConfigError(
            f"the rollouts' routing has several shapes, {sorted(shapes)}; all rollouts must come "
            "from one model"
        )
    unknown = torch.full_like(known[0], UNKNOWN)
    return torch.stack([unknown if row is None else row for row in rows])


def _require_routing(request: DynamicInferenceRequest) -> None:
    if request.routing_indices is None and request.num_generated_tokens:
        raise ConfigError(
            f"request {request.request_id} has no routing_indices, which routing=True needs; "
            "set record_routing=True for its engine"
        )


def _padded(rows: Sequence[dict[str, torch.Tensor]], pad_id: int) -> dict[str, torch.Tensor]:
    return {
        name: pad_sequence(
            [row[name] for row in rows],
            batch_first=True,
            padding_value=pad_id if name == "tokens_BT" else 0,
        )
        for name in rows[0]
    }


def _num_prompt_tokens(turns: Sequence[DynamicInferenceRequest]) -> int:
    return len(turns[0].prompt_tokens) if turns else 0


def _untrained_row(turns: Sequence[DynamicInferenceRequest]) -> dict[str, torch.Tensor]:
    tokens_T = sequence_tokens(turns)
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
    if not len(request.prompt_tokens):
        raise ConfigError(
            f"request {request.request_id} has no prompt tokens, and its log-probs would be "
            "computed without its prompt; sample with return_prompt_tokens=True"
        )
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
    """Raise ConfigError unless sampling with `params` gives the log-probs that the trainer needs.

    The sampling must return log-probs at `temperature`, the divisor of the trainer's logits.
    Sampling with truncation, biases or penalties must have the mode `logprobs_mode`. Other sampling
    may have the mode "temperature" or "processed", or "raw" at temperature 1.
    """
    if logprobs_mode not in get_args(TrainedLogprobs):
        known = ", ".join(map(repr, get_args(TrainedLogprobs)))
        raise ConfigError(f"logprobs_mode={logprobs_mode!r} is not known; choose one of {known}")
    if not temperature > 0.0:
        raise ConfigError(f"temperature={temperature} must be above 0; greedy tokens train nothing")
    if not params.return_log_probs:
        raise ConfigError("the rollouts carry no log-probs; sample with return_log_probs=True")
    mode, reshaping = params.logprobs_mode, reshaping_text(params)
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
            f"{params.temperature}{reshaping and f' with {reshaping}'}, the trainer needs "
            f"logprobs_mode={logprobs_mode!r} at temperature={temperature}; {remedy}"
        )


def logprobs_mode_of(params: SamplingParams, temperature: float) -> TrainedLogprobs:
    """Return the mode that `collate_rollouts` must require of rollouts sampled with `params`.

    Raises ConfigError if a trainer at `temperature` cannot use the log-probs of these rollouts.
    """
    mode: TrainedLogprobs = "processed" if params.logprobs_mode == "processed" else "temperature"
    check_logprobs_match(params, temperature, mode)
    return mode


def reshaping_text(params: SamplingParams) -> str:
    """Return the active settings of truncation, biases and penalties as text, or ""."""
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
    return math.nan if reward is None else float(reward)


def _behaviour_logprobs(request: DynamicInferenceRequest) -> torch.Tensor:
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
