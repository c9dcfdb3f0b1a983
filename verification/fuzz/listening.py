"""A rogue receiver or publisher: a plain socket at its address, which replies with any records."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from aiotensor.protocol.frames import MAX_RECORD_BYTES
from aiotensor.protocol.network import OPENING
from aiotensor.transports.endpoints import Endpoint
from verification.fuzz.listening_tcp import waiting_at_port
from verification.fuzz.speaking import say
from verification.fuzz.steps import Conversation
from verification.fuzz.things import Things

__all__ = ["answering_at", "waiting_at"]


@contextmanager
def waiting_at(address: Endpoint) -> Iterator[socket.socket]:
    """Listen at the address of a receiver or publisher, and remove the socket file at the end."""
    path = str(address).removeprefix("unix://")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.setblocking(False)
        listener.bind(path)
        try:
            listener.listen()
            yield listener
        finally:
            os.unlink(path)


@contextmanager
def answering_at(
    address: Endpoint, things: Things, opening: bytes = OPENING, patience_s: float | None = None
) -> Iterator[Callable[[Conversation], Awaitable[None]]]:
    """Listen at the address of a receiver; the result accepts one peer, and runs a conversation with it.

    Args:
        address: the address.
        things: the descriptors of the rogue.
        opening: the first message of either side, over ``tcp://`` only.
        patience_s: the longest wait for a record, on one machine only; None if all of them arrive.
    """
    if str(address).startswith("tcp://"):
        with waiting_at_port(str(address), opening) as port:
            yield port.answer
    else:
        with waiting_at(address) as listener:
            yield lambda conversation: _answer(listener, conversation, things, patience_s)


async def _answer(
    listener: socket.socket, conversation: Conversation, things: Things, patience_s: float | None
) -> None:
    """Accept one peer, and send it the records of a conversation.

    At most the first three records of a sender are awaited: its hello, a segment, and tensors.
    """
    loop = asyncio.get_running_loop()
    sock, _ = await loop.sock_accept(listener)
    with sock:
        sock.setblocking(False)
        read = 0
        for step in conversation.steps:
            while read < step.after and await _read(sock, patience_s):
                read += 1
            if step.carried is not None:
                continue
            beside = things.descriptors(step.descriptors, sock.fileno())
            if not await say(sock, step.data, beside):
                return


async def _read(sock: socket.socket, within_s: float | None) -> bool:
    with contextlib.suppress(ConnectionResetError, TimeoutError):
        async with asyncio.timeout(within_s):
            return bool(await asyncio.get_running_loop().sock_recv(sock, MAX_RECORD_BYTES))
    return False
