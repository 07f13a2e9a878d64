"""SpmdFollower: a rank other than 0 of an engine, in a process of a trainer."""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import Any, NoReturn

from rollout.control.state import EngineState
from rollout.errors import EngineStateError, LockstepError, decode_error
from rollout.parallel.channel import FollowerChannel
from rollout.parallel.collectives import Collectives
from rollout.tensor_parallel.executor import read_along
from rollout.tensor_parallel.follower import answer_to, staging_verbs_of, verbs_of
from rollout.tensor_parallel.spmd_executor import VerbCall, VerbOutcome
from rollout.weights.staged import StagedWeights
from rollout.weights.update import NamedTensors
from rollout.worker.worker import Worker


class SpmdFollower:
    """`run` is this rank's part of a verb that all ranks call. It does what rank 0 orders until
    rank 0 says that the verb is over, and gives what it gave there.

    Whatever else ends a verb ends the group: LockstepError, on all ranks and at every later verb.
    """

    def __init__(
        self,
        rank: int,
        worker: Worker,
        collectives: Collectives,
        channel: FollowerChannel,
        *,
        timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        """`timeout_s`: for rank 0 to give the next order; `start_timeout_s`: to call a verb."""
        self._rank, self._worker, self._collectives = rank, worker, collectives
        self._channel = channel
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._source: NamedTensors = {}
        staged: dict[int, StagedWeights] = {}
        self._verbs = {
            **verbs_of(worker, collectives, staged),
            **staging_verbs_of(worker, channel, staged),
            "read_along": lambda: read_along(self._source),
        }
        self._lost: str | None = None
        self.state, self.weights_version = EngineState.RUNNING, worker.weights.version

    def run(self, call: VerbCall, source: NamedTensors = ()) -> Any:
        """Serve within a verb. `source`: the weights, of an update. Returns rank 0's result.

        Raises rank 0's error, EngineStateError where ranks have called different verbs, and
        LockstepError.
        """
        if self._lost is not None:
            raise LockstepError(self._lost)
        self._source = source
        try:
            outcome = self._serve(call)
        except EngineStateError:
            raise
        except BaseException as error:  # Ctrl-C, too: rank 0 would wait for this rank
            self._leave(error)
        finally:
            self._source = {}
        self.state = EngineState(outcome.state)
        self.weights_version = outcome.weights_version
        if outcome.error is not None:
            raise decode_error(outcome.error)
        return pickle.loads(outcome.result)

    def _serve(self, call: VerbCall) -> VerbOutcome:
        timeout_s = self._start_timeout_s
        while True:
            verb, arguments = self._channel.order(timeout_s)
            if verb == "verb":
                self._channel.answer(call)
                timeout_s = self._timeout_s
            elif verb == "refuse":
                self._channel.answer(None)
                raise EngineStateError(*arguments)
            elif verb == "over":
                with suppress(LockstepError):  # rank 0 may have shut down
                    self._channel.answer(None)
                outcome: VerbOutcome = arguments[0]
                return outcome
            else:
                answer = answer_to(verb, arguments, self._verbs, self._collectives.abort)
                if isinstance(answer, LockstepError):
                    raise answer
                self._channel.answer(answer)

    def _leave(self, error: BaseException) -> NoReturn:
        reason = str(error) if isinstance(error, LockstepError) else f"it raised {error!r}"
        self._lost = f"rank {self._rank} has left the engine, which must be made anew: {reason}"
        self._collectives.abort()
        self._channel.leave(reason)
        raise error

    def shutdown(self) -> None:
        """Free this rank's memory, and tell rank 0, if it has not shut down. A second call does
        nothing."""
        if self.state is EngineState.STOPPED:
            return
        self.state = EngineState.STOPPED
        self._lost = f"rank {self._rank} has shut down"
        self._channel.leave("it has shut down")
        self._worker.close()
        self._collectives.close()
