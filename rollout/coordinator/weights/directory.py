"""DirectoryTransport: pushes as checkpoints in a directory that engines of other hosts see, too.

    root/push-<number>-<random>/model-00001.safetensors ...
    root/push-<number>-<random>/model.safetensors.index.json     written last

The index makes a push valid: while it is missing, nobody reads the directory. The last committed
push stays, for engines that come late.
"""

from __future__ import annotations

import logging
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rollout.coordinator.protocol.weights_source import WeightsSource
from rollout.coordinator.weights.kept import KeptTransport
from rollout.coordinator.weights.reading import TensorReader, terms_of
from rollout.errors import ConfigError, ModelError, WeightUpdateError
from rollout.models.checkpoint import INDEX_FILE, Checkpoint, read_json
from rollout.models.checkpoint_writer import CheckpointWriter
from rollout.runner.weight_update import NamedTensors

KIND = "directory"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Push:
    directory: Path
    source: WeightsSource


class DirectoryTransport(KeptTransport[_Push]):
    """A WeightTransport: `publish` writes a checkpoint, which engines map.

    Engines see the directory under the same path: a shared file system, or a local one with the
    engines of one host. Whoever can write there decides what engines serve.
    """

    kind = KIND

    def __init__(self, root: str | Path, *, reject_non_finite: bool = True) -> None:
        """`root`: made if it is missing. Raises ConfigError if that fails."""
        self._root = Path(root).absolute()
        self._reader = TensorReader(reject_non_finite=reject_non_finite)
        super().__init__(lambda push: _remove(push.directory))
        self._num_pushes = 0
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"no directory for weights at {self._root}: {error}") from error

    def publish(
        self, named_tensors: NamedTensors, *, builds_on: str | None = None
    ) -> WeightsSource:
        """Write tensors, on whatever device, to a new directory. See WeightTransport. `builds_on`:
        as in a WeightsSource, for a DeltaTransport.

        Raises WeightUpdateError also if they cannot be written.
        """
        self.drop()
        lora = terms_of(named_tensors)
        self._num_pushes += 1
        directory = self._root / f"push-{self._num_pushes:06d}-{uuid.uuid4().hex[:8]}"
        try:
            directory.mkdir()
            with CheckpointWriter(directory) as writer:
                checksum = self._reader.read(named_tensors, writer.write)
            # Readers on other hosts see whole files, since they are closed; nobody needs them on
            # the disk, since they are of no use once this process has ended.
            writer.write_index({"tensors_checksum": checksum})
        except OSError as error:
            _remove(directory)
            raise WeightUpdateError(
                f"the weights cannot be written to {directory} ({error}); make room, or name "
                "another directory"
            ) from error
        except BaseException:
            _remove(directory)
            raise
        source = WeightsSource(
            kind=KIND,
            address=str(directory),
            manifest={},
            checksum="",
            tensors_checksum=checksum,
            lora=lora,
            builds_on=builds_on,
        )
        return self._begin(_Push(directory, source))


def fetch_directory(source: WeightsSource) -> dict[str, Tensor]:
    """The tensors of `source`, on the CPU: views of its files, which live as long as they do.

    Raises WeightUpdateError if they are not there any more, or are not those of the source.
    """
    directory = Path(source.address)
    try:
        if not directory.is_absolute():
            raise ModelError("it is no absolute path")
        index = read_json(directory / INDEX_FILE)
        checksum = (index.get("metadata") or {}).get("tensors_checksum")
        if checksum != source.tensors_checksum:
            raise ModelError(f"its checksum is {checksum}, not {source.tensors_checksum}")
        return dict(Checkpoint.open(directory).items())
    except (ModelError, OSError) as error:
        raise WeightUpdateError(
            f"the weights in {source.address!r} cannot be read ({error}); is the trainer alive, "
            "and does this host see its directory under that path?"
        ) from error


def _remove(directory: Path) -> None:
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        return
    except OSError as error:  # a push that is over does not fail because of it
        _logger.warning("weights are left in %s: %s", directory, error)
