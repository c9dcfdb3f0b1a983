"""A ZeroMQ socket on the event loop, and what becomes of its connections.

A plain socket and its descriptor rather than `zmq.asyncio`: that makes a future and two turns of the loop of
each message, and cannot wait for one of the many peers of a ROUTER. ZeroMQ's descriptor says only that
something has changed, and says it once, so whoever hears it has to look until there is nothing left.
"""

import asyncio
import contextlib
import errno
import itertools
import math
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import zmq
from zmq.utils.garbage import gc as collector

from aiotensor.channel.context import Context, check_descriptors
from aiotensor.descriptors import ForeignDescriptor, copy_of
from aiotensor.protocol.frames import MAX_TENSORS
from aiotensor.worker import no_thread

__all__ = ["MAX_PARTS", "LoopSocket", "PeerGoneError", "SocketEvents"]

# Of one message: an identity, a header, a body, as many buffers as a message has tensors, and one for small
# tensors.
MAX_PARTS = MAX_TENSORS + 4

# In one iteration of the loop, before its other callbacks have their turn: messages, and events of
# connections, which any process that reaches the address can cause. There are more of the events if the other
# callbacks took longer than these: events get up to half of the time.
_MESSAGES_A_TURN = 64
_EVENTS_A_TURN = 32
_EVENTS_MOST_S = 0.02

# Plain numbers: each operation on an enum takes as long as a call into ZeroMQ.
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_POLLIN = int(zmq.POLLIN)

_TRY_AGAIN_S = 0.05  # while there is no room: how long a peer waits at most whose word of it was missed

_numbers = itertools.count()

_LINGER_NEVER = struct.pack("ii", 1, 0)  # closing discards what is unsent, and sends a reset

