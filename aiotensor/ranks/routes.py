"""The route between two ranks: a socket file on one machine, and ``tcp://`` between machines."""

import errno
import ipaddress
import os
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from aiotensor.errors import ProtocolError, UsageError
from aiotensor.protocol.frames import MAX_RECORD_BYTES
from aiotensor.ranks.door import Door
from aiotensor.ranks.entries import Entry, address_towards
from aiotensor.transports.address import MAX_PATH_BYTES
from aiotensor.transports.base import Connector
from aiotensor.transports.tcp.arguments import TcpArguments
from aiotensor.transports.unix import UnixConnector, listen_at

__all__ = ["Address", "NetworkOptions", "connecting", "listening", "network_options"]

_TOKEN_BYTES = 32


class NetworkOptions(NamedTuple):
    """The options of one end for connections between machines; without encryption, the keys are empty."""

    public_key: str
    secret_key: str
    peer_timeout_s: float | None


class Address(NamedTuple):
    """The address of the listening end, and the secret for connecting to it."""

    text: str
    token: str = ""


def network_options(peer_timeout_s: float | None, *, encrypt: bool) -> NetworkOptions:
    """Return the options of one end, with new keys if the connection is encrypted."""
    if not encrypt:
        return NetworkOptions("", "", peer_timeout_s)
    import zmq  # imported here: ranks on one machine need no ZeroMQ

    public, secret = zmq.curve_keypair()
    return NetworkOptions(public.decode(), secret.decode(), peer_timeout_s)


@asynccontextmanager
async def listening(own: Entry, other: Entry, network: NetworkOptions, door: Door) -> AsyncIterator[Address]:
    """Listen for the other rank within a block, and yield the address.

    Args:
        own: the entry of this end.
        other: the entry of the other end.
        network: the options of this end.
        door: the object that admits the connection.

    Raises:
        UsageError: no address is known at which the other rank reaches this one.
        OSError: this process cannot listen.
    """
    if own.machine == other.machine:
        with tempfile.TemporaryDirectory(prefix="aiotensor-") as folder:  # only this user may enter it
            path = f"{folder}/pipe.sock"
            if len(os.fsencode(path)) > MAX_PATH_BYTES:
                text = f"the path {path} is too long for a socket: set TMPDIR to a folder with a shorter name"
                raise OSError(errno.ENAMETOOLONG, text)
            unix = await listen_at(path, door, MAX_RECORD_BYTES)
            try:
                yield Address(path)
            finally:
                unix.close()
        return
    # Imported here: ranks on one machine need no ZeroMQ.
    from aiotensor.transports.tcp.listener import listen_at as listen_over_tcp
    from aiotensor.transports.tcp.options import options_of

    token = secrets.token_hex(_TOKEN_BYTES)
    given = TcpArguments(
        connects=False,
        secret_key=network.secret_key or None,
        client_keys=[other.public_key] if other.public_key else (),
        peer_timeout_s=network.peer_timeout_s,
        token=token,
    )
    options = options_of(f"tcp://{_bracketed(_host_for(own, other))}:0", given)
    tcp = await listen_over_tcp(options, door, MAX_RECORD_BYTES)
    try:
        yield Address(tcp.address, token)
    finally:
        tcp.close()


@asynccontextmanager
async def connecting(other: Entry, network: NetworkOptions, door: Door) -> AsyncIterator[None]:
    """Connect to the other rank within a block; the arguments are those of `listening`.

    Raises:
        ProtocolError: the address in the entry of the other rank is invalid.
        AioTensorError: as for `Connector.connect`.
        OSError: this process has no descriptors or no memory left.
    """
    if not other.token:
        connector: Connector = UnixConnector(other.address, door)
    else:
        from aiotensor.transports.tcp.connector import TcpConnector
        from aiotensor.transports.tcp.options import options_of

        given = TcpArguments(
            secret_key=network.secret_key or None,
            server_key=other.public_key or None,
            peer_timeout_s=network.peer_timeout_s,
            token=other.token,
        )
        try:
            options = options_of(other.address, given)
        except ValueError as error:
            raise ProtocolError(f"the other rank wrote an invalid address to the store: {error}") from error
        connector = TcpConnector(options, door)
    try:
        connector.connect()
        yield
    finally:
        connector.close()


def _host_for(own: Entry, other: Entry) -> str:
    """Return the address at which the other rank reaches this one.

    This is the address of the interface towards the store, which all ranks reach. If that is the loopback
    interface, as on the host of the store, it is the address of the interface towards the other rank.
    """
    host = own.host
    if not host or ipaddress.ip_address(host).is_loopback:
        host = address_towards(other.host, 1) if other.host else ""
    if not host:
        raise UsageError(
            "the other rank runs on another machine, and the store does not determine the network interface "
            "by which it reaches this one: pass the address of that interface as host="
        )
    return host


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
