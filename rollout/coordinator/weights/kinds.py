"""transport_of: the transport that a user has named, or brought."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rollout.coordinator.weights.collective import CollectiveTransport
from rollout.coordinator.weights.directory import DirectoryTransport
from rollout.coordinator.weights.shared import SharedTransport
from rollout.coordinator.weights.transport import WeightTransport
from rollout.errors import ConfigError


def transport_of(
    named: str | WeightTransport | None, *, reject_non_finite: bool
) -> WeightTransport:
    """Return the transport that `named` says: "shared" (None, too), "directory:PATH",
    "collective" or "collective:HOST". One that the user has made is taken as it is.

    Raises ConfigError naming the legal ones.
    """
    if named is None:
        named = "shared"
    if not isinstance(named, str):
        return named
    kind, _, argument = named.partition(":")
    make = _MAKERS.get(kind)
    if make is None:
        raise ConfigError(f"weight_transport={named!r} is none of {', '.join(_FORMS)}")
    return make(argument, reject_non_finite)


def _shared(argument: str, reject_non_finite: bool) -> WeightTransport:
    if argument:
        raise ConfigError(f"weight_transport='shared:{argument}': shared takes no argument")
    return SharedTransport(reject_non_finite=reject_non_finite)


def _directory(argument: str, reject_non_finite: bool) -> WeightTransport:
    if not argument:
        raise ConfigError("weight_transport='directory' needs a path: 'directory:/mnt/weights'")
    return DirectoryTransport(argument, reject_non_finite=reject_non_finite)


def _collective(argument: str, reject_non_finite: bool) -> WeightTransport:
    host = argument or "127.0.0.1"
    return CollectiveTransport(host, reject_non_finite=reject_non_finite)


_FORMS = ("shared", "directory:PATH", "collective", "collective:HOST")
_MAKERS: Mapping[str, Callable[[str, bool], WeightTransport]] = {
    "shared": _shared,
    "directory": _directory,
    "collective": _collective,
}
