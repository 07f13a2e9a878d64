"""The tokens of a stream in order, each once: pieces as they come, the rest from the record."""

from __future__ import annotations

from rollout.coordinator.protocol.messages import TokenRun
from rollout.coordinator.protocol.packed import token_run
from rollout.requests.generated_tokens import GeneratedTokens
from rollout.requests.record import DynamicInferenceRequestRecord

# Of pieces that came too early; more are dropped, the record brings their tokens at the end.
_MAX_HELD = 256


class TokenSequencer:
    """Of one request. `num_tokens`: how many have been handed out."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._held: list[TokenRun] = []  # by offset

    def add(self, run: TokenRun) -> list[TokenRun]:
        """Return what can be handed out now that `run` is here: in order, duplicates trimmed."""
        self._held.append(run)
        self._held.sort(key=lambda held: held.offset)
        ready = []
        while self._held and self._held[0].offset <= self.num_tokens:
            next_run = self._held.pop(0)
            if next_run.end > self.num_tokens:
                ready.append(next_run.from_offset(self.num_tokens))
                self.num_tokens = next_run.end
        del self._held[_MAX_HELD:]
        return ready


def rest_of(record: DynamicInferenceRequestRecord, offset: int) -> TokenRun | None:
    """Return the generated tokens of `record` from `offset` on as a run, None if there are none."""
    tokens = GeneratedTokens.of(record, offset)
    return None if tokens is None else token_run(tokens)
