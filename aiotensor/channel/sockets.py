"""A ZeroMQ socket on the event loop, with the events of its connections.

This uses a plain socket and its descriptor rather than `zmq.asyncio`, which needs a future and two iterations
of the loop for each message, and cannot wait for one of the many peers of a ROUTER. ZeroMQ's descriptor is
edge-triggered: it becomes readable once after a change, so the reader must continue until nothing is left.
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
from aiotensor.protocol.frames import MAX_TENSORS
from aiotensor.runtime.descriptors import ForeignDescriptor, copy_of
from aiotensor.runtime.worker import no_thread

__all__ = ["MAX_PARTS", "LoopSocket", "PeerGoneError", "SocketEvents"]

# The parts of one message: an identity, a header, a body, a buffer for each tensor, and one for all small
# tensors.
MAX_PARTS = MAX_TENSORS + 4

# The most messages, and connection events, that are handled in one iteration of the loop, so that its other
# callbacks run. Any process that reaches the address can cause events. If the other callbacks take longer
# than this, more events are handled: they get up to half of the time.
_MESSAGES_A_TURN = 64
_EVENTS_A_TURN = 32
_EVENTS_MOST_S = 0.02

# The most messages of all peers that are read before the end of a connection is handled.
_LAST_MESSAGES = 1024

# Plain numbers: each operation on an enum takes as long as a call into ZeroMQ.
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_POLLIN = int(zmq.POLLIN)

_TRY_AGAIN_S = 0.05  # bounds the delay when ZeroMQ's signal that the socket is writable was missed

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


class PeerGoneError(Exception):
    """The receiver of a message is no longer connected."""


class SocketEvents(Protocol):
    """The callbacks of a socket's owner."""

    def message_arrived(self, parts: "list[zmq.Frame]") -> None:
        """Handle a message; one with more than `MAX_PARTS` parts is truncated."""

    def connected(self, descriptor: int) -> None:
        """Handle a new connection with this descriptor; the handshake follows."""

    def handshaken(self) -> None:
        """Handle the end of a handshake: the connection is ready."""

    def unreachable(self) -> None:
        """Handle a failed attempt to connect; ZeroMQ retries after its interval."""

    def refused(self, *, is_final: bool, error: int) -> None:
        """Handle a failed handshake; it is final if the keys of the two sides do not match.

        Otherwise `error` is the errno of ZeroMQ's thread: EPIPE if the peer closed the connection, and that
        of an earlier failure if the handshake took too long.
        """

    def disconnected(self, descriptor: int) -> None:
        """Handle the end of a connection."""

    def has_room(self) -> None:
        """Retry messages that the socket did not accept, until it accepts no more."""


