"""WeightUpdates: fetches, stages and commits the weight update of one engine.

Used by `rollout.coordinator.agent.agent`. A thread of its own fetches and stages the weights while
the engine steps. Only a commit changes the engine's weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from rollout.coordinator.protocol.messages import Prepare, RegisterAck
from rollout.engine.engine import Engine
from rollout.engine.protocols import StagedUpdate
from rollout.errors import WeightUpdateError
from rollout.weights.lora import LoraAdapter
from rollout.weights.source import WeightsSource
from rollout.weights.update import NamedTensors, by_name

Fetch = Callable[[WeightsSource], NamedTensors]
# A message that begins staging: an update, or the registration with a fleet that has later weights.
Cause = Prepare | RegisterAck


class _Staging:
    """Fetches and stages one source in a thread of its own. Staging holds a lock that all staging
    threads of the engine share. Fetching holds no lock, so that a fetch that hangs does not block
    another source."""

    def __init__(
        self,
        engine: Engine,
        fetch: Fetch,
        source: WeightsSource,
        base: WeightsSource | None,
        lock: threading.Lock,
    ) -> None:
        """`base` is the source of the full weights that an adapter builds on; None for the served
        weights."""
        self._engine, self._fetch, self._lock = engine, fetch, lock
        self._source, self._base = source, base
        self._is_cancelled = False
        self.outcome: StagedUpdate | BaseException | None = None  # None until it has ended
        threading.Thread(target=self._run, name="weight-staging", daemon=True).start()

    def cancel(self) -> None:
        """Make the thread end before its next tensor or after its fetch. Does not wait for the
        thread."""
        self._is_cancelled = True

    def _run(self) -> None:
        source = self._source
        try:
            tensors = self._fetch(source)
            if isinstance(tensors, LoraAdapter) and self._base is not None:
                tensors = replace(tensors, base=by_name(self._fetch(self._base)))
            with self._lock:
                self._check()
                # Tensors made from deltas were checked when the deltas were applied.
                announced = source.tensors_checksum if source.builds_on is None else ""
                staged = self._engine.stage_weights(tensors, self._check, announced)
            if source.checksum not in ("", staged.checksum):
                raise WeightUpdateError(
                    f"the tensors at {source.address!r} have the checksum {staged.checksum}, "
                    f"not {source.checksum} as announced; the serving weights are kept"
                )
            self._check()
            self.outcome = staged
        except BaseException as error:  # any error is the reason of a vote
            self.outcome = error

    def _check(self) -> None:
        if self._is_cancelled:
            raise WeightUpdateError("the staging of these weights was cancelled")


class WeightUpdates:
    """At most one weight update of an engine. The engine's thread calls the methods.

    The update is in one of three states:
    - Idle: a Prepare, or a RegisterAck that names later weights, begins staging.
    - Staging: steps go on. Staging ends with the vote yes, or with the vote no after an error, a
      deadline or a cancellation. A Rollback, another Prepare, another session, a suspend, a resume
      and the engine's end cancel staging.
    - Staged: a Commit puts the weights in place between two steps. A Rollback or another Prepare
      drops the weights. A new session drops the weights, too, unless its Register message named
      the vote."""

    def __init__(self, engine: Engine, fetch: Fetch) -> None:
        """`fetch` returns the tensors of a source, which must not change afterwards. Several
        threads may call `fetch` at once."""
        self._engine, self._fetch = engine, fetch
        self._lock = threading.Lock()
        self._cause: Cause | None = None  # message that began `_staging` or `_staged`
        self._staging: _Staging | None = None
        self._expires_at = 0.0
        self._staged: StagedUpdate | None = None
        self.checksum = engine.weights_checksum()

    @property
    def in_staging(self) -> Cause | None:
        """The message whose weights are being staged, or None."""
        return None if self._staging is None else self._cause

    @property
    def voted_command_id(self) -> int | None:
        """The command id of the staged update that waits for Commit or Rollback, or None. Any
        thread may read it."""
        cause = self._cause
        if self._staged is None or not isinstance(cause, Prepare):
            return None
        return cause.command_id

    @property
    def is_staged_for_entry(self) -> bool:
        """Whether the weights that a RegisterAck named are staged."""
        return self._staged is not None and isinstance(self._cause, RegisterAck)

    @property
    def staged_checksum(self) -> str:
        assert self._staged is not None
        return self._staged.checksum

    # ---- staging

    def begin(self, cause: Cause, source: WeightsSource, expires_at: float) -> None:
        """Drop staged weights and begin to stage `source`. No staging may be running. `expires_at`
        is the deadline on the clock of `poll`."""
        assert self._staging is None
        self.drop()
        self._cause, self._expires_at = cause, expires_at
        base = cause.base_weights if isinstance(cause, RegisterAck) else None
        self._staging = _Staging(self._engine, self._fetch, source, base, self._lock)

    def poll(self, now: float) -> tuple[Cause, BaseException | None] | None:
        """Return the message whose staging has ended, and its error or None. An error is returned
        if staging failed or its deadline has passed. Returns None if no staging has ended."""
        if self._staging is None or self._cause is None:
            return None
        cause, outcome = self._cause, self._staging.outcome
        if outcome is None and now >= self._expires_at:
            outcome = WeightUpdateError(
                "the weights were not fetched and staged before the deadline; the serving weights "
                "are kept"
            )
        if outcome is None:
            return None
        if not isinstance(outcome, BaseException):
            self._staging, self._staged = None, outcome
            return cause, None
        self.cancel()
        return cause, outcome

    def cancel(self) -> Cause | None:
        """Cancel staging. Returns the message whose weights were being staged, or None."""
        cause = self.in_staging
        if self._staging is not None:
            self._staging.cancel()
            self._staging = self._cause = None
        return cause

    def wait_until_unused(self) -> None:
        """Wait until no thread stages weights. Staging reads the model. Call `cancel` first."""
        with self._lock:
            pass

    # ---- the end of an update

    def commit(self) -> Mapping[str, Any]:
        """Serve the staged weights from the next step on. Returns the WeightUpdateReport as a dict.
        Raises the errors of Engine.commit_weights. The staged weights are dropped in that case,
        too."""
        cause = self._cause
        assert cause is not None
        held, self._staged, self._cause = [self._staged], None, None
        try:
            assert held[0] is not None
            if isinstance(cause, Prepare):
                report = self._engine.commit_weights(held[0], cause.version, cause.in_flight)
            else:
                report = self._engine.commit_weights(held[0], cause.weights_version)
        finally:
            _clear_in_a_thread(held)
        self.checksum = report.checksum
        return asdict(report)

    def drop(self) -> None:
        """Drop the staged weights, if there are any."""
        if self._staged is not None:
            held, self._staged, self._cause = [self._staged], None, None
            _clear_in_a_thread(held)


def _clear_in_a_thread(held: list[Any]) -> None:
    # Freeing gigabytes takes longer than a step.
    threading.Thread(target=held.clear, name="weight-release", daemon=True).start()
