"""WeightUpdates: the weight update of an engine, staged in a thread beside its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from rollout.coordinator.protocol.messages import Prepare, RegisterAck
from rollout.engine.engine import Engine
from rollout.errors import WeightUpdateError
from rollout.weights.lora import LoraAdapter
from rollout.weights.source import WeightsSource
from rollout.weights.staged import StagedWeights
from rollout.weights.update import NamedTensors, by_name

Fetch = Callable[[WeightsSource], NamedTensors]
Order = Prepare | RegisterAck  # an update, or an entry into a fleet with later weights


class _Staging:
    """Fetches and stages one source in a thread of its own.

    Staging copies the weights: `turn`, a lock of all such threads, lets one stage at a time.
    Fetching needs no turn, so that a fetch that hangs does not block the staging of another source.
    """

    def __init__(
        self,
        engine: Engine,
        fetch: Fetch,
        source: WeightsSource,
        base: WeightsSource | None,
        turn: threading.Lock,
    ) -> None:
        """`base`: the full weights to put an adapter on; None: those that the engine serves."""
        self._engine, self._fetch, self._turn = engine, fetch, turn
        self._source, self._base = source, base
        self._is_cancelled = False
        self.outcome: StagedWeights | BaseException | None = None  # None until it has ended
        threading.Thread(target=self._run, name="weight-staging", daemon=True).start()

    def cancel(self) -> None:
        """Stop before the next tensor, or when the fetch returns. Does not wait for that."""
        self._is_cancelled = True

    def _run(self) -> None:
        source = self._source
        try:
            tensors = self._fetch(source)
            if isinstance(tensors, LoraAdapter) and self._base is not None:
                tensors = replace(tensors, base=by_name(self._fetch(self._base)))
            with self._turn:
                self._check()
                # What a link of deltas makes was checked by who has put it together.
                announced = source.tensors_checksum if source.builds_on is None else ""
                staged = self._engine.stage_weights(tensors, self._check, announced)
            if source.checksum not in ("", staged.checksum):
                raise WeightUpdateError(
                    f"the tensors at {source.address!r} have the checksum {staged.checksum}, "
                    f"not {source.checksum} as announced; the serving weights are kept"
                )
            self._check()
            self.outcome = staged
        except BaseException as error:  # whatever it is, it is the reason of a vote
            self.outcome = error

    def _check(self) -> None:
        if self._is_cancelled:
            raise WeightUpdateError("the staging of these weights was cancelled")


class WeightUpdates:
    """At most one update of an engine. Only its staging happens outside the engine's thread.

    - Idle: a Prepare, or an entry into a fleet with later weights, begins staging.
    - Staging, while steps go on. It ends with the vote yes, or with the vote no: by any fault, at
      its deadline, or cancelled by a Rollback, another Prepare, another session, a suspend or
      resume, or the engine's end.
    - Staged: a Commit puts the weights in place between two steps. A Rollback, another Prepare, and
      a session whose registration did not name the vote drop them.
    """

    def __init__(self, engine: Engine, fetch: Fetch) -> None:
        """`fetch` returns the tensors of a source, which must not change afterwards. Threads of
        their own call it, perhaps before an earlier call has returned.
        """
        self._engine, self._fetch = engine, fetch
        self._turn = threading.Lock()
        self._order: Order | None = None  # for which weights are being staged, or are staged
        self._staging: _Staging | None = None
        self._expires_at = 0.0
        self._staged: StagedWeights | None = None
        self.checksum = engine.weights_checksum()

    @property
    def in_staging(self) -> Order | None:
        """The order for which weights are being staged, else None."""
        return None if self._staging is None else self._order

    @property
    def voted_command_id(self) -> int | None:
        """The command id of the staged update that waits for Commit or Rollback. Any thread may
        ask."""
        order = self._order
        if self._staged is None or not isinstance(order, Prepare):
            return None
        return order.command_id

    @property
    def is_staged_for_entry(self) -> bool:
        return self._staged is not None and isinstance(self._order, RegisterAck)

    @property
    def staged_checksum(self) -> str:
        assert self._staged is not None
        return self._staged.checksum

    # ---- staging

    def begin(self, order: Order, source: WeightsSource, expires_at: float) -> None:
        """Begin to stage `source`; staged weights are dropped. Nothing may be staging already."""
        assert self._staging is None
        self.drop()
        self._order, self._expires_at = order, expires_at
        base = order.base_weights if isinstance(order, RegisterAck) else None
        self._staging = _Staging(self._engine, self._fetch, source, base, self._turn)

    def poll(self, now: float) -> tuple[Order, BaseException | None] | None:
        """Return the order whose staging has ended, and its error; None if none has ended."""
        if self._staging is None or self._order is None:
            return None
        order, outcome = self._order, self._staging.outcome
        if outcome is None and now >= self._expires_at:
            outcome = WeightUpdateError(
                "the weights were not fetched and staged before the deadline; the serving weights "
                "are kept"
            )
        if outcome is None:
            return None
        if isinstance(outcome, StagedWeights):
            self._staging, self._staged = None, outcome
            return order, None
        self.cancel()
        return order, outcome

    def cancel(self) -> Order | None:
        """Stop staging. Returns its order."""
        order = self.in_staging
        if self._staging is not None:
            self._staging.cancel()
            self._staging = self._order = None
        return order

    def wait_until_unused(self) -> None:
        """Return when no thread reads the model any more. Call it after `cancel`."""
        with self._turn:
            pass

    # ---- the end of an update

    def commit(self) -> Mapping[str, Any]:
        """Serve the staged weights from the next step on. Returns the report as plain values.

        Raises what Engine.commit_weights raises; the staged weights are dropped then, too.
        """
        order = self._order
        assert order is not None
        held, self._staged, self._order = [self._staged], None, None
        try:
            assert held[0] is not None
            if isinstance(order, Prepare):
                report = self._engine.commit_weights(held[0], order.version, order.in_flight)
            else:
                report = self._engine.commit_weights(held[0], order.weights_version)
        finally:
            _clear_in_a_thread(held)
        self.checksum = report.checksum
        return asdict(report)

    def drop(self) -> None:
        """Drop the staged weights, if there are any."""
        if self._staged is not None:
            held, self._staged, self._order = [self._staged], None, None
            _clear_in_a_thread(held)


def _clear_in_a_thread(held: list[Any]) -> None:
    """Clear the list. Returning gigabytes to the system takes longer than a step."""
    threading.Thread(target=held.clear, name="weight-release", daemon=True).start()
