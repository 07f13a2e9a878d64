"""The types that a field of a message may have, as annotations: ranges, lengths, arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of a number: low <= it <= high, which no NaN fulfils."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Length:
    """Of a string, bytes or a tuple: its smallest and largest length."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Binary:
    """A one-dimensional array, little-endian on the wire. `low`: the smallest legal value."""

    dtype: str
    low: int | None = None


@dataclass(frozen=True, slots=True)
class Plain:
    """Any nest of None, bool, int, float, str, bytes, lists and maps with string keys."""


Count = Annotated[int, Bounds(0, 2**63 - 1)]
Int = Annotated[int, Bounds(-(2**63), 2**63 - 1)]
Seed = Annotated[int, Bounds(-(2**63), 2**64 - 1)]
Version = Annotated[int, Bounds(-(2**31) + 1, 2**31 - 1)]
Seconds = Annotated[float, Bounds(0.0, 1e9)]
Uuid = Annotated[bytes, Length(16, 16)]
Name = Annotated[str, Length(0, 1024)]
Tokens = Annotated[npt.NDArray[np.int32], Binary("<i4", low=0)]
Versions = Annotated[npt.NDArray[np.int32], Binary("<i4")]
LogProbs = Annotated[npt.NDArray[np.float32], Binary("<f4")]
Doubles = Annotated[npt.NDArray[np.float64], Binary("<f8")]
PlainMap = Annotated[Mapping[str, Any], Plain()]
