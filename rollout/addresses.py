"""Host names and TCP addresses: resolving, formatting, and which address others dial."""

from __future__ import annotations

import ipaddress
import socket

from rollout.errors import ConfigError

LOOPBACK = "127.0.0.1"


def resolve_host(host: str) -> str:
    """The IP address of a name or address; one of version 4 if there are several.

    Raises ConfigError.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as fault:
        raise ConfigError(
            f"host={host!r} is no IP address and no name that is known here: {fault}"
        ) from fault
    addresses = {family: str(place[0]) for family, _, _, _, place in reversed(found)}
    return addresses.get(socket.AF_INET) or next(iter(addresses.values()))


def listening_host(host: str | None, port: int | None) -> str | None:
    """Return the host at which a coordinator listens: the given one, loopback if there is only a
    port, or None, without both, for a socket that only this user can reach."""
    return LOOPBACK if host is None and port is not None else host


def tcp_address(host: str, port: int | str) -> str:
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def advertised_host(bound: str, advertise_host: str | None) -> str:
    """Return the host that others dial: without another one, loopback where all interfaces are
    bound."""
    if advertise_host is not None:
        return advertise_host
    address = ipaddress.ip_address(bound)
    if not address.is_unspecified:
        return bound
    return LOOPBACK if address.version == 4 else "::1"


def own_host(host: str | None, advertise_host: str | None) -> str:
    """The host at which others reach this machine, where they dial a coordinator on it that listens
    at `host`; the loopback without one."""
    if host is None or advertise_host is not None:
        return advertise_host or LOOPBACK
    try:
        return advertised_host(host, None)
    except ValueError:  # a name
        return host


def host_towards(address: str) -> str:
    """The address of this machine on its way to tcp://HOST:PORT; the loopback's for any other
    address, and where there is no way."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://"):
        return LOOPBACK
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        family, kind, _, _, place = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK
