"""Validate the options of clients and servers: addresses, keys and limits."""

import ipaddress
import operator
import os
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple, TypeAlias
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from aiotensor.protocol.exchange import MAX_HEADER_BYTES
from aiotensor.protocol.parts import PartLimits
from aiotensor.transports.address import socket_path
from aiotensor.types import MAX_NUMBER

__all__ = [
    "Address",
    "CurveKey",
    "Target",
    "client_keys",
    "limits",
    "parse",
    "part_limits",
    "positive",
    "seconds",
    "server_keys",
    "target_of",
]

CurveKey: TypeAlias = str | bytes

_KEY_BYTES = 32

# The defaults for other machines, where only missing replies show that the peer is gone: a loss is noticed
# within 1 s, or 1.5 s if only the packets to the peer are lost.
_HEARTBEAT_INTERVAL_S, _HEARTBEAT_TIMEOUT_S = 0.25, 0.65

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


def parse(address: str, *, has_keys: bool, is_client: bool = False) -> Address:
    """Parse an address; without keys, reject addresses that other machines can reach.

    Args:
        address: ``ipc://`` and an absolute path, or ``tcp://`` with a host and a port.
        has_keys: whether there are CURVE keys.
        is_client: whether a client connects to it.

    Raises:
        TypeError: it is not a string.
        ValueError: it is invalid, or is not local and there are no keys.
    """
    if not isinstance(address, str):
        raise TypeError(f"an address is a text such as 'ipc:///run/user/1000/m.sock', got {address!r}")
    if address.lower().startswith("ipc:///"):
        path = socket_path(address, "ipc")
        return Address(address, (Target(b"ipc://" + os.fsencode(path)),), "", 0, path, True)
    host, port = _host_and_port(address)
    if host is None:
        raise ValueError(
            f"no channel serves the address {address!r}: write ipc:// and an absolute path, for example "
            "ipc:///run/user/1000/messages.sock, or tcp:// with a host and a port"
        )
    if port is None:
        raise ValueError(f"the address {address!r} names no port: write, for example, tcp://127.0.0.1:5555")
    numbers = _numeric(host)
    targets = tuple(target_of(str(number), port) for number in numbers)
    if host == "*":
        targets = (Target(f"tcp://*:{port}", is_ipv6=True),)
    if not (targets or _is_name(host)):
        raise ValueError(f"the address {address!r} names no host: {host!r} is no name and no numeric address")
    if is_client and (host == "*" or port == 0):
        raise ValueError(f"the address {address!r} names no server to connect to: write its host and port")
    is_local = bool(numbers) and all(number.is_loopback for number in numbers)
    if not is_local and not has_keys:
        keys = "secret_key and server_key" if is_client else "secret_key and client_keys"
        raise ValueError(
            f"any machine that reaches {address} could connect: give {keys}, made by zmq.curve_keypair(), or "
            "use ipc:// or the address 127.0.0.1"
        )
    return Address(address, targets, host, port, None, is_local)


def target_of(number: str, port: int) -> Target:
    """Return the target of a numeric address; an IPv6 one may name its zone after a ``%``."""
    if ":" in number:
        return Target(f"tcp://[{number}]:{port}", is_ipv6=True)
    return Target(f"tcp://{number}:{port}")


def _host_and_port(address: str) -> tuple[str | None, int | None]:
    try:
        parts = urlsplit(address)
        is_whole = address == f"tcp://{parts.netloc}"
        return (parts.hostname, parts.port) if is_whole else (None, None)
    except ValueError:  # of the port
        return None, None


