"""Ranges of settings, declared by the types of their fields, and the check of all fields.

    @dataclass(frozen=True)
    class PoolSettings:
        num_blocks: PositiveInt = 64
        timeout_s: PositiveSeconds | None = None

        def __post_init__(self) -> None:
            check_fields(self, ConfigError)

Used by config classes, SamplingParams and command line options in `rollout` and `trainer_hooks`,
and by `rollout.wire`. `check_fields` writes converted values into the settings object.

The types `bool`, Literal, enums and dataclasses are ranges by themselves. A field of another type,
such as a number or a text, needs a type of this module, or `Annotated[kind, range]`. For a field
without a range `check_fields` raises TypeError.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Annotated, Any, Protocol, runtime_checkable

MIN_INT64, MAX_INT64, MAX_UINT64 = -(2**63), 2**63 - 1, 2**64 - 1
# 31 years. Timers of the system and of asyncio overflow above it.
MAX_SECONDS = 1e9
_MAX_SHOWN = 200  # characters of a refused value
_MAX_SHOWN_BITS = 512  # of an integer; Python refuses to print very long ones


class Refused(Exception):
    """Raised by `take` for a value outside of the range. Its message is appended to `text()`."""


@runtime_checkable
class ValueRange(Protocol):
    """The values that a field may have."""

    def take(self, value: Any, /) -> Any:
        """Return `value`, converted to the field's type if needed. Raises Refused."""
        ...

    def text(self) -> str:
        """Return the range in words, which follow "num_blocks=0 must be "."""
        ...


@dataclass(frozen=True, slots=True)
class Interval:
    """Numbers from `low` to `high`, both included, but never NaN or infinity.

    is_low_open, is_high_open: exclude the bound, in a field of type `float`.
    unit: the unit in the message.

    In a field of type `int`, an infinite `high` means 2**63 - 1.
    """

    low: float
    high: float = math.inf
    is_low_open: bool = False
    is_high_open: bool = False
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Choices:
    """The values of a list, such as names."""

    known: tuple[Any, ...]

    def take(self, value: Any, /) -> Any:
        """Return `value` if the list has it, with the same type: 1 is not True. Raises Refused."""
        if not any(type(each) is type(value) and each == value for each in self.known):
            raise Refused
        return value

    def text(self) -> str:
        return f"one of {list(self.known)}"


@dataclass(frozen=True, slots=True)
class PowersOfTwo:
    """Powers of two: 1, 2, 4, ..., up to `high`."""

    high: int

    def take(self, value: Any, /) -> Any:
        """Return `value` as an int. Raises Refused with the nearest power of two."""
        number = _as_int(value)
        if not 1 <= number <= self.high or number & (number - 1):
            nearest = 1 << round(math.log2(min(max(1, number), self.high)))
            raise Refused(f"; nearest is {nearest}")
        return number

    def text(self) -> str:
        return f"a power of two in [1, {self.high}]"


@dataclass(frozen=True, slots=True)
class Text:
    """Strings, which are not empty unless `may_be_empty`. `meaning` is the range in words."""

    meaning: str = "a non-empty string"
    may_be_empty: bool = False

    def take(self, value: Any, /) -> Any:
        """Return `value` if it is such a string. Raises Refused."""
        if not isinstance(value, str) or not (value or self.may_be_empty):
            raise Refused
        return value

    def text(self) -> str:
        return self.meaning


@dataclass(frozen=True, slots=True)
class AnyValue:
    """All values. `reason` is why there is no range, or where the value is checked."""

    reason: str

    def take(self, value: Any, /) -> Any:
        """Return `value` unchanged."""
        return value

    def text(self) -> str:
        return f"anything: {self.reason}"


PositiveInt = Annotated[int, Interval(1)]
NonNegativeInt = Annotated[int, Interval(0)]
PositiveFloat = Annotated[float, Interval(0.0, is_low_open=True)]
NonNegativeFloat = Annotated[float, Interval(0.0)]
AnyNumber = Annotated[float, Interval(-math.inf)]  # except NaN and infinity
Fraction = Annotated[float, Interval(0.0, 1.0)]
PositiveFraction = Annotated[float, Interval(0.0, 1.0, is_low_open=True)]
PositiveSeconds = Annotated[float, Interval(0.0, MAX_SECONDS, is_low_open=True, unit="s")]
NonNegativeSeconds = Annotated[float, Interval(0.0, MAX_SECONDS, unit="s")]
# The widest integers that msgpack can carry.
Seed = Annotated[int, Interval(MIN_INT64, MAX_UINT64)]
Name = Annotated[str, Text()]
# Text that may be empty, such as a prefix of prompts.
AnyText = Annotated[str, Text("a string", may_be_empty=True)]
# Arguments of a function that the user names, and that checks them itself.
Options = Mapping[str, Annotated[Any, AnyValue("an argument of a function that the user names")]]


