"""ReferencePolicy: the policy to which a KL term keeps the trained policy close.

Used by users' training loops, `trainer_hooks.train.main` and `trainer_hooks.train.learner`, for the
argument `reference_logprobs_BT` of `policy_loss`. `follow` and `load_state_dict` write its own copy
of the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rollout.errors import ConfigError
from trainer_hooks.collate import RolloutBatch
from trainer_hooks.update.micro_batches import UpdateSettings, compute_logprobs
from trainer_hooks.update.settings import ReferenceSettings
from trainer_hooks.weight_sync.trainer_ranks import ALONE, TrainerRanks


class ReferencePolicy:
    """The reference policy: a copy of the policy, or the policy with its LoRA adapter disabled.

    `copy_of` and `without_adapter` make one.
    `adapter_off`: returns a context in which `model` computes without its adapter.
    Raises ConfigError for `sync_interval` together with `adapter_off`.
    """

    def __init__(
        self,
        model: Any,
        adapter_off: Callable[[], AbstractContextManager[Any]] = nullcontext,
        settings: ReferenceSettings | None = None,
    ) -> None:
        self._model, self._adapter_off = model, adapter_off
        self._settings = settings or ReferenceSettings()
        if self._settings.sync_interval is not None and adapter_off is not nullcontext:
            raise ConfigError(
                f"sync_interval={self._settings.sync_interval}: a reference that is the policy's "
                "base model cannot follow the policy; use ReferencePolicy.copy_of"
            )

    @classmethod
    def copy_of(
        cls, policy: nn.Module, settings: ReferenceSettings | None = None
    ) -> ReferencePolicy:
        """Return a reference with a copy of the policy's current weights."""
        return cls(copy.deepcopy(policy).eval().requires_grad_(False), settings=settings)

    @classmethod
    def without_adapter(cls, policy: Any) -> ReferencePolicy:
        """Return a reference that is the base model of a PEFT model and needs no further memory."""
        return cls(policy, policy.disable_adapter)

    def logprobs(
        self, batch: RolloutBatch, settings: UpdateSettings, ranks: TrainerRanks = ALONE
    ) -> torch.Tensor:
        """Return the reference's log-probs [B, T] of trained tokens, 0 elsewhere.

        Routing is not replayed. All `ranks` call this with the same batch, and each computes a part
        of it. Raises the ConfigErrors of `compute_logprobs`.
        """
        own = replace(settings, replay_routing=False)
        with self._adapter_off():
            return compute_logprobs(self._model, batch, own, ranks)

    @torch.no_grad()
    def follow(self, policy: nn.Module, step: int) -> bool:
        """Move towards `policy` if training step `step`, from 1, is a multiple of `sync_interval`.

        A move sets weights = sync_weight * policy + (1 - sync_weight) * weights. Returns whether it
        moved. Source: TR-DPO (Gorbatovski et al. 2024), arXiv 2404.09656.
        """
        interval, weight = self._settings.sync_interval, self._settings.sync_weight
        if interval is None or step % interval:
            return False
        pairs = zip(self._model.parameters(), policy.parameters(), strict=True)
        for own, theirs in pairs:
            own.lerp_(theirs.to(own), weight)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the weights for a checkpoint, or {} if the reference does not move."""
        return self._model.state_dict() if self._settings.sync_interval is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Has no effect if this reference does not move.

        Raises ConfigError if this reference moves and the one that wrote `state` did not.
        """
        if self._settings.sync_interval is None:
            return
        if not state:
            raise ConfigError(
                f"sync_interval={self._settings.sync_interval}, but the reference of the run in "
                "the checkpoint did not move; resume with the settings of that run"
            )
        self._model.load_state_dict(state)
