"""GuardedStep: clips gradients, and skips the optimizer step if a gradient is NaN or infinite.

Used by `trainer_hooks.update.micro_batches`, `trainer_hooks.train.learner` and
`trainer_hooks.train.warm_up`. `benchmarks.trl_step` and `benchmarks.kv_age` use `clip_gradients`.
GuardedStep writes the parameters through the optimizer. If it has a directory, it writes the
batches of skipped steps there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch
from torch import nn

from rollout.errors import ConfigError, RolloutError
from rollout.models.plain_tensors import full_tensor
from rollout.ranges import PositiveFloat, check_value
from trainer_hooks.collate import RolloutBatch
from trainer_hooks.doctor.command import save_rollouts
from trainer_hooks.update.settings import DEFAULT_MAX_SKIPPED_STEPS, MaxSkippedSteps
from trainer_hooks.weight_sync.trainer_ranks import ALONE, TrainerRanks

_log = logging.getLogger(__name__)


class NonFiniteGradientError(RolloutError):
    """Too many successive optimizer steps had a gradient that is NaN or infinite."""


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients of `model` to a norm of at most `max_norm`. Returns the norm before.

    The norm is taken over all gradients together. This is a collective if ranks hold parts of the
    gradients. Raises ConfigError for a `max_norm` that is not above 0.
    """
    check_value("max_norm", max_norm, PositiveFloat, ConfigError)
    return float(full_tensor(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))


class GuardedStep:
    """Clips gradients and steps an optimizer, or skips the step if a gradient is not finite.

    A skipped step is logged. A skipped step changes neither the parameters nor the optimizer's
    state, on any of the `ranks`.
    `max_skipped`: number of successive skipped steps at which `step` raises.
    `directory`: folder to which rank 0 writes the batch of each skipped step, for `load_rollouts`.
    None writes no files.
    `num_skipped`: number of all skipped steps.
    Raises ConfigError for a number out of range.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float,
        max_skipped: int = DEFAULT_MAX_SKIPPED_STEPS,
        ranks: TrainerRanks = ALONE,
        directory: Path | None = None,
    ) -> None:
        self._directory = directory
        self._optimizer, self._ranks = optimizer, ranks
        self._max_grad_norm = check_value(
            "max_grad_norm", max_grad_norm, PositiveFloat, ConfigError
        )
        self._max_skipped = check_value(
            "max_skipped_steps", max_skipped, MaxSkippedSteps, ConfigError
        )
        self._num_in_a_row = 0
        self.num_skipped = 0

    def step(
        self, models: Sequence[nn.Module], batch: RolloutBatch | None = None
    ) -> tuple[float, bool]:
        """Clip the gradients of each model, then make or skip the optimizer step.

        Returns the gradient norm of the first model before clipping, and whether the step was made.
        A skipped step clears the gradients and, with a `directory`, writes `batch` to a file.
        Raises NonFiniteGradientError when `max_skipped` successive steps were skipped.
        """
        norms = [clip_gradients(model, self._max_grad_norm) for model in models]
        if self._is_finite_everywhere(norms):
            self._optimizer.step()
            self._num_in_a_row = 0
            return norms[0], True
        self._optimizer.zero_grad()
        self._num_in_a_row += 1
        self.num_skipped += 1
        kept = self._saved(batch)
        _log.warning(
            "skipped an optimizer step (%d in a row): the gradient norms on this rank are %s%s",
            self._num_in_a_row, norms, kept,
        )  # fmt: skip
        if self._num_in_a_row >= self._max_skipped:
            raise NonFiniteGradientError(
                f"{self._num_in_a_row} optimizer steps in a row had a gradient of NaN or infinity, "
                f"the last one with norms {norms}{kept}. They were skipped and did not change the "
                "policy. Look for NaN in rewards, log-probs and weights, lower the learning rate, "
                "or raise max_skipped_steps"
            )
        return norms[0], False

    def _saved(self, batch: RolloutBatch | None) -> str:
        """Write the batch of a skipped step, on rank 0. Returns a text with the path, or ""."""
        if batch is None or self._directory is None or self._ranks.rank:
            return ""
        taken = {path.name for path in self._directory.glob("skipped_*.pt")}
        numbers = (number for number in count(1) if f"skipped_{number}.pt" not in taken)
        path = self._directory / f"skipped_{next(numbers)}.pt"
        save_rollouts(path, batch)
        return f"; its batch is in {path}"

    def _is_finite_everywhere(self, norms: Sequence[float]) -> bool:
        # All ranks get the same result.
        num_bad = torch.tensor(float(not all(map(math.isfinite, norms))))
        return not bool(self._ranks.sum(num_bad))
