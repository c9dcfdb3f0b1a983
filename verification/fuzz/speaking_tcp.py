"""A rogue that connects to another machine: a plain ZeroMQ socket, on which it can send any messages."""

import asyncio

import zmq

from aiotensor.protocol.network import OPENING, RECORD
from verification.fuzz.hearing import Inbox
from verification.fuzz.roads import Connections
from verification.fuzz.rogues import read_message, send_message
from verification.fuzz.steps import STAND_IN, Step

__all__ = ["OnTcp"]

_LINGER_MS = 1000
_MOMENT_S = 0.002
_MOST_ANSWERS = 64  # that are read after a record: a publisher may never stop sending
_PATIENCE_S = 20.0  # for an answer that always arrives


class _Connection:
    """One connection, and the messages of the other side on it."""

    def __init__(self, sock: "zmq.Socket[bytes]") -> None:
        self.inbox = Inbox()
        self._sock = sock

    async def say(self, message: bytes) -> None:
        # Never as one part of several, which libzmq does not survive in all cases.
        await send_message(self._sock, [self.inbox.filled_in(message)], lambda: True)

    async def hear(self, within_s: float) -> bool:
        """Read the next message; return False if none comes soon."""
        message = await read_message(self._sock, within_s)
        if message is not None:
            self.inbox.add(message[-1])
        return message is not None

    async def answered(self) -> None:
        """Wait for the first record, or for the last message."""
        async with asyncio.timeout(_PATIENCE_S):
            while not (self.inbox.count or self.inbox.has_ended):
                await self.hear(_PATIENCE_S)

    def close(self) -> None:
        self._sock.close()


class OnTcp:
    """Separate connections to a receiver, publisher or rank at a port.

    Args:
        address: the address.
        opening: the first message of either side.
    """

    def __init__(self, address: str, opening: bytes = OPENING) -> None:
        self._address = address
        self._opening = opening
        self._context = zmq.Context()
        self._open: Connections[_Connection] = Connections()

    async def connect(self, opening: str | None = None) -> None:
        self._open.leave()
        self._open.current = await self._connected(opening)

    async def _connected(self, opening: str | None = None) -> _Connection:
        """Connect, and wait for the answer to a valid opening: then the other side knows the connection."""
        sock = self._context.socket(zmq.DEALER)
        sock.linger = _LINGER_MS
        sock.connect(self._address)
        sock.send(self._opening if opening is None else bytes.fromhex(opening))
        if opening is None:
            answer = await read_message(sock, _PATIENCE_S)
            assert answer == [self._opening], answer
        return _Connection(sock)

    async def say(self, step: Step, sender: bytes) -> bool:
        connection = self._open.current
        if connection is None:
            raise RuntimeError("nothing is said before connecting")
        for message in step.messages:
            await connection.say(message.replace(STAND_IN.encode(), sender))
        # Wait a moment for the answers: the end of the connection discards the tensors that were not taken.
        for _ in range(_MOST_ANSWERS):
            if connection.inbox.has_ended or not await connection.hear(_MOMENT_S):
                break
        return not connection.inbox.has_ended

    async def answered(self) -> None:
        if self._open.current is not None:
            await self._open.current.answered()

    async def read(self, within_s: float) -> bytes:
        """Return the next record of the other side; nothing if none comes soon."""
        connection = self._open.current
        if connection is None:
            return b""
        inbox = connection.inbox
        while not (inbox.records or inbox.has_ended) and await connection.hear(within_s):
            pass
        return inbox.records.popleft() if inbox.records else b""

    async def say_beside(self, step: Step, sender: bytes) -> None:
        connection = await self._connected()
        self._open.beside.append(connection)
        await connection.say(bytes([RECORD]) + step.data)
        await connection.answered()

    def close(self) -> None:
        self._open.close()
        self._context.term()
