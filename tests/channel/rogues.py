"""Plain ZeroMQ sockets, with which a test sends any message to one side."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import zmq
import zmq.asyncio

from aiotensor.protocol.exchange import read_from_client

__all__ = ["hear", "raw"]


@asynccontextmanager
async def raw(
    kind: int, address: str, *, binds: bool = False, high_water_mark: int = 1000
) -> AsyncIterator[zmq.asyncio.Socket]:
    """Open a plain socket, which can send any message."""
    context = zmq.asyncio.Context()
    sock = context.socket(kind)
    sock.linger = 0
    sock.rcvhwm = high_water_mark
    try:
        if binds:
            sock.bind(address)
        else:
            sock.connect(address)
        yield sock
    finally:
        sock.close()
        context.term()


async def hear(sock: zmq.asyncio.Socket) -> tuple[bytes, Any]:
    """Receive a message of a client, and return the identity of the client and the decoded header."""
    identity, header, *_ = await sock.recv_multipart()
    return identity, read_from_client(header)
