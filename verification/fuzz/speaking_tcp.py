"""A rogue sender between machines: a plain ZeroMQ socket, on which it can send any messages."""

import asyncio

import zmq

from aiotensor.protocol.moves import BYE, OPENING, RECORD
from verification.fuzz.roads import Connections
from verification.fuzz.rogues import read_message, send_message
from verification.fuzz.steps import STAND_IN, Step

__all__ = ["OnTcp"]

_LINGER_MS = 1000
_MOMENT_S = 0.002
_PATIENCE_S = 20.0  # for an answer that always arrives


class OnTcp:
    """Separate connections to a receiver at a port."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._context = zmq.Context()
        self._open: Connections[zmq.Socket[bytes]] = Connections()
        self._is_answered = False  # by a record, or the last message

    async def connect(self) -> None:
        self._open.leave()
        self._open.current = await self._connected()
        self._is_answered = False

    async def _connected(self) -> "zmq.Socket[bytes]":
        """Connect, and wait for the answer: then the receiver knows the connection."""
        sock = self._context.socket(zmq.DEALER)
        sock.linger = _LINGER_MS
        sock.connect(self._address)
        sock.send(OPENING)
        answer = await read_message(sock, _PATIENCE_S)
        assert answer == [OPENING], answer
        return sock

    async def say(self, step: Step, sender: bytes) -> bool:
        sock = self._open.current
        if sock is None:
            raise RuntimeError("nothing is said before connecting")
        messages = [*map(bytes.fromhex, step.moves), bytes([RECORD]) + step.data]
        for message in messages:  # never as parts of one, which libzmq does not survive in all cases
            await send_message(sock, [message.replace(STAND_IN.encode(), sender)], lambda: True)
        # Wait a moment for the answers: the end of the connection discards the tensors that were not taken.
        while (answer := await read_message(sock, _MOMENT_S)) is not None:
            self._is_answered |= _is_record(answer) or _is_end(answer)
            if _is_end(answer):
                return False
        return True

    async def answered(self) -> None:
        if self._open.current is not None and not self._is_answered:
            await self._first_record(self._open.current)

    async def _first_record(self, sock: "zmq.Socket[bytes]") -> None:
        """Wait for the first record, or for the last message."""
        async with asyncio.timeout(_PATIENCE_S):
            while True:
                answer = await read_message(sock, _PATIENCE_S)
                if answer is not None and (_is_record(answer) or _is_end(answer)):
                    return

    async def read(self, within_s: float) -> bytes:
        """Return the next record of the other side; nothing if none comes soon."""
        sock = self._open.current
        answer = None if sock is None else await read_message(sock, within_s)
        return b"" if answer is None or not _is_record(answer) else answer[0][1:]

    async def say_beside(self, step: Step, sender: bytes) -> None:
        sock = await self._connected()
        self._open.beside.append(sock)
        sock.send(bytes([RECORD]) + step.data)
        await self._first_record(sock)

    def close(self) -> None:
        self._open.close()
        self._context.term()


def _is_record(message: list[bytes]) -> bool:
    return message[0][:1] == bytes([RECORD])


def _is_end(message: list[bytes]) -> bool:
    return message[0][:1] == bytes([BYE])
