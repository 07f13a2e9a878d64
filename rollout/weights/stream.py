"""WeightStream: the weights of a trainer as they come, one whole tensor after the other."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch import Tensor

_logger = logging.getLogger(__name__)


class WeightStream(Iterator[tuple[str, Tensor]]):
    """An iterator of (Hugging Face name, whole plain tensor), which is read once.

    A tensor is valid until the next one is asked for: what gathers them may free it then, or use
    its memory again. With `lasts` all stay valid. They may require gradients. Where the tensors are
    gathered from several ranks, each step is a collective of all of them. A reader that gives up
    calls `drain`, so that the other ranks do not wait for it.
    """

    def __init__(self, pairs: Iterator[tuple[str, Tensor]], *, lasts: bool) -> None:
        self._pairs = pairs
        self.lasts = lasts

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._pairs)

    def drain(self) -> None:
        """Read what is left, and use none of it. Reading may fail, too: that is logged.

        Does nothing after the end, and after an error of reading, which has ended the stream.
        """
        try:
            for _ in self._pairs:
                pass
        except Exception as error:  # the reader's own error is the one that its caller learns
            _logger.warning("the rest of a trainer's weights could not be gathered: %s", error)