_EVENT = struct.Struct("=HI")  # which, and a number that goes with it
_DENIED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_WATCHED = (
    _DENIED
    | zmq.EVENT_LISTENING
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


class PeerGoneError(Exception):
    """The peer that a message is for is not connected any more."""


class SocketEvents(Protocol):
    """What the owner of a socket wants to be told."""

    def message_arrived(self, parts: "list[zmq.Frame]") -> None:
        """Take a message; of one with more than `MAX_PARTS`, the beginning."""

    def connected(self, descriptor: int) -> None:
        """Note that a connection was made, by its descriptor here; the handshake follows."""

    def handshaken(self) -> None:
        """Note that a connection is ready to be used."""

    def unreachable(self) -> None:
        """Handle a failed attempt to connect; ZeroMQ tries again after its interval."""

    def refused(self, *, is_final: bool, error: int) -> None:
        """Note that a handshake failed; if it is final, since the two sides do not agree on their keys.

        Otherwise `error` is the errno of ZeroMQ's thread: EPIPE if the peer closed the connection, and that
        of an earlier failure if the handshake took too long.
        """

    def disconnected(self, descriptor: int) -> None:
        """Note that a connection is gone."""

    def has_room(self) -> None:
        """Note that what could not be sent before may be sent now; try until nothing more goes."""


class LoopSocket:
    """A socket that tells its owner what happens; belongs to the running loop.

    Args:
        context: to make it in.
        kind: of the socket, `zmq.DEALER` or `zmq.ROUTER`.
        options: to set on it, by their numbers.
        events: who is told.

    Raises:
        zmq.ZMQError: the process has no descriptors left.
    """

    def __init__(
        self,
        context: Context,
        kind: int,
        options: Mapping[int, int | bytes],
        events: SocketEvents,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._events = events
        self._is_closed = self._is_scheduled = self._was_full = False
        self._is_reporting = self._has_more_events = False
        self._paused_at = math.inf  # reading events, while there are more
        self._after_events: deque[Callable[[], None]] = deque()
        self._net: asyncio.TimerHandle | None = None
        self._drops = False  # the rest of a message of too many parts
        self._connections: dict[int, ForeignDescriptor] = {}  # and the listener, by their descriptors
        self._place: object = None  # where it listens
        with contextlib.ExitStack() as made:
            self._socket = made.enter_context(context.socket(kind))
            self._socket.linger = 0
            for option, value in options.items():
                self._socket.set(option, value)
            self._monitor = made.enter_context(context.socket(zmq.PAIR))
            # Without a limit: while it waits for room, ZeroMQ has a lock that closing needs, with the GIL.
            self._monitor.rcvhwm = 0
            events_at = f"inproc://aiotensor-{next(_numbers)}"  # no name is used again
            self._socket.monitor(events_at, _WATCHED)
            self._monitor.connect(events_at)
            made.pop_all()
        self._descriptors = int(self._socket.get(zmq.FD)), int(self._monitor.get(zmq.FD))
        for descriptor, look in zip(self._descriptors, (self._look, self.look_for_events), strict=True):
            self._loop.add_reader(descriptor, look)

    def connect(self, address: str | bytes) -> None:
        """Begin to connect, and go on until it succeeds.

        Raises:
            zmq.ZMQError: nobody can.
        """
        self._socket.connect(address)  # type: ignore[arg-type]  # which is bytes as well
        self._begin()

    def bind(self, address: str | bytes, descriptor: int | None = None) -> None:
        """Listen.

        Args:
            address: where.
            descriptor: of a socket that listens there, to be used and closed; None to make one.

        Raises:
            zmq.ZMQError: nobody can.
        """
        if descriptor is not None:
            self._socket.set(zmq.USE_FD, descriptor)
        self._socket.bind(address)  # type: ignore[arg-type]  # which is bytes as well
        self._begin()
        self._read_event()  # that it listens: a child forked in this turn closes the listener too

    @property
    def address(self) -> str:
        """The address where it listens; says which port a wildcard became."""
        return bytes(self._socket.get(zmq.LAST_ENDPOINT)).decode().rstrip("\0")

    def send(self, parts: Sequence[bytes | memoryview], *, is_retry: bool = False) -> bool:
        """Hand over a message if there is room for it, and say whether there was.

        Large parts are not copied: their memory must not change until ZeroMQ lets go of them.

        Args:
            parts: of the message.
            is_retry: whether this is called from `has_room`, which looks after itself.

        Raises:
            PeerGoneError: its receiver is not connected; only a ROUTER knows.
            OSError: this process has no descriptors, or no thread, to send a large part with; nothing went.
        """
        send, last = self._socket.send, len(parts) - 1
        # All of them first: should one fail, what was sent before would be the beginning of the next message.
        ready = [part if len(part) < zmq.COPY_THRESHOLD else _lent(part) for part in parts]
        try:
            for number, part in enumerate(ready):
                send(part, _LAST if number == last else _MORE, copy=not isinstance(part, zmq.Frame))
        except zmq.Again:
            # It was the first part: after that there is room for the others.
            self._was_full = True
            if not is_retry:
                self._look_soon()
            return False
        except zmq.ZMQError as error:
            self._look_soon()
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerGoneError from error
            raise
        # Trying takes in all that the socket was to be told; its descriptor does not say that again.
        if not is_retry and (self._was_full or _is_readable(self._socket)):
            self._look_soon()
        return True

    def read_some(self, count: int) -> None:
        """Take in what has arrived by now, but no more than so many messages."""
        for _ in range(count):
            if not self._has_messages():
                break
            self._read_one()
        self._look_soon()

    def look_for_events(self) -> None:
        """Report what has become of connections; the rest of many events follows in the next iterations."""
        if self._is_reporting:
            return
        self._is_reporting = True
        now = time.monotonic()
        # Where iterations are long, so few events would never keep up with a flood.
        until = now + min(now - self._paused_at, _EVENTS_MOST_S)
        count = 0
        try:
            while not self._is_closed and self._read_event():
                count += 1
                if count % _EVENTS_A_TURN == 0 and time.monotonic() >= until:
                    self._paused_at = time.monotonic()
                    if not self._has_more_events:
                        self._has_more_events = True
                        self._loop.call_soon(self._look_for_more_events)
                    return
        finally:
            self._is_reporting = False
        self._paused_at = math.inf
        if len(self._after_events) > _MESSAGES_A_TURN:
            self._look_soon()  # reading has stopped
        while self._after_events and not self._is_closed:
            self._after_events.popleft()()

    def after_events(self, callback: Callable[[], None]) -> None:
        """Call a function once all events that have happened by now were reported.

        Usually this calls it at once. During a flood of connections it is called in a later iteration of the
        event loop, in the order of these calls.
        """
        self._after_events.append(callback)
        self.look_for_events()

    def cut(self, descriptor: int) -> bool:
        """Reset a connection that was made to this socket; return whether it has ended or is about to end."""
        # By a copy: ZeroMQ may close the descriptor at any time, and its number may become that of another.
        try:
            copy = copy_of(descriptor)
        except OSError as error:
            return error.errno not in (errno.EMFILE, errno.ENFILE)
        with contextlib.suppress(OSError), copy:
            if self._place is not None and _place_of(copy) == self._place:
                # ZeroMQ reads the end and closes the socket, which sends a reset: an end without one is what
                # a client with wrong keys sees.
                copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NEVER)
                copy.shutdown(socket.SHUT_RD)
        return True

    def close(self, linger_s: float = 0.0) -> None:
        """Close; what was sent goes out within so many seconds, while the context is there."""
        if self._is_closed:
            return
        self._is_closed = True
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        self._connections.clear()
        self._after_events.clear()
        if self._net is not None:
            self._net.cancel()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(int(linger_s * 1000))

    def _begin(self) -> None:
        # A descriptor says nothing before it was looked at once.
        self._look_soon()
        self._loop.call_soon(self.look_for_events)

    def _look_for_more_events(self) -> None:
        self._has_more_events = False
        self.look_for_events()

    def _read_event(self) -> bool:
        """Report an event, and return whether there was one."""
        try:
            data, _ = self._monitor.recv_multipart(_LAST)
        except zmq.Again:
            return False
        event, value = _EVENT.unpack(data)
        if event == zmq.EVENT_LISTENING:
            self._connections[value] = ForeignDescriptor(value)
            with contextlib.suppress(OSError), copy_of(value) as listener:
                self._place = _place_of(listener)
        elif event & (zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED):
            self._connections[value] = ForeignDescriptor(value)
            self._events.connected(value)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._events.handshaken()
        elif event & (_DENIED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
            self._events.refused(is_final=bool(event & _DENIED), error=value)
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self._events.unreachable()
        elif event == zmq.EVENT_DISCONNECTED:
            self._connections.pop(value, None)
            self._events.disconnected(value)
        return True

    def _read_one(self) -> None:
        """Read a message, or some of the rest of one that has too many parts."""
        parts: list[zmq.Frame] = []
        for _ in range(MAX_PARTS + 1):
            part = self._socket.recv(_LAST, copy=False)
            if not self._drops:
                parts.append(part)
            if not part.more:
                self._drops = False
                break
        else:
            self._drops = True
        if parts:
            self._events.message_arrived(parts)

    def _look_soon(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._is_scheduled = False
        for _ in range(_MESSAGES_A_TURN):
            # Each message of an unidentified peer waits until the events before it were reported.
            if len(self._after_events) > _MESSAGES_A_TURN or not self._has_messages():
                break
            self._read_one()
        else:
            self._look_soon()
        if self._was_full:
            self._try_again()

    def _try_again(self) -> None:
        """Send what there was no room for; asking ZeroMQ for anything may take in the word of room."""
        for _ in range(2):
            if not self._was_full or self._is_closed:
                return
            self._was_full = False
            self._events.has_room()
            if self._has_messages():
                self._look_soon()
                return
        if self._was_full and self._net is None:
            # Should that word have been taken in after the last try, nothing would say it again.
            self._net = self._loop.call_later(_TRY_AGAIN_S, self._caught)

    def _has_messages(self) -> bool:
        return not self._is_closed and _is_readable(self._socket)

    def _caught(self) -> None:
        self._net = None
        if not self._is_closed:
            self._look()


def _lent(part: bytes | memoryview) -> zmq.Frame:
    """Have ZeroMQ read memory where it is; a thread of pyzmq, with a context of its own, lets go of it."""
    try:
        if not collector.is_alive():
            check_descriptors()
            collector.start()
        return zmq.Frame(part, copy=False)
    except RuntimeError as error:
        raise no_thread(error) from error
    except zmq.ZMQError as error:
        raise OSError(error.errno, error.strerror) from error


def _place_of(sock: socket.socket) -> object:
    """Return where a socket is bound: a path or a port."""
    name = sock.getsockname()
    return name[1] if isinstance(name, tuple) else name  # a wildcard's address is another on each side


def _is_readable(sock: "zmq.Socket[bytes]") -> bool:
    """Take in what the socket was told, and say whether there is a message."""
    return bool(zmq.zmq_poll([(sock, _POLLIN)], 0))
