"""What suspend, resume and stats() report. Seconds, and bytes by owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from rollout.engine.state import EngineState


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendReport:
    """`bytes_released` went back to the device's owner, `bytes_kept` stay reserved there,
    `bytes_on_host` are the copies that wait for resume. `mode` is the KV mode that was used."""

    mode: str
    seconds: float = 0.0
    bytes_released: int = 0
    bytes_kept: int = 0
    bytes_on_host: int = 0
    released_by_owner: Mapping[str, int] = field(default_factory=dict)
    kept_by_owner: Mapping[str, int] = field(default_factory=dict)
    num_requests_requeued: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport:
    """`bytes_restored` were copied or made usable again.

    Requests to recompute are prefilled by later steps, graphs are captured again as they need them.
    """

    mode: str
    seconds: float = 0.0
    bytes_restored: int = 0
    restored_by_owner: Mapping[str, int] = field(default_factory=dict)
    graphs_recaptured: int = 0
    num_requests_recomputed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot: requests by phase and blocks now, everything else since the engine was made."""

    state: EngineState
    weights_version: int
    num_waiting: int
    num_running: int
    num_paused: int
    num_blocks_used: int
    num_blocks_indexed: int
    num_blocks_total: int
    num_graph_captures: int  # 0 where steps run eagerly
    num_steps: int
    num_failed_steps: int  # forward passes that raised
    num_prefill_tokens: int
    num_decode_tokens: int
    num_sampled_tokens: int
    num_forked_requests: int
    num_prefix_hit_tokens: int
    num_finished: int
    num_failed: int
    num_pauses: int
    num_evictions: int
    num_recomputed_requests: int
    num_suspends: int
    num_weight_updates: int
    step_seconds: float
    suspend_seconds: float
    resume_seconds: float
    update_seconds: float
    suspended_bytes: int
    resumed_bytes: int

    def as_metrics(self, prefix: str = "engine/") -> dict[str, float]:
        """The numbers, under flat names for a MetricsWriter."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "state"}
        return {f"{prefix}{name}": value for name, value in values.items()}
