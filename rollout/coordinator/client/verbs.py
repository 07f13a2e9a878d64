"""EngineVerbs: what a client can order the engines to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.config import KVCacheManagementMode
from rollout.coordinator.client.pending_commands import CommandFuture
from rollout.coordinator.protocol.headers import Headers
from rollout.coordinator.protocol.messages import (
    COMMAND_TYPES,
    Command,
    UpdateWeights,
    WeightsSource,
)

COMMAND_DEADLINE_S = 60.0
UPDATE_DEADLINE_S = 600.0


class EngineVerbs(ABC):
    """Each verb resolves to the engines' results once the last of them has confirmed, and raises
    the reason if it is refused or its deadline passes. Plain functions: what is called first is
    sent first, and a future that is ignored warns nobody.
    """

    @abstractmethod
    def _order(self, order: Command | UpdateWeights) -> CommandFuture:
        """Send an order; returns the future of its result."""

    @abstractmethod
    def _new_command_id(self) -> int:
        """A number that no order had before. Raises where orders cannot be given."""

    def pause_engines(self, *, deadline_s: float = COMMAND_DEADLINE_S) -> CommandFuture:
        """Freeze all engines at their next step."""
        return self._command(Headers.PAUSE, deadline_s)

    def unpause_engines(self, *, deadline_s: float = COMMAND_DEADLINE_S) -> CommandFuture:
        """Let paused engines go on."""
        return self._command(Headers.UNPAUSE, deadline_s)

    def suspend_engines(
        self,
        mode: KVCacheManagementMode | str | None = None,
        release: Sequence[str] | None = None,
        discard_weights: bool = False,
        *,
        deadline_s: float = COMMAND_DEADLINE_S,
    ) -> CommandFuture:
        """Have paused engines give memory back. As `engine.suspend`; None takes its default."""
        arguments: dict[str, Any] = {"discard_weights": discard_weights}
        if mode is not None:
            arguments["mode"] = mode.value if isinstance(mode, KVCacheManagementMode) else mode
        if release is not None:
            arguments["release"] = list(release)
        return self._command(Headers.SUSPEND, deadline_s, arguments)

    def resume_engines(
        self, only: str | None = None, *, deadline_s: float = COMMAND_DEADLINE_S
    ) -> CommandFuture:
        """Bring back what was given up, or the part `only` names."""
        return self._command(Headers.RESUME, deadline_s, {} if only is None else {"only": only})

    def set_generation_epoch(
        self, version: int, *, deadline_s: float = COMMAND_DEADLINE_S
    ) -> CommandFuture:
        """Set the weights version of paused or suspended engines, without new weights."""
        return self._command(Headers.SET_GENERATION_EPOCH, deadline_s, {"version": version})

    def increment_staleness(self, *, deadline_s: float = COMMAND_DEADLINE_S) -> CommandFuture:
        """`set_generation_epoch` of the current version + 1."""
        return self._command(Headers.INCREMENT_STALENESS, deadline_s)

    def stop_engines(self, *, deadline_s: float = COMMAND_DEADLINE_S) -> CommandFuture:
        """Stop paused or suspended engines for good."""
        return self._command(Headers.STOP, deadline_s)

    def shutdown_engines(self, *, deadline_s: float = COMMAND_DEADLINE_S) -> CommandFuture:
        """Stop the engines from any state."""
        return self._command(Headers.SHUTDOWN, deadline_s)

    def engine_stats(self, *, deadline_s: float = COMMAND_DEADLINE_S) -> CommandFuture:
        """Ask each engine for its counters, in any state; nothing changes."""
        return self._command(Headers.STATS, deadline_s)

    def update_weights(
        self,
        source: WeightsSource,
        version: int | None = None,
        in_flight: bool = False,
        *,
        deadline_s: float = UPDATE_DEADLINE_S,
    ) -> CommandFuture:
        """Have all engines serve `source`, or none. version: None means current + 1. in_flight:
        while they run.
        """
        return self._order(
            UpdateWeights(
                command_id=self._new_command_id(),
                source=source,
                version=version,
                in_flight=in_flight,
                deadline_s=float(deadline_s),
            )
        )

    def _command(
        self, header: Headers, deadline_s: float, arguments: Mapping[str, Any] | None = None
    ) -> CommandFuture:
        return self._order(
            COMMAND_TYPES[header](
                command_id=self._new_command_id(),
                arguments={} if arguments is None else arguments,
                deadline_s=float(deadline_s),
            )
        )
