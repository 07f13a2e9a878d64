"""Settings that jobs share: one frozen dataclass per config group of conf/.

Each refuses, when it is made, what cannot work, and names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollout.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    """Settings of AsyncRolloutProducer, under its names.

    `max_staleness_versions`: the age a token may have when it is trained on; 0 generates only
    after each update.
    `order`: `admission` hands batches over as they were begun, `ready` as their groups finish;
    a prompt whose rollouts grew too old `max_reissues` times is then waited for.
    `oversample_groups`: groups begun in addition; the last ones to finish are aborted.
    `drop_zero_variance`: replace groups whose rewards are all equal, at most `max_refills` of a
    batch (None: ten times its groups).
    `min_valid_samples`: a group with fewer rewards is made again, `max_attempts` times in all.
    `version_timeout_s`: how long asking for a batch waits for the new version that it needs.
    `num_epochs`: passes over the prompts; None goes on for ever.
    """

    max_staleness_versions: int = 1
    order: Literal["admission", "ready"] = "admission"
    max_reissues: int = 8
    oversample_groups: int = 0
    drop_zero_variance: bool = False
    max_refills: int | None = None
    min_valid_samples: int = 2
    max_attempts: int = 3
    version_timeout_s: float = 0.0
    shuffle: bool = True
    num_epochs: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "max_staleness_versions",
            "max_reissues",
            "oversample_groups",
            "version_timeout_s",
        ):
            _check_at_least(name, getattr(self, name), 0)
        for name in ("min_valid_samples", "max_attempts", "num_epochs"):
            _check_at_least(name, getattr(self, name), 1)
        _check_at_least("max_refills", self.max_refills, 0)
        if self.max_refills is not None and not self.drop_zero_variance:
            raise ConfigError(
                f"max_refills={self.max_refills} bounds what drop_zero_variance replaces; set "
                "drop_zero_variance=true, or leave max_refills out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncSettings:
    """How new weights reach the engines.

    `mode`: `in_flight` commits at a step edge, while requests go on; `suspend` pauses and suspends
    the engines around the commit, which frees what `release` names for the trainer.
    """

    mode: Literal["in_flight", "suspend"] = "in_flight"
    release: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.release) - {"kv_cache", "weights"}):
            raise ConfigError(f"release={unknown} is not known; choose of 'kv_cache', 'weights'")
        if self.release and self.mode == "in_flight":
            raise ConfigError(
                f"release={list(self.release)} with mode='in_flight', which frees nothing; choose "
                "mode='suspend', or leave release out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerSettings:
    """Where metrics go besides metrics.jsonl: to the terminal, and to Weights & Biases."""

    console: bool = True
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: str = "rollout"


def _check_at_least(name: str, value: float | None, least: int) -> None:
    if value is not None and not value >= least:
        raise ConfigError(f"{name}={value} must be {least} or more")
