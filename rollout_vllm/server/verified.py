"""verified_update: checks an update against a checkpoint and writes it to a file.

Used by `rollout_vllm.server.executor`. Imports no vLLM.
"""

from __future__ import annotations

import shutil
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import mkdtemp

from safetensors.torch import save_file
from torch import Tensor

from rollout.backends.ops.fingerprint import hashed_dtype
from rollout.errors import WeightUpdateError
from rollout.models.checkpoints.reader import WEIGHTS_FILE
from rollout.models.plain_tensors import full_tensor, refusal
from rollout.weights.fingerprints import fingerprint_on
from rollout.weights.lora import LoraAdapter
from rollout.weights.update import (
    Fingerprint,
    NamedTensors,
    blaming,
    by_name,
    check_checksum,
    checksum_of,
)


class StagedFile:
    """A verified update in a directory of its own, which is deleted with this object.

    fingerprints: of each tensor in its own dtype. num_bytes: bytes of the tensors.
    """

    def __init__(
        self,
        directory: Path,
        fingerprints: Mapping[str, Fingerprint],
        *,
        num_bytes: int,
        started_at: float,
    ) -> None:
        self.directory, self.fingerprints, self.num_bytes = directory, fingerprints, num_bytes
        self.checksum = checksum_of(fingerprints)
        self.is_finite = not any(num_bad for _, num_bad in fingerprints.values())
        self.started_at, self.seconds = started_at, time.perf_counter() - started_at
        self._finalizer = weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)


def verified_update(
    named_tensors: NamedTensors,
    shapes: Mapping[str, tuple[int, ...]],
    directory: Path,
    check: Callable[[], None],
    source_checksum: str,
    *,
    rejects_non_finite: bool,
) -> StagedFile:
    """Verify an update, and write it into a new folder of `directory`.

    `shapes`: the checkpoint's tensors. `check` is called before each tensor, and may raise to
    cancel. `source_checksum`: the publisher's, "" if unknown. Raises WeightUpdateError that names
    the tensor at fault.
    """
    start = time.perf_counter()
    if isinstance(named_tensors, LoraAdapter):
        raise WeightUpdateError(
            "engine='vllm-server' takes whole weights only; push merged_tensors(model) of "
            "trainer_hooks.weight_sync in place of the adapter"
        )
    given = by_name(named_tensors)
    _check_names(given.keys(), shapes.keys())
    tensors: dict[str, Tensor] = {}
    with blaming() as blame:
        for name in sorted(given):  # gathering is a collective, in one order on all ranks
            check()
            blame.culprit = f"reading {name!r}"
            _check_form(name, given[name], shapes[name])
            tensors[name] = full_tensor(given[name]).detach().cpu().contiguous()
    found = dict(fingerprints_of(tensors.items(), check))
    bad = [name for name, (_, num_bad) in found.items() if num_bad]
    if bad and rejects_non_finite:
        raise WeightUpdateError(
            f"{bad[0]!r} holds NaN or infinity; the serving weights are kept. "
            "reject_non_finite_weights=False accepts it"
        )
    if source_checksum:
        check_checksum(found, source_checksum)
    folder = Path(mkdtemp(prefix="rollout-vllm-", dir=directory))
    staged = StagedFile(
        folder,
        found,
        num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        started_at=start,
    )
    with blaming(f"writing the update into {folder}"):
        folder.chmod(0o755)  # the server may run as another user
        save_file(_without_shared_memory(tensors), folder / WEIGHTS_FILE)
    staged.seconds = time.perf_counter() - start
    return staged


def _check_names(given: Iterable[str], known: Iterable[str]) -> None:
    given, known = set(given), set(known)
    for kind, names in (("lacks", known - given), ("has the unknown", given - known)):
        if names:
            listed = ", ".join(repr(name) for name in sorted(names)[:3])
            raise WeightUpdateError(
                f"the update {kind} {len(names)} of the checkpoint's tensors ({listed}); send all "
                "tensors under the names of the model's directory"
            )


def _check_form(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if reason := refusal(tensor):
        raise WeightUpdateError(f"{name!r} {reason}")
    if tuple(tensor.shape) != shape:
        raise WeightUpdateError(
            f"{name!r} has shape {list(tensor.shape)}, but the model's is {list(shape)}"
        )


def fingerprints_of(
    tensors: Iterable[tuple[str, Tensor]], check: Callable[[], None] = lambda: None
) -> Iterator[tuple[str, Fingerprint]]:
    """Yield the fingerprint of each tensor in its own dtype."""
    with blaming() as blame:
        for name, tensor in tensors:
            check()
            blame.culprit = f"checking {name!r}"
            found = fingerprint_on(tensor.device)(tensor, hashed_dtype(tensor.dtype))
            hashed, num_bad = found.tolist()
            yield name, (hashed, num_bad)


def _without_shared_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, with a copy of each that shares memory with one before it."""
    seen: set[int] = set()
    separate: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return separate
