"""StagedFile: a verified update in a file, which a vLLM server loads.

Used by `rollout_vllm.server.executor`. Imports no vLLM.
"""

from __future__ import annotations

import shutil
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp

from torch import Tensor

from rollout.weights.update import Fingerprint, blaming, checksum_of
from rollout_vllm.verified import save_tensors


class StagedFile:
    """A verified update in a directory of its own, which is deleted with this object.

    fingerprints: of each tensor in its own dtype. num_bytes: bytes of the tensors.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        fingerprints: Mapping[str, Fingerprint],
        folder: Path,
        started_at: float,
    ) -> None:
        """Write the tensors into a new directory in `folder`. Raises WeightUpdateError if it cannot
        be written. started_at: when staging began, by time.perf_counter()."""
        self.directory = Path(mkdtemp(prefix="rollout-vllm-", dir=folder))
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)
        with blaming(f"writing the update into {self.directory}"):
            self.directory.chmod(0o755)  # the server may run as another user
            save_tensors(tensors, self.directory)
        self.fingerprints, self.checksum = fingerprints, checksum_of(fingerprints)
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.started_at, self.seconds = started_at, time.perf_counter() - started_at