def check_fields(settings: Any, error: type[Exception]) -> None:
    """Check the fields of a dataclass instance, and convert values to their types.

    The value of an enum becomes its member. A NumPy number other than float64 becomes a Python
    number. A list or tuple becomes the type of its field. Converted values are set in `settings`.
    Raises `error`, naming field, value and range, for the first value out of range. Raises
    TypeError for a field without a range.
    """
    kind: Any = type(settings)
    for name, value_range in ranges_of(kind).items():
        value = getattr(settings, name)
        taken = _taken(name, value, value_range, error)
        if taken is not value:
            object.__setattr__(settings, name, taken)


def check_value(name: str, value: Any, kind: Any, error: type[Exception]) -> Any:
    """Return the argument `value`, converted to `kind`, a type with a range such as PositiveInt.
    Raises `error`, naming argument, value and range, for a value outside of the range."""
    return _taken(name, value, range_of(kind), error)


def _taken(name: str, value: Any, value_range: ValueRange, error: type[Exception]) -> Any:
    try:
        return value_range.take(value)
    except Refused as refused:
        wanted = f"{value_range.text()}{refused}"
        raise error(f"{name}={_shown(value)} must be {wanted}") from None


@functools.cache
def ranges_of(kind: type) -> Mapping[str, ValueRange]:
    """Return the range of each field of a dataclass, by name. Raises TypeError for a field without
    one."""
    hints = typing.get_type_hints(kind, include_extras=True)
    found = {}
    for field in dataclasses.fields(kind):
        try:
            found[field.name] = range_of(hints[field.name])
        except TypeError as error:
            raise TypeError(f"{kind.__name__}.{field.name}: {error}") from None
    return types.MappingProxyType(found)


