"""The policy that a KL term holds the trained one near."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rollout.errors import ConfigError
from rollout.keyword_hints import refuses_with_hints
from rollout.ranges import PositiveFraction, PositiveInt, check_fields
from trainer_hooks.collate import RolloutBatch
from trainer_hooks.update.micro_batches import UpdateSettings, compute_logprobs
from trainer_hooks.weight_sync.trainer_ranks import ALONE, TrainerRanks

# Keywords of TRL, and what they are called here.
REFERENCE_HINTS = {
    "sync_ref_model": "set by sync_interval",
    "ref_model_sync_steps": "sync_interval",
    "ref_model_mixup_alpha": "sync_weight",
}


@refuses_with_hints(REFERENCE_HINTS, ConfigError)
@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSettings:
    """Whether the reference follows the policy, and how.

    `sync_interval`: training steps between two moves; None: it stays. `sync_weight`: of the policy
    in a move; 1 takes its weights, and with an interval of 1 a small one makes the reference an
    exponential moving average. TRL's `ref_model_sync_steps` and `ref_model_mixup_alpha`.
    Raises ConfigError for a value out of its range.
    """

    sync_interval: PositiveInt | None = None
    sync_weight: PositiveFraction = 1.0

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.sync_interval is None and self.sync_weight != 1.0:
            raise ConfigError(
                f"sync_weight={self.sync_weight} without sync_interval, with which the reference "
                "stays as it is; set sync_interval, or leave sync_weight out"
            )


class ReferencePolicy:
    """The policy that a KL term holds the trained one near: a copy, or the policy without LoRA."""

    def __init__(
        self,
        model: Any,
        adapter_off: Callable[[], AbstractContextManager[Any]] = nullcontext,
        settings: ReferenceSettings | None = None,
    ) -> None:
        """See `copy_of` and `without_adapter`. `model`: used as it is, and not trained.

        Raises ConfigError for a base model that is to follow its adapter.
        """
        self._model, self._adapter_off = model, adapter_off
        self._settings = settings or ReferenceSettings()
        if self._settings.sync_interval is not None and adapter_off is not nullcontext:
            raise ConfigError(
                f"sync_interval={self._settings.sync_interval} with the policy without its adapter "
                "as the reference, which cannot follow; take a copy"
            )

    @classmethod
    def copy_of(
        cls, policy: nn.Module, settings: ReferenceSettings | None = None
    ) -> ReferencePolicy:
        """The weights as they are now, in memory of their own."""
        return cls(copy.deepcopy(policy).eval().requires_grad_(False), settings=settings)

    @classmethod
    def without_adapter(cls, policy: Any) -> ReferencePolicy:
        """The base model of a PEFT model, by its `disable_adapter()`; needs no memory."""
        return cls(policy, policy.disable_adapter)

    def logprobs(
        self, batch: RolloutBatch, settings: UpdateSettings, ranks: TrainerRanks = ALONE
    ) -> torch.Tensor:
        """Log-probs [B, T], for `reference_logprobs_BT`. Its routers choose by themselves.

        All `ranks` call it with the same batch, and compute a part of it each.
        """
        own = replace(settings, replay_routing=False)
        with self._adapter_off():
            return compute_logprobs(self._model, batch, own, ranks)

    @torch.no_grad()
    def follow(self, policy: nn.Module, step: int) -> bool:
        """Move towards `policy`, if training step `step`, from 1, is one to do so.

        weights = sync_weight * policy + (1 - sync_weight) * weights; returns whether it moved.
        Source: TR-DPO (Gorbatovski et al. 2024), arXiv 2404.09656.
        """
        interval, weight = self._settings.sync_interval, self._settings.sync_weight
        if interval is None or step % interval:
            return False
        pairs = zip(self._model.parameters(), policy.parameters(), strict=True)
        for own, theirs in pairs:
            own.lerp_(theirs.to(own), weight)
        return True

    def state_dict(self) -> dict[str, Any]:
        """The weights, for a checkpoint, if they move; else {}."""
        return self._model.state_dict() if self._settings.sync_interval is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Raises ConfigError for that of one that did not move."""
        if self._settings.sync_interval is None:
            return
        if not state:
            raise ConfigError(
                f"sync_interval={self._settings.sync_interval}, but the checkpoint is of a run "
                "whose reference stayed; resume with the settings that the run began with"
            )
        self._model.load_state_dict(state)
