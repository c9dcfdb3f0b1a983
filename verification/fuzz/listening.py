"""A rogue that listens: a plain socket at an address, which accepts one peer."""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from aiotensor.protocol.network import OPENING
from aiotensor.transports.endpoints import Endpoint
from verification.fuzz.speaking import Connect, Line, SocketLine, ZmqLine, path_of, read_message
from verification.fuzz.things import Things

_LINGER_MS = 1000
_PATIENCE_S = 20.0  # for a peer that always connects


@contextmanager
def waiting_at(address: Endpoint) -> Iterator[socket.socket]:
    """Listen at an address on one machine, and remove the socket file at the end."""
    path = path_of(str(address))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.setblocking(False)
        listener.bind(path)
        try:
            listener.listen()
            yield listener
        finally:
            if not path.startswith("\0"):
                os.unlink(path)


@contextmanager
def listening_at(address: str, things: Things) -> Iterator[Connect]:
    """Listen at an address; the result accepts one peer."""
    if not address.startswith("tcp://"):
        with waiting_at(address) as listener:

            async def accept(_: str | None) -> Line:
                sock, _ = await asyncio.get_running_loop().sock_accept(listener)
                return SocketLine(sock, things)

            yield accept
        return
    context = zmq.Context()
    try:
        with context.socket(zmq.ROUTER) as sock:
            sock.linger = _LINGER_MS
            sock.router_mandatory = True
            sock.bind(address)

            async def answer(other: str | None) -> Line:
                first = await read_message(sock, _PATIENCE_S)
                assert first is not None, "no peer has connected"
                sock.send_multipart([first[0], OPENING if other is None else bytes.fromhex(other)])
                return ZmqLine(sock, first[0])

            yield answer
    finally:
        context.term()
