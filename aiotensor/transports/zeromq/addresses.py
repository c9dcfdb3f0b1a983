"""Addresses of ZeroMQ sockets: ``tcp://`` with a host and a port, or a path after ``ipc://`` or ``engine://``."""

import asyncio
import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import zmq

from aiotensor.runtime.detached import run_detached
from aiotensor.transports.address import socket_path

__all__ = ["Address", "Target", "look_up", "parse"]

_LOCALHOST = ("127.0.0.1", "::1")
_NAME = re.compile(r"[a-z0-9_.-]+", re.IGNORECASE | re.ASCII)


class Target(NamedTuple):
    """An address that ZeroMQ accepts without resolving a name.

    Attributes:
        address: the address in the form of ZeroMQ.
        is_ipv6: whether it is, or may be, an IPv6 address.
    """

    address: str | bytes
    is_ipv6: bool = False

    @property
    def options(self) -> Mapping[int, int]:
        """The socket options that this address needs."""
        return {zmq.IPV6: 1} if self.is_ipv6 else {}


class Address(NamedTuple):
    """The parsed address of a server.

    Attributes:
        text: the address as the user gave it.
        targets: where to connect or listen, in the order in which to try them; empty if `host` is a name that
            has to be resolved.
        host: the name or the numeric address; "" for a socket file.
        port: the port; 0 for a socket file, or for any free port.
        path: the path of the socket file; None for TCP.
        is_local: whether both sides are on this machine, whose kernel reports the end of a process at once.
    """

    text: str
    targets: tuple[Target, ...]
    host: str
    port: int
    path: str | None
    is_local: bool


def parse(address: str, *, has_keys: bool, is_client: bool = False, local_scheme: str = "ipc") -> Address:
    """Parse an address; without keys, reject addresses that other machines can reach.

    Args:
        address: ``ipc://`` and an absolute path, ``engine://`` and the absolute path of a folder, or ``tcp://``
            with a host and a port.
        has_keys: whether there are CURVE keys.
        is_client: whether a client connects to the address; otherwise a server listens there.
        local_scheme: the scheme of addresses on one machine that errors suggest, ``unix`` for tensors.

    Raises:
        TypeError: the address is not a string.
        ValueError: the address is invalid, or it is not local and there are no keys.
    """
    if not isinstance(address, str):
        raise TypeError(f"address must be a string such as 'ipc:///run/user/1000/m.sock', got {address!r}")
    if address.lower().startswith(("ipc:", "engine:")):
        path = socket_path(address, "ipc")
        return Address(address, (Target(b"ipc://" + os.fsencode(path)),), "", 0, path, True)
    host, port = _host_and_port(address)
    if host is None:
        raise ValueError(
            f"the address {address!r} is not supported: use {local_scheme}:// and an absolute path, such as "
            f"{local_scheme}:///run/user/1000/engine.sock, engine:// and a folder, or tcp:// with a host and "
            "a port"
        )
    if port is None:
        raise ValueError(
            f"the address {address!r} does not contain a port: use, for example, tcp://127.0.0.1:5555"
        )
    numbers = _numeric(host)
    targets = tuple(_target(str(number), port) for number in numbers)
    if host == "*":
        targets = (Target(f"tcp://*:{port}", is_ipv6=True),)
    if not (targets or _is_name(host)):
        raise ValueError(
            f"the address {address!r} does not contain a valid host: {host!r} is neither a name nor a "
            "numeric address"
        )
    if is_client and (host == "*" or port == 0):
        raise ValueError(
            f"the address {address!r} does not specify a server to connect to: use its host and port"
        )
    is_local = bool(numbers) and all(number.is_loopback for number in numbers)
    if not is_local and not has_keys:
        keys = "secret_key and server_key" if is_client else "secret_key and client_keys"
        raise ValueError(
            f"any machine that reaches {address} could connect: pass {keys}, created by zmq.curve_keypair(), "
            f"or use {local_scheme}:// or the address 127.0.0.1"
        )
    return Address(address, targets, host, port, None, is_local)


def look_up(host: str, port: int) -> "asyncio.Future[Sequence[Target]]":
    """Begin to resolve a name in a daemon thread; return the future of the targets, in the order to try them.

    The system's resolver blocks its caller while its name servers do not answer, for ten seconds or more, and
    nothing can interrupt it. ZeroMQ would call it in the thread that carries all messages, so ZeroMQ is only
    given numeric addresses. Cancelling the future ignores the result. The future fails with `OSError` if the
    name cannot be resolved.

    Raises:
        OSError: no thread can be started.
    """
    return run_detached("aiotensor-resolving", lambda: _resolve(host, port))


def _resolve(host: str, port: int) -> Sequence[Target]:
    numbers: dict[str, None] = {}
    for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        zone = address[3] if len(address) == 4 else 0
        numbers[f"{address[0]}%{zone}" if zone else str(address[0])] = None
    return tuple(_target(number, port) for number in numbers)


def _target(number: str, port: int) -> Target:
    """Return the target of a numeric address; an IPv6 one may name its zone after a ``%``."""
    if ":" in number:
        return Target(f"tcp://[{number}]:{port}", is_ipv6=True)
    return Target(f"tcp://{number}:{port}")


def _host_and_port(address: str) -> tuple[str | None, int | None]:
    try:
        parts = urlsplit(address)
        is_whole = address == f"tcp://{parts.netloc}"
        return (parts.hostname, parts.port) if is_whole else (None, None)
    except ValueError:  # the port is invalid
        return None, None


def _numeric(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the addresses of a host without a query; none for a wildcard or a name."""
    # No name server is queried for ``localhost``: it might not answer, or return another machine.
    numbers = _LOCALHOST if host == "localhost" else (host,)
    try:
        return [ipaddress.ip_address(number) for number in numbers]
    except ValueError:
        return []


def _is_name(host: str) -> bool:
    """Return whether a string can be the name of a host or of a network interface."""
    try:
        return _NAME.fullmatch(host.encode("idna").decode()) is not None
    except UnicodeError:  # one of its labels is empty or too long
        return False
