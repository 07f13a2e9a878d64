"""CheckpointRoots: the directories from which clients can load checkpoints.

`rollout.serve.control.state` makes it. `rollout.serve.control.weight_transfer` uses it for updates
that name a directory. It only reads files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollout.errors import ModelError, WeightUpdateError
from rollout.models.checkpoints.reader import Checkpoint


class CheckpointRoots:
    """Opens checkpoints below the allowed directories. Symbolic links are resolved before the
    check."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = [Path(root).resolve() for root in roots]

    def open(self, directory: str) -> Checkpoint:
        """Open the checkpoint in a Hugging Face directory: one *.safetensors file or shards. Raises
        WeightUpdateError if the directory or a shard is not below a root, or if no checkpoint can
        be read."""
        self._check(Path(directory))
        try:
            checkpoint = Checkpoint.open(Path(directory).resolve())
        except (ModelError, OSError) as error:
            raise WeightUpdateError(str(error)) from error
        for shard in checkpoint.shards:
            self._check(shard)
        return checkpoint

    def _check(self, path: Path) -> None:
        if not self._roots:
            raise WeightUpdateError(
                "this server loads no checkpoints; start it with checkpoint_roots"
            )
        # Checked before the path is read, so that a client cannot probe which other files exist.
        if not (path.is_absolute() and self._is_below_a_root(path)):
            raise WeightUpdateError(
                f"{str(path)!r:.300} is not an absolute path below one of the server's "
                "checkpoint_roots"
            )

    def _is_below_a_root(self, path: Path) -> bool:
        try:
            resolved = path.resolve()
        except (OSError, ValueError, RuntimeError):  # too long, with NUL, or links in a circle
            return False
        return any(resolved.is_relative_to(root) for root in self._roots)
