"""The connection events of a ZeroMQ socket."""

import asyncio
import contextlib
import errno
import itertools
import math
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import zmq

from aiotensor.runtime.descriptors import ForeignDescriptor, copy_of
from aiotensor.transports.zeromq.context import ZmqContext

__all__ = ["Monitor", "SocketEvents"]

# Any process that reaches the address can cause events. So each iteration of the loop handles only
# `_EVENTS_A_TURN` of them before its other callbacks run. If the other callbacks take longer, events get as
# much time as they do, at most `_EVENTS_MOST_S`.
_EVENTS_A_TURN = 32
_EVENTS_MOST_S = 0.02

# Plain numbers: each operation on an enum takes as long as a call into ZeroMQ.
_NOBLOCK = int(zmq.NOBLOCK)
_ACCEPTED = int(zmq.EVENT_ACCEPTED)
_DISCONNECTED = int(zmq.EVENT_DISCONNECTED)

_numbers = itertools.count()

_LINGER_NEVER = struct.pack("ii", 1, 0)  # closing discards unsent data, and sends a reset

_EVENT = struct.Struct("=HI")  # the event's type and its value
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


class SocketEvents(Protocol):
    """The callbacks of a socket's owner."""

    def connected(self, descriptor: int) -> None:
        """Called when there is a new connection with this descriptor; the handshake follows."""

    def handshaken(self) -> None:
        """Called when a handshake has succeeded: the connection is ready."""

    def unreachable(self) -> None:
        """Called when an attempt to connect has failed; ZeroMQ retries after its interval."""

    def refused(self, *, is_final: bool, error: int) -> None:
        """Called when a handshake has failed.

        Args:
            is_final: whether the keys of the two sides do not match.
            error: otherwise, the errno of ZeroMQ's thread: EPIPE if the peer closed the connection, and that
                of an earlier failure if the handshake took too long.
        """

    def disconnected(self, descriptor: int) -> None:
        """Called when a connection has ended."""

    def message_arrived(self, parts: "list[zmq.Frame]") -> None:
        """Called with a message; one with too many parts is cut off, but still has more than `MAX_PARTS`."""

    def writable(self) -> None:
        """Called to retry the messages that the socket did not accept, until it accepts no more."""


class Monitor:
    """Report the connection events of a socket to its owner; belongs to the running loop.

    Args:
        context: the context of the socket.
        sock: the socket.
        events: the owner, whose callbacks are called.

    Attributes:
        postponed: the number of calls that `after_events` has postponed.

    Raises:
        zmq.ZMQError: the process has no descriptors left.
    """

    def __init__(self, context: ZmqContext, sock: "zmq.Socket[bytes]", events: SocketEvents) -> None:
        self.postponed = 0
        self._loop = asyncio.get_running_loop()
        self._events = events
        # The queue of events and postponed calls. The key of an accepted connection is its descriptor; all
        # other entries have negative keys.
        self._waiting: OrderedDict[int, tuple[int, int] | Callable[[], None]] = OrderedDict()
        self._keys = itertools.count(-1, -1)
        self._is_closed = self._is_reporting = self._has_more = False
        self._paused_at = math.inf  # when reporting stopped, though more events were waiting
        self._connections: dict[int, ForeignDescriptor] = {}  # and the listener; by descriptor
        self._local: object = None  # the path or port where the socket listens
        with contextlib.ExitStack() as made:
            self._socket = made.enter_context(context.socket(zmq.PAIR))
            # Unlimited: when this queue is full, ZeroMQ waits while it holds a lock. Closing would wait for
            # that lock with the GIL.
            self._socket.rcvhwm = 0
            address = f"inproc://aiotensor-{next(_numbers)}"  # names are never reused
            sock.monitor(address, _WATCHED)
            self._socket.connect(address)
            made.pop_all()
        self._descriptor = int(self._socket.get(zmq.FD))
        self._loop.add_reader(self._descriptor, self.report)

    def begin(self) -> None:
        """Begin to report: the descriptor does not become readable before the first event was read."""
        self._loop.call_soon(self.report)

    def report(self) -> None:
        """Report events; after a time limit, the rest follows in the next iterations."""
        if self._is_reporting:
            return
        self._is_reporting = True
        now = time.monotonic()
        # With long iterations, a fixed number of events for each would not keep up with a flood.
        until = now + min(now - self._paused_at, _EVENTS_MOST_S)
        count = 0
        try:
            self._read()
            while self._waiting:
                self._report_next()
                count += 1
                if count % _EVENTS_A_TURN == 0 and time.monotonic() >= until:
                    self._paused_at = time.monotonic()
                    if not self._has_more:
                        self._has_more = True
                        self._loop.call_soon(self._report_more)
                    return
        finally:
            self._is_reporting = False
        self._paused_at = math.inf

    def _report_more(self) -> None:
        self._has_more = False
        self.report()

    def after_events(self, callback: Callable[[], None]) -> None:
        """Call a function once all events up to now have been reported.

        Usually the function is called at once. During a flood of connections, it is called in a later
        iteration of the event loop. Functions are called in the order in which they were passed.
        """
        self._read()  # events that arrive later must not delay the function
        self._waiting[next(self._keys)] = callback
        self.postponed += 1
        if not self._has_more:
            self.report()

    def report_first(self) -> None:
        """Report the first event, and no other."""
        self._read()
        if self._waiting:
            self._report_next()

    def _read(self) -> None:
        """Read all events; omit connections that end before they are reported.

        So there is little to report during a flood, and only open connections occupy memory.
        """
        receive, waiting = self._socket.recv, self._waiting
        try:
            while not self._is_closed:
                event, value = _EVENT.unpack(receive(_NOBLOCK))
                receive(_NOBLOCK)  # the address
                if event == _ACCEPTED:
                    waiting[value] = event, value
                elif event != _DISCONNECTED or waiting.pop(value, None) is None:
                    waiting[next(self._keys)] = event, value
        except zmq.Again:
            pass
        except BaseException:
            if self._socket.get(zmq.RCVMORE):  # a signal handler raised between the two parts
                receive(_NOBLOCK)
            raise

    def _report_next(self) -> None:
        _, first = self._waiting.popitem(last=False)
        if isinstance(first, tuple):
            self._report_event(*first)
        else:
            self.postponed -= 1
            first()

    def _report_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_LISTENING:
            self._connections[value] = ForeignDescriptor(value)
            with contextlib.suppress(OSError), copy_of(value) as listener:
                self._local = _local_address(listener)
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

    def reset(self, descriptor: int) -> bool:
        """Reset an accepted connection; return whether it has ended or is about to end."""
        # A copy is used, because ZeroMQ may close the descriptor at any time, and its number may be reused.
        try:
            copy = copy_of(descriptor)
        except OSError as error:
            return error.errno not in (errno.EMFILE, errno.ENFILE)
        with contextlib.suppress(OSError), copy:
            if self._local is not None and _local_address(copy) == self._local:
                # ZeroMQ reads the end of the stream and closes the socket, which sends a reset. To a client
                # with keys, an end without a reset means that the keys do not match.
                copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NEVER)
                copy.shutdown(socket.SHUT_RD)
        return True

    def close(self) -> None:
        """Report no more events; call it before the socket is closed."""
        self._is_closed = True
        self._loop.remove_reader(self._descriptor)
        self._connections.clear()
        self._waiting.clear()
        self.postponed = 0
        del self._events
        self._socket.close(0)


def _local_address(sock: socket.socket) -> object:
    """Return the path or port that a socket is bound to."""
    name = sock.getsockname()
    return name[1] if isinstance(name, tuple) else name  # the host differs if the listener has a wildcard
