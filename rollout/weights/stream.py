"""WeightStream: a trainer's weights, one whole tensor after the other."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch import Tensor

_logger = logging.getLogger(__name__)


class WeightStream(Iterator[tuple[str, Tensor]]):
    """An iterator of (Hugging Face name, whole plain tensor), which is read once.

    A tensor is valid until the next one is read: its memory may be freed or reused then. With
    `lasts` all stay valid. They may require gradients. Where tensors are gathered from several
    ranks, each step is a collective of all ranks. A reader that stops early calls `drain`, so that
    the other ranks are not blocked.
    """

    def __init__(self, pairs: Iterator[tuple[str, Tensor]], *, lasts: bool) -> None:
        self._pairs = pairs
        self.lasts = lasts

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._pairs)

    def drain(self) -> None:
        """Read the rest and drop it. An error of reading is logged.

        No-op at the end of the stream, and after an error of reading, which ends it.
        """
        try:
            for _ in self._pairs:
                pass
        except Exception as error:  # the reader raises its own error
            _logger.warning("the rest of a trainer's weights could not be gathered: %s", error)
