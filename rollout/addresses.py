"""Resolves host names, formats TCP addresses, and finds the address at which peers reach this
machine.

Used by `rollout.coordinator.net.sockets`, `rollout.apis.async_llm`, `rollout.apis.fleet_processes`,
`rollout.launch.torchrun`, `rollout.serve.server`, `rollout.cli.engine`, `rollout.cli.serve`, and in
`rollout.weights.transports` by `collective` and `registry`. It asks the system's resolver, and
opens sockets only for the duration of a call.
"""

from __future__ import annotations

import ipaddress
import socket

from rollout.errors import ConfigError

LOOPBACK = "127.0.0.1"


def resolve_host(host: str) -> str:
    """Return an IP address of `host`, which is a name or an address. IPv4 is preferred to IPv6.
    Raises ConfigError for an unknown name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as fault:
        raise ConfigError(
            f"host={host!r} is neither an IP address nor a known host name: {fault}"
        ) from fault
    addresses = {family: str(place[0]) for family, _, _, _, place in reversed(found)}
    return addresses.get(socket.AF_INET) or next(iter(addresses.values()))


def listening_host(host: str | None, port: int | None) -> str | None:
    """Return the host at which a coordinator listens: `host`, or loopback if only `port` is given.
    Returns None if neither is given. The coordinator then listens at a Unix socket that only this
    user can reach."""
    return LOOPBACK if host is None and port is not None else host


def tcp_address(host: str, port: int | str) -> str:
    """Return tcp://HOST:PORT, with an IPv6 address in brackets."""
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def advertised_host(bound: str, advertise_host: str | None) -> str:
    """Return the host at which peers reach a socket that is bound to the address `bound`. Returns
    `advertise_host` if given, loopback if `bound` stands for all interfaces, else `bound`. Raises
    ValueError if `bound` is needed but is not an IP address."""
    if advertise_host is not None:
        return advertise_host
    address = ipaddress.ip_address(bound)
    if not address.is_unspecified:
        return bound
    return LOOPBACK if address.version == 4 else "::1"


def own_host(host: str | None, advertise_host: str | None) -> str:
    """Return the host at which peers reach this machine, whose coordinator listens at `host`.
    Returns `advertise_host` if given, or loopback if `host` is None, because the coordinator then
    does not use TCP. Otherwise returns `host`, or loopback if `host` stands for all interfaces."""
    if host is None or advertise_host is not None:
        return advertise_host or LOOPBACK
    try:
        return advertised_host(host, None)
    except ValueError:  # a name
        return host


def host_towards(address: str) -> str:
    """Return the IP address from which this machine reaches `address`, tcp://HOST:PORT. Returns
    loopback for any other kind of address, and if there is no route."""
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


def require_free_address(host: str, port: int) -> None:
    """Raise ConfigError unless a server can listen at the TCP address now."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in addresses:
            with socket.socket(family, kind, protocol) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind(address)
    except (OSError, UnicodeError) as fault:
        raise address_error(host, port, fault) from fault


def address_error(host: str, port: int, fault: Exception) -> ConfigError:
    """Return the error for an address at which `fault` keeps a server from listening."""
    return ConfigError(
        f"host={host!r}, port={port} is not a free address: {fault}; choose another, or "
        "port=0, which takes a free one"
    )