def _numeric(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the addresses of a host without a query; none for a wildcard or a name."""
    # No name server is queried for this name: it might not answer, or return another machine.
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


def client_keys(secret_key: CurveKey | None, server_key: CurveKey | None) -> dict[int, int | bytes]:
    """Return the CURVE options of a client's socket; none if it has no keys.

    Raises:
        TypeError: a key is neither `str` nor `bytes`.
        ValueError: a key is invalid, or one of the two is missing.
    """
    if secret_key is None and server_key is None:
        return {}
    if secret_key is None or server_key is None:
        raise ValueError("a client with keys has both, its own secret_key and the servers' server_key")
    secret = _key("secret_key", secret_key)
    return {
        zmq.CURVE_SECRETKEY: secret,
        zmq.CURVE_PUBLICKEY: zmq.curve_public(secret),
        zmq.CURVE_SERVERKEY: _key("server_key", server_key),
    }


def server_keys(
    secret_key: CurveKey | None, clients: Collection[CurveKey]
) -> tuple[dict[int, int | bytes], frozenset[bytes]]:
    """Return the CURVE options of a server's socket, and the public keys of its clients.

    Raises:
        TypeError: a key is neither `str` nor `bytes`.
        ValueError: a key is invalid, or the server's key or the clients' keys are missing.
    """
    if secret_key is None and not clients:
        return {}, frozenset()
    if secret_key is None or not clients:
        raise ValueError("a server with keys has both, its own secret_key and the client_keys of its clients")
    public = frozenset(_key("client_keys", client) for client in clients)
    return {zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: _key("secret_key", secret_key)}, public


def _key(name: str, value: CurveKey) -> bytes:
    """Check a CURVE key."""
    if not isinstance(value, str | bytes):
        raise TypeError(f"{name} has keys as zmq.curve_keypair() makes them, of 40 characters, got {value!r}")
    text = value.encode() if isinstance(value, str) else value
    try:
        is_key = len(z85.decode(text)) == _KEY_BYTES
    except (KeyError, ValueError):
        is_key = False
    if not is_key:  # not shown: it may be a secret with a typo
        raise ValueError(f"{name} has keys as zmq.curve_keypair() makes them, of 40 characters; this is none")
    return text


def limits(
    addresses: Collection[Address],
    high_water_mark: int,
    largest: int | None,
    heartbeat_interval_s: float | None,
    heartbeat_timeout_s: float | None,
) -> dict[int, int | bytes]:
    """Return the socket options that limit queues and message sizes, and set the heartbeats.

    Args:
        addresses: where the socket listens or connects.
        high_water_mark: the most queued messages in each direction.
        largest: the most bytes in a part of a message, as `part_limits` returns them; None for no limit.
        heartbeat_interval_s: the argument of the user, in seconds; None for the default.
        heartbeat_timeout_s: the argument of the user, in seconds; None for the default.

    Raises:
        ValueError: a limit is not positive.
    """
    options: dict[int, int | bytes] = {
        zmq.SNDHWM: positive("high_water_mark", high_water_mark),
        zmq.RCVHWM: high_water_mark,
        # The limit that peers know is for parts; a header may be longer than that.
        zmq.MAXMSGSIZE: -1 if largest is None else min(largest + MAX_HEADER_BYTES, MAX_NUMBER),
    }
    is_local = all(address.is_local for address in addresses)
    if is_local and heartbeat_interval_s is None and heartbeat_timeout_s is None:
        return options
    # ZeroMQ stops reading a connection whose queue is full. If the connection ends then, the next heartbeat
    # fails an assertion of libzmq 4.3.5, which ends the process. Credit bounds what honest peers send.
    options[zmq.RCVHWM] = 0
    options[zmq.HEARTBEAT_IVL] = _milliseconds(
        "heartbeat_interval_s", heartbeat_interval_s, _HEARTBEAT_INTERVAL_S
    )
    options[zmq.HEARTBEAT_TIMEOUT] = _milliseconds(
        "heartbeat_timeout_s", heartbeat_timeout_s, _HEARTBEAT_TIMEOUT_S
    )
    return options


def part_limits(max_part_bytes: int | None, max_body_bytes: int | None) -> PartLimits:
    """Check the limits on the parts of messages and on their bodies, and return them as sent in hellos.

    Raises:
        ValueError: a limit is not positive.
    """
    named = {"max_part_bytes": max_part_bytes, "max_body_bytes": max_body_bytes}
    return PartLimits(
        *(None if limit is None else min(positive(name, limit), MAX_NUMBER) for name, limit in named.items())
    )


def positive(name: str, value: int) -> int:
    """Check a limit."""
    if operator.index(value) < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value


def seconds(name: str, value: float) -> float:
    """Check a span of time."""
    if not 0 <= value < 2**31 / 1000:
        raise ValueError(f"{name} is seconds, at least 0, got {value}")
    return value


def _milliseconds(name: str, value: float | None, default: float) -> int:
    span = default if value is None else value
    if not 0.001 <= span <= 6553:  # ZeroMQ sends it to the other side in 16 bits, as tenths of a second
        raise ValueError(f"{name} is seconds, from 0.001 to 6553, got {span}")
    return round(span * 1000)
