"""What the engines are together: the state that all have confirmed, the weights that all serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from rollout.coordinator.protocol.messages import WeightsSource
from rollout.engine.state import EngineState


class CoordinatorState(Enum):
    """Changes when all engines have confirmed. STOPPING is final."""

    RUNNING = auto()
    PAUSED = auto()
    SUSPENDED = auto()
    STOPPING = auto()

    @property
    def engine_state(self) -> EngineState:
        """The state that every engine is in."""
        return EngineState.STOPPED if self is CoordinatorState.STOPPING else EngineState[self.name]


def state_of(engine_state: EngineState) -> CoordinatorState:
    """The coordinator's state when every engine is in `engine_state`."""
    if engine_state is EngineState.STOPPED:
        return CoordinatorState.STOPPING
    return CoordinatorState[engine_state.name]


@dataclass(frozen=True, slots=True)
class CommittedWeights:
    """What every engine serves. checksum: "" if nobody has said it. source: where a joining engine
    gets it, None before the first commit."""

    version: int
    checksum: str
    source: WeightsSource | None


@dataclass(slots=True)
class Fleet:
    """weights: None until an engine or a commit says. released: owners whose memory a SUSPEND gave
    back. is_diverged: a command was done by some engines and not by others, or one came to a
    suspended fleet, so that engines may be in another state or hold other memory than is known."""

    command_ids: Iterator[int]
    state: CoordinatorState = CoordinatorState.RUNNING
    weights: CommittedWeights | None = None
    released: frozenset[str] = frozenset()
    is_diverged: bool = False

    @property
    def weights_version(self) -> int:
        return 0 if self.weights is None else self.weights.version


def first_id_of_life(coordinator_id: bytes) -> int:
    """Where the ids of requests and commands begin, so that no other life of the coordinator uses
    them: engines re-send replies to the next life, and answer a repeated command without doing
    anything."""
    return int.from_bytes(coordinator_id[:5], "big") << 22