class LoopSocket:
    """A socket that calls its owner back for messages and events; belongs to the running loop.

    Args:
        context: the context of the socket.
        kind: the type of the socket, `zmq.DEALER` or `zmq.ROUTER`.
        options: the socket options, by their numbers.
        events: the owner, whose callbacks are called.

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
        self._paused_at = math.inf  # when reading events stopped, though more were waiting
        self._after_events: deque[Callable[[], None]] = deque()
        self._after_messages: deque[tuple[int, Callable[[], None]]] = deque()
        self._messages_read = 0
        self._net: asyncio.TimerHandle | None = None
        self._drops = False  # discarding the rest of a message with too many parts
        self._connections: dict[int, ForeignDescriptor] = {}  # and the listener, by their descriptors
        self._place: object = None  # the path or port where it listens
        with contextlib.ExitStack() as made:
            self._socket = made.enter_context(context.socket(kind))
            self._socket.linger = 0
            for option, value in options.items():
                self._socket.set(option, value)
            self._monitor = made.enter_context(context.socket(zmq.PAIR))
            # Unlimited: when this queue is full, ZeroMQ waits with a lock that closing needs, with the GIL.
            self._monitor.rcvhwm = 0
            events_at = f"inproc://aiotensor-{next(_numbers)}"  # names are never reused
            self._socket.monitor(events_at, _WATCHED)
            self._monitor.connect(events_at)
            made.pop_all()
        self._descriptors = int(self._socket.get(zmq.FD)), int(self._monitor.get(zmq.FD))
        for descriptor, look in zip(self._descriptors, (self._look, self.look_for_events), strict=True):
            self._loop.add_reader(descriptor, look)

    def connect(self, address: str | bytes) -> None:
        """Begin to connect; ZeroMQ retries until it succeeds.

        Raises:
            zmq.ZMQError: ZeroMQ cannot connect to this address.
        """
        self._socket.connect(address)  # type: ignore[arg-type]  # bytes work as well
        self._begin()

    def bind(self, address: str | bytes, descriptor: int | None = None) -> None:
        """Listen at an address.

        Args:
            address: the address.
            descriptor: a socket that listens there, which ZeroMQ uses and closes; None to create one.

        Raises:
            zmq.ZMQError: ZeroMQ cannot listen there.
        """
        if descriptor is not None:
            self._socket.set(zmq.USE_FD, descriptor)
        self._socket.bind(address)  # type: ignore[arg-type]  # bytes work as well
        self._begin()
        self._read_event()  # EVENT_LISTENING: a child forked in this iteration closes the listener too

    @property
    def address(self) -> str:
        """The address where the socket listens, with the actual port in place of a wildcard."""
        return bytes(self._socket.get(zmq.LAST_ENDPOINT)).decode().rstrip("\0")

    def send(self, parts: Sequence[bytes | memoryview], *, is_retry: bool = False) -> bool:
        """Pass a message to ZeroMQ, and return whether ZeroMQ accepted it.

        Large parts are not copied: their memory must not change until ZeroMQ releases it.

        Args:
            parts: the parts of the message.
            is_retry: whether `has_room` calls this; its caller then checks the socket afterwards.

        Raises:
            PeerGoneError: its receiver is not connected; only a ROUTER raises this.
            OSError: this process has no descriptors or no thread to send a large part; nothing was sent.
        """
        send, last = self._socket.send, len(parts) - 1
        # Wrap all parts before sending any: parts sent before a failure would begin the next message.
        ready = [part if len(part) < zmq.COPY_THRESHOLD else _lent(part) for part in parts]
        try:
            for number, part in enumerate(ready):
                send(part, _LAST if number == last else _MORE, copy=not isinstance(part, zmq.Frame))
        except zmq.Again:
            # Only the first part can fail: ZeroMQ then accepts the others of the message.
            self._was_full = True
            if not is_retry:
                self._look_soon()
            return False
        except zmq.ZMQError as error:
            self._look_soon()
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerGoneError from error
            raise
        # Sending processes pending signals of the socket, and its descriptor does not report them again.
        if not is_retry and (self._was_full or _is_readable(self._socket)):
            self._look_soon()
        return True

    def read_some(self, count: int) -> None:
        """Read the messages that have arrived, at most `count`."""
        for _ in range(count):
            if not self._has_messages():
                break
            self._read_one()
        self._look_soon()

    def look_for_events(self) -> None:
        """Report connection events; after a time limit, the rest follows in the next iterations."""
        if self._is_reporting:
            return
        self._is_reporting = True
        now = time.monotonic()
        # With long iterations, a fixed number of events for each would not keep up with a flood.
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
            self._look_soon()  # reading messages was suspended
        while self._after_events and not self._is_closed:
            self._after_events.popleft()()

    def after_events(self, callback: Callable[[], None]) -> None:
        """Call a function once all events up to now have been reported.

        Usually this calls it at once. During a flood of connections it is called in a later iteration of the
        event loop, in the order of these calls.
        """
        self._after_events.append(callback)
        if not self._has_more_events:
            self.look_for_events()

    def after_messages(self, callback: Callable[[], None]) -> None:
        """Call a function in a later iteration, once all messages that have arrived by now are read.

        During a flood of messages it is called after `_LAST_MESSAGES` of them.
        """
        self._after_messages.append((self._messages_read + _LAST_MESSAGES, callback))
        self._look_soon()

    def cut(self, descriptor: int) -> bool:
        """Reset an accepted connection; return whether it has ended or is about to end."""
        # On a copy: ZeroMQ may close the descriptor at any time, and its number may be reused.
        try:
            copy = copy_of(descriptor)
        except OSError as error:
            return error.errno not in (errno.EMFILE, errno.ENFILE)
        with contextlib.suppress(OSError), copy:
            if self._place is not None and _place_of(copy) == self._place:
                # ZeroMQ reads the end of the stream and closes the socket, which sends a reset. To a client
                # with keys, an end without a reset means that the keys do not match.
                copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NEVER)
                copy.shutdown(socket.SHUT_RD)
        return True

    def close(self, linger_s: float = 0.0) -> None:
        """Close; sent messages get `linger_s` seconds to leave, while the context exists."""
        if self._is_closed:
            return
        self._is_closed = True
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        self._connections.clear()
        self._after_events.clear()
        self._after_messages.clear()
        if self._net is not None:
            self._net.cancel()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(int(linger_s * 1000))

    def _begin(self) -> None:
        # The descriptor reports nothing before the socket was checked once.
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
        """Read a message, or discard some remaining parts of a message with too many."""
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
            self._messages_read += 1
            self._events.message_arrived(parts)

    def _look_soon(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._is_scheduled = is_drained = False
        for _ in range(_MESSAGES_A_TURN):
            # A message of an unidentified peer waits until the events before it have been reported.
            if len(self._after_events) > _MESSAGES_A_TURN:
                break
            is_drained = not self._has_messages()
            if is_drained:
                break
            self._read_one()
        else:
            self._look_soon()
        for _ in range(_MESSAGES_A_TURN):
            if not self._after_messages:
                break
            if not is_drained and self._after_messages[0][0] > self._messages_read:
                break
            self._after_messages.popleft()[1]()
        else:
            self._look_soon()
        if self._was_full:
            self._try_again()

    def _try_again(self) -> None:
        """Send waiting messages; any call into ZeroMQ may consume the signal that the socket is writable."""
        for _ in range(2):
            if not self._was_full or self._is_closed:
                return
            self._was_full = False
            self._events.has_room()
            if self._has_messages():
                self._look_soon()
                return
        if self._was_full and self._net is None:
            # If the signal was consumed after the last attempt, ZeroMQ does not repeat it.
            self._net = self._loop.call_later(_TRY_AGAIN_S, self._caught)

    def _has_messages(self) -> bool:
        return not self._is_closed and _is_readable(self._socket)

    def _caught(self) -> None:
        self._net = None
        if not self._is_closed:
            self._look()


def _lent(part: bytes | memoryview) -> zmq.Frame:
    """Return a frame that is sent without a copy; pyzmq's collector, with its own context, releases it."""
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
    """Return the path or port that a socket is bound to."""
    name = sock.getsockname()
    return name[1] if isinstance(name, tuple) else name  # the host differs if the listener has a wildcard


def _is_readable(sock: "zmq.Socket[bytes]") -> bool:
    """Process pending signals of the socket, and return whether a message can be read."""
    return bool(zmq.zmq_poll([(sock, _POLLIN)], 0))
