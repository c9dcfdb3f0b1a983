"""The lines of a rogue: plain sockets, on which it sends any records, and understands those of the peer."""

import asyncio
import contextlib
import errno
import os
import secrets
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeAlias

import zmq

from aiotensor.protocol import frames as protocol
from aiotensor.protocol import network
from verification.fuzz.grammar import MOST_READ
from verification.fuzz.steps import FIRST_BLOCK, FIRST_NUMBER, HEARD, PEER, PID, STAND_IN, Conversation, Step
from verification.fuzz.things import Things

# The errors of a socket that was cut off, or of a record that cannot be sent.
_UNHEARD = (errno.EPIPE, errno.ECONNRESET, errno.ECONNREFUSED, errno.EMSGSIZE)

_MOMENT_S = 0.02  # for a record that may never arrive
_ANSWERS_S = 0.002  # for acknowledgements
_MOST_ANSWERS = 64  # that are read after a record: a publisher may never stop sending
_PATIENCE_S = 20.0  # for an answer that always arrives
_LINGER_MS = 1000
_POLL_S = 0.0005
_MOST_NAMED = 2 * MOST_READ + 2  # numbers for which a conversation has a placeholder
_PLACEHOLDER = network.encode_ack(network.Ack(HEARD, HEARD))


async def say(sock: socket.socket, record: bytes, descriptors: Sequence[int] = ()) -> bool:
    """Write one record, waiting until the socket is writable; return False if the connection has ended."""
    while True:
        try:
            socket.send_fds(sock, [record], list(descriptors), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            await asyncio.sleep(_POLL_S)
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:  # too many descriptors wait to be read
                await asyncio.sleep(0)
            elif error.errno in (errno.EINVAL, errno.E2BIG):
                return True  # more descriptors than a record can have
            elif error.errno in _UNHEARD:
                return error.errno == errno.EMSGSIZE
            else:
                raise
        else:
            return True


async def read_message(sock: "zmq.Socket[bytes]", within_s: float) -> list[bytes] | None:
    """Return the next message, or None if none comes soon."""
    ends = asyncio.get_running_loop().time() + within_s
    while True:
        with contextlib.suppress(zmq.Again):
            return sock.recv_multipart(zmq.NOBLOCK)
        if asyncio.get_running_loop().time() > ends:
            return None
        await asyncio.sleep(_POLL_S)


async def _send_message(sock: "zmq.Socket[bytes]", parts: Sequence[bytes]) -> bool:
    """Send a message once the socket is writable; return False if the peer is gone."""
    while True:
        try:
            sock.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            await asyncio.sleep(_POLL_S)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        else:
            return True


class Heard:
    """The frames of the peer, from which the placeholders of a conversation are filled in.

    Attributes:
        messages: the numbers of its messages on this connection.
    """

    def __init__(self, before: "Heard | None" = None) -> None:
        self.messages: list[int] = []
        self._peer: str = "" if before is None else before._peer
        self._next: int = 0 if before is None else before._next
        self._blocks: list[int] = []

    def add(self, record: bytes | memoryview) -> None:
        """Add a record of the peer."""
        for frame in protocol.decode(record):
            match frame:
                case protocol.Hello():
                    self._peer, self._next = frame.id, frame.first
                case protocol.Begin() | protocol.Put() | protocol.End():
                    self._add(frame.message)
                case protocol.Message(block=None):
                    self._add(frame.message)
                    content = protocol.read_content(frame.payload)
                    self._blocks += [tensor.block for tensor in content.tensors]
                case protocol.Message():
                    self._add(frame.message)
            if isinstance(frame, protocol.Put | protocol.Message) and frame.block is not None:
                self._blocks.append(frame.block)

    def _add(self, number: int) -> None:
        if number >= self._next:
            self.messages.append(number)
            self._next = number + 1

    def filled_in(self, data: bytes, name: str) -> bytes:
        """Replace the placeholders in a record; unknown numbers are those that would follow."""
        values = {STAND_IN.encode(): name.encode(), PID.to_bytes(4): os.getpid().to_bytes(4)}
        values[PEER.encode()] = (self._peer or PEER).encode()
        numbers = [*self.messages, *range(self._next, self._next + _MOST_NAMED)]
        blocks = [*self._blocks, *range(_MOST_NAMED)]
        for first, known in ((FIRST_NUMBER, numbers), (FIRST_BLOCK, blocks)):
            for index, number in enumerate(known[:_MOST_NAMED]):
                values[(first + index).to_bytes(8)] = number.to_bytes(8)
        for placeholder, value in values.items():
            data = data.replace(placeholder, value)
        return data


class SocketLine:
    """A connection of a rogue on one machine.

    Attributes:
        heard: what the peer has said on it.
    """

    def __init__(self, sock: socket.socket, things: Things) -> None:
        self.heard = Heard()
        self._sock = sock
        self._things = things
        sock.setblocking(False)

    async def say(self, step: Step, name: str) -> bool:
        """Send a record with its descriptors; return False if the connection has ended."""
        beside = self._things.descriptors(step.descriptors, self._sock.fileno())
        return await say(self._sock, self.heard.filled_in(step.data, name), beside)

    async def read(self, within_s: float) -> bool:
        """Read the next record; return False if none comes soon, or the connection ended."""
        record, loop = b"", asyncio.get_running_loop()
        with contextlib.suppress(ConnectionResetError, TimeoutError):
            async with asyncio.timeout(within_s):
                record = await loop.sock_recv(self._sock, protocol.MAX_RECORD_BYTES)
        if record:
            self.heard.add(record)
        return bool(record)

    def close(self) -> None:
        """Close the connection."""
        # After a timeout, asyncio removes the reader in the next iteration. A new socket with the same number
        # would not be watched then.
        if self._sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()


class ZmqLine:
    """A connection between machines, on which all bytes are acknowledged; otherwise like `SocketLine`.

    Args:
        sock: the socket.
        peer: the name of the peer; empty if the socket has a single one.
    """

    def __init__(self, sock: "zmq.Socket[bytes]", *peer: bytes) -> None:
        self.heard = Heard()
        self.has_ended = False
        self._sock = sock
        self._peer = list(peer)
        self._received = network.ReceivedBytes()
        self._ack = self._received.ack()
        self._step: network.Step | None = None  # whose bytes are the next message
        self._records: deque[memoryview] = deque()

    async def say(self, step: Step, name: str) -> bool:
        """Send all messages of a step, and read the answers that come at once."""
        for message in step.messages:
            said = self.heard.filled_in(message, name).replace(_PLACEHOLDER, self._ack)
            # Never as one part of several, which libzmq does not survive in all cases.
            if not await _send_message(self._sock, [*self._peer, said]):
                return False
        # The end of the connection discards the tensors that were not taken.
        for _ in range(_MOST_ANSWERS):
            if self.has_ended or not await self._hear(_ANSWERS_S):
                break
        return not self.has_ended

    async def read(self, within_s: float) -> bool:
        """Read the next record, and the messages before it."""
        while not (self._records or self.has_ended) and await self._hear(within_s):
            pass
        if not self._records:
            return False
        self.heard.add(self._records.popleft())
        return True

    async def _hear(self, within_s: float) -> bool:
        message = await read_message(self._sock, within_s)
        if message is not None and message[:-1] == self._peer:  # and not its next attempt to connect
            self._add(memoryview(message[-1]))
        return message is not None

    def _add(self, data: memoryview) -> None:
        """Handle a message of the peer."""
        if self._step is not None:
            assert len(data) == self._step.length
            self._count(self._step)
            return
        match data[0]:
            case network.RECORD:
                self._received.record(len(data) - 1)
                self._ack = self._received.ack()
                self._records.append(data[1:])
            case network.STEP:
                step, rest = network.read_step(data)
                if rest:
                    self._count(step)
                else:
                    self._step = step
            case network.BATCH:
                for part in network.read_batch(data):
                    self._add(part)
            case network.BYE:
                self.has_ended = True

    def _count(self, step: network.Step) -> None:
        self._step = None
        self._received.step(step)
        # For each step: the peer may send more than it has credit for, if the rogue acknowledges too much.
        self._ack = self._received.ack()

    def close(self) -> None:
        if not self._peer:  # otherwise the socket belongs to the listener
            self._sock.close()


Line: TypeAlias = SocketLine | ZmqLine

# Return a new line to the peer, given the first message of `tcp://` in hexadecimal digits, or None.
Connect: TypeAlias = Callable[[str | None], Awaitable[Line]]


@contextlib.contextmanager
def connecting_to(address: str, things: Things) -> Iterator[Connect]:
    """Return a function that connects to a listening peer."""
    context = zmq.Context()

    async def over_tcp(other: str | None) -> Line:
        """Connect, and wait for the answer to a valid opening: then the peer knows the connection."""
        sock = context.socket(zmq.DEALER)
        sock.linger = _LINGER_MS
        sock.connect(address)
        sock.send(network.OPENING if other is None else bytes.fromhex(other))
        if other is None:
            answer = await read_message(sock, _PATIENCE_S)
            assert answer == [network.OPENING], answer
        return ZmqLine(sock)

    async def over_socket(_: str | None) -> Line:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        while True:
            try:
                sock.connect(path_of(address))
            except BlockingIOError:  # too many others connect right now
                await asyncio.sleep(0)
            except OSError:
                sock.close()
                raise
            else:
                return SocketLine(sock, things)

    try:
        yield over_tcp if address.startswith("tcp://") else over_socket
    finally:
        context.term()


def path_of(address: str) -> str:
    """Return the address of a socket on one machine; a name without a scheme is that of a queue."""
    path = address.removeprefix("unix://")
    return f"\0aiotensor-{path}" if path == address else path


async def converse(connect: Connect, said: Conversation) -> int:
    """Send a whole conversation under a new name, and return the number of messages that were read."""
    name = secrets.token_hex(16)
    line: Line | None = None
    count = 0
    is_heard = True
    with contextlib.ExitStack() as stack:
        for step in said.steps:
            if step.beside:
                other = await connect(None)
                stack.callback(other.close)
                await other.say(step, secrets.token_hex(16))
                await other.read(_PATIENCE_S)
                continue
            if step.connects or line is None:
                before = None
                if line is not None:
                    before = line.heard
                    line.close()
                line = await connect(step.opening)
                stack.callback(line.close)
                line.heard = Heard(before)
            elif not is_heard:
                continue
            heard = line.heard
            known = len(heard.messages)
            while len(heard.messages) < step.after and await line.read(_MOMENT_S):
                pass
            count += len(heard.messages) - known
            is_heard = await line.say(step, name)
    return count


async def heard_by(address: str, things: Things) -> None:
    """Wait until a listening peer has read every earlier record: until it answers an inspector."""
    with connecting_to(address, things) as connect, contextlib.closing(await connect(None)) as line:
        await line.say(
            Step(protocol.encode(protocol.Hello(protocol.VERSION, os.getpid(), "inspector")).hex()), ""
        )
        await line.read(_PATIENCE_S)
