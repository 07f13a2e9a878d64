"""AdmissionOrder: returns batches to the trainer in the order in which they were begun.

Used by `trainer_hooks.producer.producer`, for order="admission".
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from trainer_hooks.producer.group_pool import GroupParts, GroupPool
from trainer_hooks.producer.groups import ScoredGroup
from trainer_hooks.producer.order import BatchOrder, BatchRecord
from trainer_hooks.producer.versions import VersionWatch
from trainer_hooks.prompts.ledger import STALE


class AdmissionGate:
    """Counts the admitted batches and decides whether another may begin.

    S is `max_staleness_versions`. Versions are counted from the producer's start. One batch makes
    one version, so batch k is trained at version k. At version v, at most v + S + 1 batches have
    ever been admitted. Batch k is therefore admitted at version k - S or later, and no token of it
    is more than S versions old when it is trained.
    """

    def __init__(self, max_staleness_versions: int) -> None:
        self.max_staleness_versions = max_staleness_versions
        self.num_admitted = 0
        self.num_delivered = 0

    def may_admit(self, version: int) -> bool:
        """Return whether the next batch may begin at `version`.

        At most S + 1 batches wait for the trainer, even if it makes several versions from one.
        """
        num_waiting = self.num_admitted - self.num_delivered
        # A batch occupies its place until the version made from it, not only until its delivery:
        # a batch admitted while its predecessor trains would be trained one version too late.
        num_allowed = version + self.max_staleness_versions + 1
        return self.num_admitted < num_allowed and num_waiting <= self.max_staleness_versions

    def is_beyond(self, version: int) -> bool:
        """Return whether more batches are admitted or waiting than the bound allows."""
        num_allowed = version + self.max_staleness_versions + 1
        num_waiting = self.num_admitted - self.num_delivered
        return self.num_admitted > num_allowed or num_waiting > self.max_staleness_versions + 1

    def admit(self, version: int) -> int:
        """Admit the next batch and return its number, from 0."""
        assert self.may_admit(version), "call may_admit first"
        self.num_admitted += 1
        return self.num_admitted - 1

    def withdraw(self) -> None:
        """Revoke the admission of the newest waiting batch. The next batch gets the same number."""
        assert self.num_delivered < self.num_admitted, "no admitted batch is waiting"
        self.num_admitted -= 1

    def deliver(self) -> None:
        """Count the oldest waiting batch as delivered to the trainer."""
        assert self.num_delivered < self.num_admitted, "no admitted batch is waiting"
        self.num_delivered += 1


class OpenBatch(GroupPool):
    """A batch in progress, which replaces failed and filtered groups until it has enough groups.

    `version`: weights version that the llm reported when the batch was opened.
    """

    def __init__(self, parts: GroupParts, versions: VersionWatch) -> None:
        super().__init__(parts)
        self._versions, self.version = versions, versions.reported

    @property
    def groups(self) -> list[ScoredGroup]:
        """Finished groups, in the order in which their prompts were first issued."""
        return sorted(self.finished, key=lambda group: group.ticket)

    @property
    def is_complete(self) -> bool:
        """Whether the batch is full, or no prompt is left for it. False after an error."""
        is_full = len(self.finished) >= self._rules.num_groups
        no_more = not self.running and self._ledger.is_exhausted
        return self.error is None and (is_full or no_more)

    def fill(self) -> None:
        """Begin missing groups while there are prompts. A full batch aborts its running groups."""
        if len(self.finished) >= self._rules.num_groups:
            self._cancel(list(self.running), "aborted")
            return
        wanted = self._rules.num_groups + self._rules.num_extra_groups
        while self.error is None and len(self.finished) + len(self.running) < wanted:
            if not self._begin_group(self._versions.reported):
                return

    def cancel_older_than(self, version: int) -> None:
        """Replace running groups begun before `version`, and finished groups with older tokens."""
        self._cancel([t for t, begun in self.running.items() if begun.version < version], STALE)
        self._drop([g for g, seen in self.finished.items() if seen and seen[0] < version], STALE)
        self.fill()

    def drop_older_than(self, version: int) -> int:
        """Replace finished groups with a token sampled before `version`. Returns their number.

        Sets `error` if the batch has more than `max_refills` replacements.
        """
        stale = [g for g, seen in self.finished.items() if seen and seen[0] < version]
        self._drop(stale, STALE)
        for _ in stale:
            self._count_refill()
        self.fill()
        if stale:
            self._on_change()
        return len(stale)


class AdmissionOrder(BatchOrder):
    """Keeps up to S + 1 open batches, and returns the oldest first."""

    def __init__(
        self, parts: GroupParts, versions: VersionWatch, max_staleness_versions: int
    ) -> None:
        self._parts, self._versions = parts, versions
        self._gate = AdmissionGate(max_staleness_versions)
        self._open: deque[OpenBatch] = deque()
        self._withdrawn: Counter[str] = Counter()  # fates of groups in withdrawn batches

    def begin(self) -> None:
        for batch in self._open:
            batch.fill()
        since_start = self._versions.since_start
        while not self._parts.ledger.is_exhausted and self._gate.may_admit(since_start):
            self._gate.admit(since_start)
            batch = OpenBatch(self._parts, self._versions)
            self._open.append(batch)
            batch.fill()

    def set_bound(self, max_staleness_versions: int) -> None:
        """Change the bound. A lower bound aborts the newest batches and replaces too old groups."""
        is_lower = max_staleness_versions < self._gate.max_staleness_versions
        self._gate.max_staleness_versions = max_staleness_versions
        if not is_lower:
            return
        since_start = self._versions.since_start
        while self._open and self._gate.is_beyond(since_start):
            batch = self._open.pop()
            batch.abort(STALE)
            self._withdrawn += batch.counts
            self._gate.withdraw()
        # Batch k is trained at version k and may have no token older than k - S. All open batches
        # have k <= version + S, so groups that begin now are young enough.
        start = self._versions.reported - since_start
        for number, batch in enumerate(self._open, self._gate.num_delivered):
            batch.cancel_older_than(start + number - max_staleness_versions)

    def take_error(self) -> BaseException | None:
        for batch in self._open:
            if (error := batch.take_error()) is not None:
                return error
        return None

    def next_groups(self) -> Sequence[ScoredGroup]:
        while self._open and self._open[0].is_complete and self._is_young(self._open[0]):
            if groups := self._open[0].groups:
                return groups
            self._gate.deliver()  # the last prompts gave no group
            self._open.popleft()
        return ()

    def _is_young(self, batch: OpenBatch) -> bool:
        """Replace groups of `batch` that exceed the bound. Returns True if there were none."""
        # The gate ensures this as long as one batch makes one version. A token newer than the
        # reported version shows that the next version is already in use.
        for seen in batch.finished.values():
            if seen is not None:
                self._versions.observe(seen[1])
        oldest = self._versions.newest - self._gate.max_staleness_versions
        return not batch.drop_older_than(oldest)

    def deliver(self, groups: Sequence[ScoredGroup]) -> BatchRecord:
        batch = self._open.popleft()
        self._gate.deliver()
        counts, self._withdrawn = batch.counts + self._withdrawn, Counter()
        return BatchRecord(admitted_at_version=batch.version, counts=counts)

    @property
    def is_idle(self) -> bool:
        return not self._open

    @property
    def next_pool(self) -> OpenBatch | None:
        return self._open[0] if self._open else None

    @property
    def num_waiting_batches(self) -> int:
        return sum(batch.is_complete for batch in self._open)

    def abort(self, reason: str) -> None:
        for batch in self._open:
            batch.abort(reason)
        self._open.clear()