def range_of(kind: Any) -> ValueRange:
    """Return the range that a type declares. Raises TypeError for a type without a range."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _annotated(*arguments)
    if origin in (typing.Union, types.UnionType):
        return _Either(tuple(range_of(each) for each in arguments))
    if origin is typing.Literal:
        return Choices(arguments)
    if origin in (tuple, list):
        return _items(origin, arguments)
    if origin is Mapping and arguments[0] is str:
        return _Table(range_of(arguments[1]))
    if kind is types.NoneType:
        return _Constant(None, "None")
    if kind is bool:
        return _Instance(bool, "True or False")
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _Member(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _Instance(kind, f"a {kind.__name__}")
    raise TypeError(f"{kind} declares no range; use a type of rollout.ranges")


def _annotated(kind: Any, *metadata: Any) -> ValueRange:
    """Return the range in the metadata of an Annotated type, else the range of `kind`."""
    for each in metadata:
        if isinstance(each, Interval):
            return _Integers(each) if kind is int else _Numbers(each)
        if isinstance(each, ValueRange):
            return each
    return range_of(kind)


def _items(origin: Any, arguments: tuple[Any, ...]) -> ValueRange:
    """Return the range of a list, a tuple of any length, or a tuple with these item types."""
    if origin is list or arguments[1:] == (Ellipsis,):
        return _Items(origin, range_of(arguments[0]))
    return _Row(tuple(range_of(each) for each in arguments))


@dataclass(frozen=True, slots=True)
class _Integers:
    """An interval of integers."""

    interval: Interval

    def take(self, value: Any, /) -> Any:
        number, interval = _as_int(value), self.interval
        high = MAX_INT64 if interval.high == math.inf else interval.high
        if not interval.low <= number <= high:
            raise Refused
        return number

    def text(self) -> str:
        low, high, unit = self.interval.low, self.interval.high, _unit(self.interval)
        if high == math.inf:
            return f"an integer of at least {low}, in 64 bits{unit}"
        return f"an integer in [{low}, {high}]{unit}"


@dataclass(frozen=True, slots=True)
class _Numbers:
    """An interval of numbers."""

    interval: Interval

    def take(self, value: Any, /) -> Any:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise Refused
        try:
            number = float(value)
        except OverflowError:
            raise Refused from None
        interval = self.interval
        is_above = number > interval.low if interval.is_low_open else number >= interval.low
        is_below = number < interval.high if interval.is_high_open else number <= interval.high
        if not (is_above and is_below and math.isfinite(number)):
            raise Refused
        return value if isinstance(value, (int, float)) else number

    def text(self) -> str:
        low, high, unit = self.interval.low, self.interval.high, _unit(self.interval)
        if high == math.inf:
            if low == -math.inf:
                return f"a finite number{unit}"
            side = "above" if self.interval.is_low_open else "of at least"
            return f"a finite number {side} {low:g}{unit}"
        left = "(" if self.interval.is_low_open else "["
        right = ")" if self.interval.is_high_open else "]"
        return f"a number in {left}{low:g}, {high:g}{right}{unit}"


@dataclass(frozen=True, slots=True)
class _Constant:
    """One value."""

    value: Any
    shown: str

    def take(self, value: Any, /) -> Any:
        if value is not self.value:
            raise Refused
        return value

    def text(self) -> str:
        return self.shown


@dataclass(frozen=True, slots=True)
class _Instance:
    """The instances of a class."""

    kind: type
    shown: str

    def take(self, value: Any, /) -> Any:
        if not isinstance(value, self.kind):
            raise Refused
        return value

    def text(self) -> str:
        return self.shown


@dataclass(frozen=True, slots=True)
class _Member:
    """The members of an enum, and their values."""

    kind: type[Enum]

    def take(self, value: Any, /) -> Any:
        try:
            return self.kind(value)
        except ValueError:
            raise Refused from None

    def text(self) -> str:
        return f"one of {[member.value for member in self.kind]}"


@dataclass(frozen=True, slots=True)
class _Either:
    """Values of any of several ranges. The first range that accepts a value converts it."""

    options: tuple[ValueRange, ...]

    def take(self, value: Any, /) -> Any:
        remedies = []
        for option in self.options:
            try:
                return option.take(value)
            except Refused as refused:
                remedies.append(str(refused))
        raise Refused("".join(remedies))

    def text(self) -> str:
        return " or ".join(option.text() for option in self.options)


@dataclass(frozen=True, slots=True)
class _Items:
    """Lists or tuples of any length, with items of one range. A value is converted to the type
    `kind`."""

    kind: type
    item: ValueRange

    def take(self, value: Any, /) -> Any:
        if not isinstance(value, (list, tuple)):
            raise Refused
        taken = [self.item.take(each) for each in value]
        return value if self.kind is type(value) and _is_same(taken, value) else self.kind(taken)

    def text(self) -> str:
        return f"a {self.kind.__name__} of items that are each {self.item.text()}"


@dataclass(frozen=True, slots=True)
class _Row:
    """Tuples with one range per item. A list is converted to a tuple."""

    items: tuple[ValueRange, ...]

    def take(self, value: Any, /) -> Any:
        if not isinstance(value, (list, tuple)) or len(value) != len(self.items):
            raise Refused
        taken = [item.take(each) for item, each in zip(self.items, value, strict=True)]
        return value if isinstance(value, tuple) and _is_same(taken, value) else tuple(taken)

    def text(self) -> str:
        return f"{len(self.items)} values: {', '.join(item.text() for item in self.items)}"


@dataclass(frozen=True, slots=True)
class _Table:
    """Mappings from names to values of one range."""

    item: ValueRange

    def take(self, value: Any, /) -> Any:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise Refused
        taken = {name: self.item.take(each) for name, each in value.items()}
        return value if _is_same(list(taken.values()), list(value.values())) else taken

    def text(self) -> str:
        return f"a mapping from names to {self.item.text()}"


def _as_int(value: Any) -> int:
    """Return a Python or NumPy integer as an int. Raises Refused for other types and for bools."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise Refused
    return value if isinstance(value, int) else int(value)


def _is_same(taken: Sequence[Any], given: Sequence[Any]) -> bool:
    return all(a is b for a, b in zip(taken, given, strict=True))


def _unit(interval: Interval) -> str:
    return f" ({interval.unit})" if interval.unit else ""


def _shown(value: Any) -> str:
    """Return a refused value as text for a message, shortened if it is long."""
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        return f"{'-' if value < 0 else ''}2**{value.bit_length() - 1} and more"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
