"""VerifiedWeights: verifies updates against a checkpoint, and knows the served checksums.

The base class of `rollout_vllm.executor.VllmExecutor` and
`rollout_vllm.server.executor.ServerExecutor`. Imports no vLLM.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import Self

from rollout.backends.ops.fingerprint import hashed_dtype
from rollout.errors import WeightUpdateError
from rollout.models.checkpoints.reader import WEIGHTS_FILE, Checkpoint
from rollout.models.plain_tensors import full_tensor, refusal
from rollout.telemetry import RankUse
from rollout.weights.fingerprints import fingerprint_on
from rollout.weights.update import Fingerprint, blaming, checksum_of
from rollout.worker.worker import process_bytes

Shapes = Mapping[str, tuple[int, ...]]


class VerifiedWeights(ABC):
    """What the executors over vLLM have in common: the names, shapes and checksums of the weights,
    which are the checkpoint's until the first update.

    Checksums cover the tensors in the checkpoint's format, before vLLM fuses or quantises them.
    """

    def __init__(self, directory: Path, *, reject_non_finite: bool) -> None:
        self._rejects = reject_non_finite
        # Its tensors are served until the first update.
        self._checkpoint: Checkpoint | None = Checkpoint.open(directory)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self._checkpoint.items()}
        self._are_floats = {name: t.is_floating_point() for name, t in self._checkpoint.items()}
        self._fingerprints: Mapping[str, Fingerprint] = {}
        self.has_values = self.is_finite = True
        self._is_closed = False

    def _set_served(self, fingerprints: Mapping[str, Fingerprint]) -> None:
        """Record that the tensors of an update are served."""
        self.has_values = True
        self.is_finite = not any(num_bad for _, num_bad in fingerprints.values())
        self._fingerprints, self._checkpoint = fingerprints, None

    # ---- the weights that are served

    @property
    def weights(self) -> Self:
        return self

    @property
    def names(self) -> list[str]:
        return sorted(self._shapes)

    @abstractmethod
    def require_values(self, what: str) -> None:
        """Raise EngineStateError, which says that `what` is impossible, without values."""

    @abstractmethod
    def require_resident(self, what: str) -> None:
        """Raise EngineStateError, which says that `what` is impossible, if weights are released."""

    def data_ptrs(self) -> dict[str, int]:
        return {}  # vLLM fuses the tensors

    def weights_checksum(self) -> str:
        self.require_resident("compute a checksum")
        self.require_values("compute a checksum")
        return checksum_of(self._served_fingerprints())

    def weight_checksums(self, names: Sequence[str]) -> dict[str, str]:
        self.require_resident("compute checksums")
        self.require_values("compute checksums")
        found = self._served_fingerprints()
        return {name: f"{found[name][0] % 2**64:016x}" for name in names}

    def _served_fingerprints(self) -> Mapping[str, Fingerprint]:
        if self._checkpoint is not None and not self._fingerprints:
            self._fingerprints = dict(_fingerprints(self._checkpoint.items()))
        return self._fingerprints

    # ---- verification of updates

    def _read(
        self, given: Mapping[str, Tensor], shapes: Shapes, check: Callable[[], None], owner: str
    ) -> dict[str, Tensor]:
        """Return whole plain tensors, sorted by name. `check` is called before each tensor, and may
        raise. Raises WeightUpdateError unless the tensors have the names and shapes in `shapes`;
        the error says that the names are those of the `owner`."""
        check_names(given, shapes, owner)
        tensors: dict[str, Tensor] = {}
        with blaming() as blame:
            for name in sorted(given):  # gathering is a collective, in one order on all ranks
                check()
                blame.culprit = f"reading {name!r}"
                if reason := refusal(given[name]):
                    raise WeightUpdateError(f"{name!r} {reason}")
                self._check_form(name, given[name], shapes[name])
                tensors[name] = full_tensor(given[name]).detach()
        return tensors

    def _check_form(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        """Raise WeightUpdateError for a wrong shape, and for integers in place of floats."""
        if tuple(tensor.shape) != shape:
            raise WeightUpdateError(
                f"{name!r} has shape {list(tensor.shape)}, but the model's is {list(shape)}"
            )
        if tensor.is_floating_point() != self._are_floats.get(name, tensor.is_floating_point()):
            kind = "a floating one" if self._are_floats[name] else "of integers"
            raise WeightUpdateError(f"{name!r} has dtype {tensor.dtype}, but the model's is {kind}")

    def _hashed(
        self, tensors: Mapping[str, Tensor], check: Callable[[], None]
    ) -> dict[str, Fingerprint]:
        """Return the fingerprints of tensors. Raises WeightUpdateError for NaN or infinity."""
        fingerprints = dict(_fingerprints(tensors.items(), check))
        for name, (_, num_bad) in fingerprints.items():
            if num_bad:
                self._reject_non_finite(repr(name))
        return fingerprints

    def _reject_non_finite(self, what: str) -> None:
        """Raise WeightUpdateError, unless NaN and infinity are accepted."""
        if self._rejects:
            raise WeightUpdateError(
                f"{what} holds NaN or infinity; the serving weights are kept. "
                "reject_non_finite_weights=False accepts it"
            )

    # ---- ranks

    def warm_up(self) -> int:
        return 0  # vLLM captures its graphs when it starts

    def kv_data_ptrs(self) -> dict[str, int]:
        return {}

    def rank_uses(self) -> tuple[RankUse, ...]:
        """Return the resource use of this process; () once it is closed."""
        if self._is_closed:
            return ()
        return (
            RankUse(
                kv_bytes=self._kv_bytes(),
                weights_bytes=0,  # vLLM does not report them
                kv_on_host_bytes=0,
                weights_on_host_bytes=0,
                lora_base_bytes=self.num_base_bytes,
                rss_bytes=process_bytes(),
                cpu_seconds=time.process_time(),
                wait_seconds=0.0,
            ),
        )

    @property
    def num_base_bytes(self) -> int:
        """Bytes of host copies of the weights below adapters."""
        return 0

    def _kv_bytes(self) -> int:
        """Return the bytes of the KV cache in this process."""
        return 0


def check_names(given: Mapping[str, Tensor], shapes: Shapes, owner: str) -> None:
    """Raise WeightUpdateError unless the tensors have the names in `shapes`. `owner`: whose names
    the update may have, for the error."""
    for kind, names in (
        ("lacks", shapes.keys() - given.keys()),
        ("has the unknown", given.keys() - shapes.keys()),
    ):
        if names:
            listed = ", ".join(repr(name) for name in sorted(names)[:3])
            raise WeightUpdateError(
                f"the update {kind} {len(names)} of the checkpoint's tensors ({listed}); send "
                f"all tensors under the names of the {owner}"
            )


def save_tensors(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Write tensors into `directory` as vLLM's `reload_weights` reads them. A tensor that shares
    memory with one before it is copied first, as safetensors requires."""
    seen: set[int] = set()
    separate: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        on_host = tensor.contiguous().cpu()
        address = on_host.untyped_storage().data_ptr()
        separate[name] = on_host.clone() if address in seen else on_host
        seen.add(address)
    save_file(separate, directory / WEIGHTS_FILE)


def _fingerprints(
    tensors: Iterable[tuple[str, Tensor]], check: Callable[[], None] = lambda: None
) -> Iterator[tuple[str, Fingerprint]]:
    """Yield the fingerprint of each tensor in its own dtype."""
    hash_on = cache(fingerprint_on)
    with blaming() as blame:
        for name, tensor in tensors:
            check()
            blame.culprit = f"checking {name!r}"
            found = hash_on(tensor.device)(tensor, hashed_dtype(tensor.dtype))
            hashed, num_bad = found.tolist()
            yield name, (hashed, num_bad)
