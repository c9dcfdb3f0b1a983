"""Addresses: ``unix://`` with the path of a socket, or ``tcp://`` with a host and a port.

Importing this does not import ZeroMQ.
"""

import asyncio
import ipaddress
import os
import re
import socket
from collections.abc import Collection, Sequence
from typing import NamedTuple
from urllib.parse import unquote_to_bytes, urlsplit

from aiotensor.runtime.worker import run_detached
from aiotensor.types import CurveKey

MAX_PATH_BYTES = 107  # of a socket's address on Linux

_FORMS = (
    "unix:// followed by an absolute path, such as unix:///run/user/1000/engine.sock, or tcp:// followed by "
    "a host and a port, such as tcp://127.0.0.1:5555"
)
_LOCALHOST = ("127.0.0.1", "::1")
_NAME = re.compile(r"[a-z0-9_.-]+", re.IGNORECASE | re.ASCII)


class TcpArguments(NamedTuple):
    """The arguments of the user for connections between machines.

    Attributes:
        connects: whether this side connects; otherwise it listens.
        secret_key: the secret key of this side.
        server_key: the public key of the side that listens, for a side that connects.
        client_keys: the public keys of the sides that connect, for a side that listens.
        peer_timeout_s: the seconds without an answer after which the peer is lost; None for the default.
        token: a secret that both sides have, and that replaces keys where the connection is not encrypted;
            "" for none. With a token, a side may listen at any free port.
        finds_port: whether this side may listen at any free port also without one, since it states the port.
    """

    connects: bool = True
    secret_key: CurveKey | None = None
    server_key: CurveKey | None = None
    client_keys: Collection[CurveKey] = ()
    peer_timeout_s: float | None = None
    token: str = ""
    finds_port: bool = False

    @property
    def is_given(self) -> bool:
        """Whether the user gave any argument."""
        return any((self.secret_key, self.server_key, self.client_keys, self.peer_timeout_s))


class TcpAddress(NamedTuple):
    """A parsed ``tcp://`` address.

    Attributes:
        text: the address as the user gave it.
        host: the name or the numeric address.
        port: the port; 0 for any free one.
        targets: where to connect or listen, in the form of ZeroMQ and in the order in which to try them;
            empty if `host` is a name that has to be resolved.
        is_local: whether both sides are on this machine, whose kernel reports the end of a process at once.
    """

    text: str
    host: str
    port: int
    targets: Sequence[str]
    is_local: bool


def socket_path(address: str) -> str:
    """Return the path in an address such as ``unix:///run/user/1000/engine.sock``, decoded by `os.fsdecode`.

    ``%`` and two hexadecimal digits stand for a byte, as in other URLs.

    Raises:
        ValueError: the address does not consist of ``unix://`` and an absolute path, or the path is too long
            for a socket.
    """
    scheme, _, rest = address.partition("://")
    if scheme.lower() != "unix" or not rest.startswith("/") or "?" in rest or "#" in rest:
        raise ValueError(
            f"the address {address!r} must be {_FORMS}; write a question mark as %3F, and # as %23"
        )
    try:
        name = unquote_to_bytes(os.fsencode(rest))
    except UnicodeEncodeError as error:
        raise ValueError(f"the address {address!r} does not contain a valid path: {error.reason}") from None
    if name.endswith(b"/") or b"\0" in name:
        raise ValueError(f"the address {address!r} does not name a file")
    if len(name) > MAX_PATH_BYTES:
        raise ValueError(
            f"the path of the address {address!r} is longer than the {MAX_PATH_BYTES} bytes allowed for a "
            "socket: choose a folder with a shorter path"
        )
    return os.fsdecode(name)


def tcp_address(address: str, *, has_keys: bool, connects: bool) -> TcpAddress:
    """Parse a ``tcp://`` address; without keys, reject one that other machines can reach.

    Args:
        address: the address.
        has_keys: whether there are CURVE keys, or another secret.
        connects: whether this side connects to the address; otherwise it listens there.

    Raises:
        ValueError: the address is invalid, or it is not local and there are no keys.
    """
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:  # the port is invalid
        parts, host, port = None, None, None
    if parts is None or host is None or address != f"tcp://{parts.netloc}":
        raise ValueError(f"the address {address!r} must be {_FORMS}")
    if port is None:
        raise ValueError(
            f"the address {address!r} does not contain a port: use, for example, tcp://127.0.0.1:5555"
        )
    if connects and (host == "*" or port == 0):
        raise ValueError(
            f"the address {address!r} does not specify a server to connect to: use its host and port"
        )
    # No name server is queried for ``localhost``: it might not answer, or return another machine.
    hosts: tuple[str, ...] = _LOCALHOST if host == "localhost" else (host,)
    is_local = False
    try:
        is_local = all(ipaddress.ip_address(one).is_loopback for one in hosts)
    except ValueError:  # a wildcard or a name
        if host != "*" and not _is_name(host):
            raise ValueError(
                f"the address {address!r} does not contain a valid host: {host!r} is neither a name nor a "
                "numeric address"
            ) from None
        hosts = ("*",) if host == "*" else ()
    if not (is_local or has_keys):
        keys = "secret_key and server_key" if connects else "secret_key and client_keys"
        raise ValueError(
            f"any machine that reaches {address} could connect: pass {keys}, created by zmq.curve_keypair(), "
            "or use unix:// or the address 127.0.0.1"
        )
    return TcpAddress(address, host, port, [_target(one, port) for one in hosts], is_local)


def _target(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def look_up(address: TcpAddress) -> "asyncio.Future[Sequence[str]]":
    """Begin to resolve a name in a daemon thread; return the future of the targets, in the order to try them.

    The system's resolver blocks its caller while its name servers do not answer, for ten seconds or more, and
    nothing can interrupt it. ZeroMQ would call it in the thread that carries all messages, so ZeroMQ is only
    given numeric addresses. Cancelling the future ignores the result. The future fails with `OSError` if the
    name cannot be resolved.

    Raises:
        OSError: no thread can be started.
    """

    def resolve() -> Sequence[str]:
        hosts: dict[str, None] = {}
        for *_, found in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
            zone = found[3] if len(found) == 4 else 0
            hosts[f"{found[0]}%{zone}" if zone else str(found[0])] = None
        return [_target(host, address.port) for host in hosts]

    return run_detached("aiotensor-resolving", resolve)


def _is_name(host: str) -> bool:
    """Return whether a string can be the name of a host."""
    try:
        return _NAME.fullmatch(host.encode("idna").decode()) is not None
    except UnicodeError:  # one of its labels is empty or too long
        return False


def label_of(address: str) -> str:
    """Return an address for logs and metrics; bytes that are not UTF-8 are escaped."""
    return address.encode(errors="backslashreplace").decode()
