"""What a coordinator has seen, in numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Since the coordinator was made.

    num_requests: taken; each ends as one of num_completed, num_failed (engines' word or ours) and
    num_abandoned (its client has gone). num_refused: not taken. num_duplicates: submits, tokens
    and ends that were known already. num_gaps: progress that did not join on.
    num_stale: of attempts that count no more. num_unexpected: messages that the peer may not send
    or that name nothing known. num_undelivered: the peer could not be reached.
    """

    num_frames: int = 0
    num_requests: int = 0
    num_refused: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_abandoned: int = 0
    num_reassigned: int = 0
    num_stale: int = 0
    num_duplicates: int = 0
    num_gaps: int = 0
    num_malformed: int = 0
    num_strangers: int = 0
    num_unexpected: int = 0
    num_undelivered: int = 0
    num_engines_joined: int = 0
    num_engines_lost: int = 0
    num_clients_lost: int = 0
    num_commands: int = 0
    num_commands_refused: int = 0
    num_weight_commits: int = 0
    num_weight_rollbacks: int = 0

    def as_metrics(self, prefix: str = "coordinator/") -> dict[str, int]:
        """The numbers, under flat names for a MetricsWriter."""
        return {f"{prefix}{name}": value for name, value in asdict(self).items()}
