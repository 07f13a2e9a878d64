"""LiveModule: weights under the names of a live transformers module, where checkpoints have others.

Used by VllmExecutor for updates. A live mixture keeps all experts in one tensor, and a live model
of images has other prefixes. vLLM loads a checkpoint's tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout.models.plain_tensors import named_weights


class LiveModule:
    """The transformers module of the model in `directory`: its names, and the checkpoint's."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by the module's names; {} if transformers does not have the model."""
        if self._skeleton is None:
            return {}
        return {name: tuple(t.shape) for name, t in named_weights(self._skeleton).items()}

    def to_checkpoint(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors under the module's names as `save_pretrained` would write them."""
        from transformers.core_model_loading import revert_weight_conversion

        converted: dict[str, Tensor] = revert_weight_conversion(self._skeleton, dict(tensors))
        return converted

    @cached_property
    def _skeleton(self) -> Any:
        """The module without values; None if transformers does not have it."""
        import transformers

        try:
            config = transformers.AutoConfig.from_pretrained(self._directory)
        except (OSError, ValueError):  # a model type that only vLLM knows
            return None
        kind = getattr(transformers, (config.architectures or [""])[0], None)
        if kind is None:
            return None
        with torch.device("meta"):
            return kind(config)
