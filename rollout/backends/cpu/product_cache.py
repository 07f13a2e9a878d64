"""TimesCache: a small file with the times measured on a machine, which later engines choose by."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from rollout.backends.cpu.library import cpu_identity
from rollout.backends.cpu.product_choice import Measured, Times
from rollout.backends.cpu.products import BUCKETS, PLAIN
from rollout.backends.cpu.user_cache import exclusive_lock, private_folder, write_atomically

logger = logging.getLogger(__name__)

_FORMAT = 5  # of the file and of how it is measured
_LOCK_TIMEOUT_S = 5.0  # holders need milliseconds; one that is stopped must not stop all others


def describe_machine(kernels_version: str) -> dict[str, str | int]:
    """Return all that measured times depend on besides a weight's shape and dtype.

    `kernels_version` names the compiled kernels, or says that there are none.
    """
    return {
        "format": _FORMAT,
        "cpu": hashlib.sha256(cpu_identity().encode()).hexdigest()[:16],
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "kernels": kernels_version,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    machine: dict[str, str | int]
    times: dict[str, dict[str, Times]]  # by key, then by product


class TimesCache:
    """Reads and writes the file of one kind of machine.

    No failure is raised. The first one is logged as a warning; what could not be read is measured
    again.
    """

    def __init__(self, machine: Mapping[str, str | int]) -> None:
        self._machine = dict(machine)
        digest = hashlib.sha256(msgspec.json.encode(self._machine, order="sorted")).hexdigest()
        self._name = f"{digest[:16]}.json"
        self._has_warned = False

    def load(self, product_names: Collection[str]) -> dict[str, Measured]:
        """Return the times in the file by key, {} if there is no file or it is not valid.

        A file is not valid if another machine wrote it, or if it names other products than
        `product_names`.
        """
        try:
            path = self._path()
            if not path.exists():
                return {}
            file = msgspec.json.decode(path.read_bytes(), type=_File)
            self._check(file, product_names)
        except (OSError, ValueError) as error:
            self._warn("cannot be read, so products are measured again", error)
            return {}
        return {**file.times}

    def save(
        self, times: Mapping[str, Measured], product_names: Collection[str]
    ) -> dict[str, Measured]:
        """Add times to the file. Returns the file's times and the new ones.

        A key that is in the file already keeps its times. So engines that start together and
        measure the same keys all choose by the times of the first one that saves.
        """
        merged = dict(times)
        try:
            path = self._path()
            with ExitStack() as stack:
                self._lock(path, stack)
                kept = self.load(product_names)
                merged |= kept
                if merged != kept:
                    write_atomically(path, self._encode(merged))
        except OSError as error:
            self._warn("cannot be written, so the next engine measures again", error)
        return merged

    def _lock(self, path: Path, stack: ExitStack) -> None:
        try:
            stack.enter_context(exclusive_lock(path.with_suffix(".lock"), _LOCK_TIMEOUT_S))
        except OSError as error:
            self._warn("are written without a lock", error)

    def _encode(self, times: Mapping[str, Measured]) -> bytes:
        by_key = {key: dict(measured) for key, measured in sorted(times.items())}
        file = _File(machine=self._machine, times=by_key)
        return msgspec.json.format(msgspec.json.encode(file))

    def _path(self) -> Path:
        return private_folder("products") / self._name

    def _check(self, file: _File, product_names: Collection[str]) -> None:
        if file.machine != self._machine:
            raise ValueError(f"it was measured on {file.machine}; this machine is {self._machine}")
        for key, measured in file.times.items():
            if not {PLAIN.name} <= measured.keys() <= set(product_names):
                raise ValueError(
                    f"{key!r} has times of {[*measured]}, which must be {PLAIN.name!r} and others "
                    f"out of {[*product_names]}"
                )
            for name, times in measured.items():
                if not _is_possible(times):
                    raise ValueError(
                        f"{name!r} has {times} for {key!r}, which must be {len(BUCKETS)} lists of "
                        "positive numbers, the smallest first"
                    )

    def _warn(self, consequence: str, error: Exception) -> None:
        if not self._has_warned:
            reason = f"{type(error).__name__}: {error}"
            logger.warning("products: measured times %s (%s, %s)", consequence, self._name, reason)
            self._has_warned = True


def _is_possible(times: Times) -> bool:
    is_sorted = all([*rounds] == sorted(rounds) for rounds in times.work)
    shortest = min((rounds[0] for rounds in times.work if rounds), default=math.inf)
    return len(times.work) == len(BUCKETS) and is_sorted and shortest > 0 and times.call >= 0
