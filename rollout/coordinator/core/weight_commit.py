"""WeightCommit: one weight update over all engines, in two phases with presumed abort."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from rollout.coordinator.core.command_rules import next_version
from rollout.coordinator.core.fleet import CommittedWeights
from rollout.coordinator.core.operations import Operation, Outcome, Parts
from rollout.coordinator.core.sessions import EnginePeer
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

    def __init__(self, parts: Parts, message: UpdateWeights, deadline_at: float) -> None:
        """Raises WeightUpdateError if the version is not above the current one."""
        super().__init__(parts, "UPDATE_WEIGHTS", deadline_at)
        self._message = message
        self._version = next_version(parts.fleet, message)
        self._is_decided = False

    def begin(self, now: float) -> Outcome | None:
        message = self._message
        prepare = Prepare(
            command_id=self.command_id,
            version=self._version,
            source=message.source,
            in_flight=message.in_flight,
            deadline_s=self.deadline_at - now,
        )
        return self.ask_ready(prepare, now)

    def answered(self, engine: EnginePeer, answer: Ack | Nack, now: float) -> Outcome | None:
        if isinstance(answer, Ack):
            if self._is_decided:
                engine.weights_version = self._version
            return super().answered(engine, answer, now)
        if not self._is_decided:
            self.note(engine, answer, now)
            return self._roll_back(self.refusals[engine.rank], now)
        # It leaves, and comes back to `lost`, where it is not waited for any more.
        reason = f"it did not commit version {self._version}: {answer.error.message}"
        self.parts.membership.remove(engine, reason, now)
        return None

    def lost(self, engine: EnginePeer, now: float) -> Outcome | None:
        if not self._is_decided and self.waiting.get(engine.engine_id) is engine:
            del self.members[engine.engine_id]
            error = WeightUpdateError(
                f"rank {engine.rank} was lost before its vote; the serving weights are kept"
            )
            error.is_transient = True  # the others may take the same weights
            return self._roll_back(WireError.of(error), now)
        return super().lost(engine, now)

    def complete(self, now: float) -> Outcome | None:
        if self._is_decided:
            self.parts.placement.weights_changed(self.members.values())
            return self.done()
        if not self.members:
            # Weights that no engine can take, committed without a vote, would keep all out.
            error = WeightUpdateError(
                f"no engine was there to verify version {self._version}; the serving weights are "
                "kept: push again when one has joined"
            )
            error.is_transient = True
            return self._roll_back(WireError.of(error), now)
        checksum, fault = self._agreed_checksum()
        if fault is not None:
            return self._roll_back(WireError.of(fault), now)
        return self._commit(checksum, now)

    def timed_out(self, now: float) -> Outcome | None:
        if not self._is_decided:
            ranks = ", ".join(str(engine.rank) for engine in self.waiting.values())
            error = WeightUpdateError(
                f"no vote in time from rank {ranks}; the serving weights are kept"
            )
            return self._roll_back(WireError.of(error), now)
        for engine in self.stop_waiting(now):
            reason = f"it did not commit version {self._version} in time"
            self.parts.membership.remove(engine, reason, now)
            self.members.pop(engine.engine_id)
            self.lost_ranks.append(engine.rank)
        return self.complete(now)

    def _agreed_checksum(self) -> tuple[str, WeightUpdateError | None]:
        """The checksum that source and members name, and what is wrong if they name several."""
        named: dict[str, str] = {}
        if self._message.source.checksum:
            named[self._message.source.checksum] = "the source"
        for rank, vote in sorted(self.results.items()):
            checksum = vote.get("checksum") or ""
            if not isinstance(checksum, str):
                return "", WeightUpdateError(
                    f"rank {rank} names the checksum {checksum!r:.100}, which is no text; the "
                    "serving weights are kept"
                )
            if checksum:
                named.setdefault(checksum, f"rank {rank}")
        if len(named) > 1:
            told = ", ".join(f"{checksum!r} by {who}" for checksum, who in named.items())
            return "", WeightUpdateError(
                f"the staged weights have different checksums: {told}; the serving ones are kept"
            )
        return next(iter(named), ""), None

    def _commit(self, checksum: str, now: float) -> Outcome | None:
        self._is_decided = True
        self.results = {}
        # Whoever comes later must have fetched what the members have.
        source = replace(self._message.source, checksum=checksum)
        self.parts.fleet.weights = CommittedWeights(self._version, checksum, source)
        self.parts.books.counters.num_weight_commits += 1
        logger.info("version %d is committed on %d engines", self._version, len(self.members))
        grace_s = self.parts.books.limits.commit_grace_s
        self.deadline_at = max(self.deadline_at, now + grace_s)
        self.ask_all(Commit(command_id=self.command_id, version=self._version), now)
        return None if self.waiting else self.complete(now)

    def _roll_back(self, error: WireError, now: float) -> Outcome:
        """Nobody need answer: what is not committed counts for nothing."""
        self.stop_waiting(now)
        self.parts.books.counters.num_weight_rollbacks += 1
        logger.warning("version %d is rolled back: %s", self._version, error.message)
        for engine in self.members.values():
            rollback = Rollback(command_id=self.command_id, version=self._version)
            self.parts.books.send(engine, rollback)
        return Outcome({}, error)
