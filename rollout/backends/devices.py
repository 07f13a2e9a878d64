"""Parses a config's `device`, and assigns GPUs to the engines of a host.

Used by `rollout.backends.select` and `rollout.launch.local`. Changes nothing, but logs a warning if
engines share GPUs.
"""

from __future__ import annotations

import logging
import os
import re

import torch

from rollout.errors import ConfigError

logger = logging.getLogger(__name__)

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PLACE = re.compile(r"(cpu|cuda)(?::([0-9]+))?")


def parse_device(name: str) -> tuple[str, int | None]:
    """Return kind and index of the device "cpu", "cuda" or "cuda:N". Without N the index is None.
    "auto" means "cuda" if torch sees a CUDA device, else "cpu". The device need not exist. Raises
    ConfigError for any other name."""
    if name == "auto":
        return ("cuda" if torch.cuda.is_available() else "cpu"), None
    match = _PLACE.fullmatch(name)
    if match is None or name.startswith("cpu:"):
        raise ConfigError(
            f"device={name!r} does not exist; use 'auto', 'cpu', 'cuda' for the current CUDA "
            "device, which CUDA_VISIBLE_DEVICES or torch.cuda.set_device chooses, or 'cuda:1'"
        )
    kind, index = match.groups()
    return kind, None if index is None else int(index)


def require_device(name: str) -> tuple[str, int | None]:
    """Return `parse_device(name)`. Raises ConfigError also if the device is not available."""
    kind, index = parse_device(name)
    if kind == "cpu":
        return kind, index
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device={name!r} is not available: torch sees no CUDA device; use device='cpu' or "
            "'auto'"
        )
    if index is not None and index >= torch.cuda.device_count():
        raise ConfigError(
            f"device={name!r} is not available: torch sees {torch.cuda.device_count()} CUDA "
            "devices, from 0 on; lower the index, or let CUDA_VISIBLE_DEVICES name more"
        )
    return kind, index


def environment_of(engine: int, num_gpus: int) -> dict[str, str]:
    """Return the environment variables that show one engine of this host only its `num_gpus` GPUs.
    `engine` is the index of the engine on the host. If there are too few GPUs, engines share them
    round-robin. Returns {} if `num_gpus` is 0 or no GPU is visible."""
    seen = os.environ.get(_VISIBLE)
    if not num_gpus:
        return {}
    devices = seen.split(",") if seen else [str(i) for i in range(torch.cuda.device_count())]
    if not devices:
        return {}
    first = engine * num_gpus
    if first + num_gpus > len(devices):
        logger.warning(
            "engine %d shares its device with another engine or rank: %d devices are visible; "
            "lower data_parallel_size, or let CUDA_VISIBLE_DEVICES name more",
            *(engine, len(devices)),
        )
    own = dict.fromkeys(devices[(first + i) % len(devices)] for i in range(num_gpus))
    return {_VISIBLE: ",".join(own)}
