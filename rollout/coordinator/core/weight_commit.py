"""WeightCommit: one weight update over all engines, in two phases with presumed abort."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from rollout.coordinator.core.fleet import CommittedWeights, next_version
from rollout.coordinator.core.operations import Operation
from rollout.coordinator.core.registry import Registry
from rollout.coordinator.core.sessions import EngineSession
from rollout.coordinator.protocol.messages import (
    Ack,
    Commit,
    Nack,
    Prepare,
    Rollback,
    UpdateWeights,
    WireError,
)
from rollout.errors import WeightUpdateError

logger = logging.getLogger(__name__)


class WeightCommit(Operation):
    """Until every member has voted yes, any fault leaves all at the serving version. From then on
    the update is committed, and a member that does not follow is removed and brought up when it
    comes again.
    """

    message: UpdateWeights

    def __init__(self, registry: Registry, message: UpdateWeights, deadline_at: float) -> None:
        """Raises WeightUpdateError if the version is not above the current one."""
        super().__init__(registry, message, deadline_at)
        self._version = next_version(registry.fleet, message)
        self._is_decided = False

    def begin(self, now: float) -> None:
        prepare = Prepare(
            command_id=self.command_id,
            version=self._version,
            source=self.message.source,
            in_flight=self.message.in_flight,
            deadline_s=self.deadline_at - now,
        )
        self.ask(self.registry.ready_engines(), prepare, now)

    def answered(self, engine: EngineSession, answer: Ack | Nack, now: float) -> None:
        if isinstance(answer, Nack) and self._is_decided:
            # It leaves, and comes back to `lost`, where it is not waited for any more.
            reason = f"it did not commit version {self._version}: {answer.error.message}"
            self.registry.remove(engine, reason, now, suspects=())
            return
        if self._is_decided:
            engine.weights_version = self._version
        super().answered(engine, answer, now)
        if isinstance(answer, Nack) and self.outcome is None:
            self._roll_back(self.refusals[engine.rank], now)

    def lost(self, engine: EngineSession, now: float) -> None:
        if not self._is_decided and self.waiting.get(engine.engine_id) is engine:
            del self.members[engine.engine_id]
            reason = f"rank {engine.rank} was lost before its vote; the serving weights are kept"
            self._roll_back(_refusal(reason, is_transient=True), now)
        else:
            super().lost(engine, now)

    def complete(self, now: float) -> None:
        if self._is_decided:
            self.registry.dispatcher.weights_changed(self.members.values())
            self.end()
        elif self.refusals:
            self._roll_back(next(iter(self.refusals.values())), now)
        elif not self.members:
            # Weights that no engine can take, committed without a vote, would keep all out.
            reason = (
                f"no engine was there to verify version {self._version}; the serving weights are "
                "kept: push again when one has joined"
            )
            self._roll_back(_refusal(reason, is_transient=True), now)
        else:
            checksum, fault = self._agreed_checksum()
            if fault:
                self._roll_back(_refusal(f"{fault}; the serving weights are kept"), now)
            else:
                self._commit(checksum, now)

    def timed_out(self, now: float) -> None:
        if not self._is_decided:
            ranks = ", ".join(str(engine.rank) for engine in self.waiting.values())
            reason = f"no vote in time from rank {ranks}; the serving weights are kept"
            self._roll_back(_refusal(reason), now)
            return
        for engine in self.stop_waiting_for_all(now):
            reason = f"it did not commit version {self._version} in time"
            self.registry.remove(engine, reason, now, suspects=())
            self.members.pop(engine.engine_id)
            self.lost_ranks.append(engine.rank)
        self.complete(now)

    def _agreed_checksum(self) -> tuple[str, str]:
        """The checksum that source and members name, and what is wrong if they name several."""
        named: dict[str, str] = {}
        if self.message.source.checksum:
            named[self.message.source.checksum] = "the source"
        for rank, vote in sorted(self.results.items()):
            checksum = vote.get("checksum") or ""
            if not isinstance(checksum, str):
                return "", f"rank {rank} names the checksum {checksum!r:.100}, which is no text"
            if checksum:
                named.setdefault(checksum, f"rank {rank}")
        if len(named) > 1:
            listed = ", ".join(f"{checksum!r} by {who}" for checksum, who in named.items())
            return "", f"the staged weights have different checksums: {listed}"
        return next(iter(named), ""), ""

    def _commit(self, checksum: str, now: float) -> None:
        self._is_decided = True
        self.results = {}
        context = self.registry.context
        # Whoever comes later must have fetched what the members have.
        source = replace(self.message.source, checksum=checksum)
        self.fleet.weights = CommittedWeights(self._version, checksum, source)
        context.counters.num_weight_commits += 1
        logger.info("version %d is committed on %d engines", self._version, len(self.members))
        self.deadline_at = max(self.deadline_at, now + context.limits.commit_grace_s)
        commit = Commit(command_id=self.command_id, version=self._version)
        self.ask(list(self.members.values()), commit, now)

    def _roll_back(self, error: WireError, now: float) -> None:
        """Nobody need answer: what is not committed counts for nothing."""
        self.stop_waiting_for_all(now)
        context = self.registry.context
        context.counters.num_weight_rollbacks += 1
        logger.warning("version %d is rolled back: %s", self._version, error.message)
        for engine in self.members.values():
            rollback = Rollback(command_id=self.command_id, version=self._version)
            context.send(engine, rollback)
        self.outcome = error


def _refusal(reason: str, *, is_transient: bool = False) -> WireError:
    error = WeightUpdateError(reason)
    error.is_transient = is_transient  # the same weights may be taken next time
    return WireError.of(error)
