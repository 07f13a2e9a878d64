"""Curriculum: draws the prompts of an epoch by weights computed from their histories.

Used by `trainer_hooks.prompts.ledger`. Users' training loops and `trainer_hooks.train.task` pass a
Curriculum to `trainer_hooks.producer.producer`. A Curriculum changes no history.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from rollout.errors import ConfigError
from rollout.ranges import AnyValue, check_fields
from rollout.step.seeds import mix_seed, uniforms
from trainer_hooks.prompts.history import PromptHistory

PromptWeight = Callable[[int, PromptHistory], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """Draws each next prompt with a probability proportional to its weight.

    `weight`: function of a row's index and history that returns 0 or more, without side effects. A
    row of weight 0 is drawn only if all rows that can be drawn have weight 0.
    `with_replacement`: False draws each row once per epoch, and weights decide which rows come
    early. True draws among all rows, as many times per epoch as there are rows, and weights decide
    how often a row comes.
    """

    weight: Annotated[PromptWeight, AnyValue("its results are checked when rows are weighed")]
    with_replacement: bool = False

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)


def learnability_weight(index: int, history: PromptHistory) -> float:
    """Return p (1 - p) + 0.01, where p is the last mean reward of the prompt, clamped to [0, 1].

    p (1 - p) is the variance of a reward of 0 or 1, a measure of how much a group can teach.
    Prompts without a score get the largest weight. The 0.01 keeps every weight above 0.
    Source: Foster et al. 2025, arXiv 2502.12272.
    """
    p = 0.5 if history.last_reward is None else min(max(history.last_reward, 0.0), 1.0)
    return p * (1.0 - p) + 0.01


class CurriculumDraws:
    """Draws a row for each position of an epoch, and keeps the rows' weights.

    A draw depends only on seed, epoch, position, weights, and the rows drawn before in the epoch.
    """

    def __init__(self, curriculum: Curriculum, num_rows: int, seed: int) -> None:
        self._curriculum, self._seed = curriculum, seed
        self._weights = np.zeros(num_rows)
        self._is_left = np.ones(num_rows, dtype=bool)  # not yet drawn in this epoch

    def weigh(self, indices: Iterable[int], history_of: Callable[[int], PromptHistory]) -> None:
        """Recompute the weights of the rows `indices`.

        Raises ConfigError for a weight that is negative or not finite.
        """
        for index in indices:
            weight = float(self._curriculum.weight(index, history_of(index)))
            if not 0.0 <= weight < math.inf:
                raise ConfigError(
                    f"the curriculum's weight of row {index} is {weight}; it must be finite and "
                    "0 or more"
                )
            self._weights[index] = weight

    def draw(self, epoch: int, position: int) -> int:
        """Return the row at the next position and mark it as drawn. Position 0 begins an epoch."""
        if position == 0:
            self._is_left[:] = True
        seed = np.array([mix_seed(self._seed, epoch)], dtype=np.uint64)
        share = float(uniforms(seed, np.array([position]))[0])
        index = _drawn(np.where(self._is_left, self._weights, 0.0), share)
        if index is None:
            index = _drawn(self._is_left.astype(float), share)
        assert index is not None, "an epoch has as many draws as rows"
        if not self._curriculum.with_replacement:
            self._is_left[index] = False
        return index

    def state(self) -> dict[str, Any]:
        """Return `with_replacement` and the rows not yet drawn in the epoch, as JSON."""
        # Weights are left out: they follow from the histories.
        left = b64encode(np.packbits(self._is_left).tobytes()).decode()
        return {"with_replacement": self._curriculum.with_replacement, "left": left}

    def load(self, state: dict[str, Any]) -> None:
        """Continue the epoch of a `state`. Raises ConfigError for another `with_replacement`."""
        is_own = self._curriculum.with_replacement
        if (is_saved := state["with_replacement"]) != is_own:
            raise ConfigError(
                f"the state is that of a curriculum with with_replacement={is_saved} instead of "
                f"{is_own}"
            )
        bits = np.frombuffer(b64decode(state["left"]), dtype=np.uint8)
        self._is_left = np.unpackbits(bits, count=len(self._weights)).astype(bool)


def _drawn(weights: NDArray[np.float64], share: float) -> int | None:
    """Return the row drawn by `share`, a number from 0 to 1, or None if all weights are 0."""
    ends = np.cumsum(weights)
    if not ends[-1] > 0.0:
        return None
    index = int(np.searchsorted(ends, share * ends[-1], side="right"))
    if index == len(ends):  # the product was rounded up to the sum
        index = int(np.flatnonzero(weights)[-1])
    return index
