"""A ZeroMQ socket on the event loop: its messages, and the events of its connections.

This uses plain sockets and their descriptors rather than `zmq.asyncio`, which needs a future and two
iterations of the loop for each message. ZeroMQ's descriptors are edge-triggered: they become readable once
after a change, so the reader must continue until nothing is left.
"""

import asyncio
import contextlib
import itertools
import math
import os
import struct
import sys
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import zmq
from zmq.utils.garbage import gc as collector

from aiotensor.runtime.descriptors import ForeignDescriptor
from aiotensor.runtime.worker import no_thread

__all__ = ["ACCEPTED", "DISCONNECTED", "LAST_MESSAGES", "LoopSocket", "ZmqContext", "is_ipv6", "new_context"]

# Descriptors that a context, its threads and its first sockets need, and the collector of pyzmq as well.
_BEGINS_WITH = 16

# After this time, the other callbacks of the loop run before further messages are handled. A number of
# messages would not limit the time: one may announce a thousand tensors, or have a megabyte to copy.
_READING_S = 0.001

# Any process that reaches the address can cause events. So each iteration of the loop handles only
# `_EVENTS_A_TURN` of them before its other callbacks run. If the other callbacks take longer, events get as
# much time as they do, at most `_EVENTS_MOST_S`: otherwise they would not keep up with a flood.
_EVENTS_A_TURN = 32
_EVENTS_MOST_S = 0.02

_MOST_POSTPONED = 64  # first messages of connections that wait for the events before them

# The maximum number of messages that are read before the end of a connection is reported.
LAST_MESSAGES = 1024

# Plain numbers: each operation on an enum takes as long as a call into ZeroMQ.
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_POLLIN = int(zmq.POLLIN)
ACCEPTED = int(zmq.EVENT_ACCEPTED)
DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
_OPENED = int(zmq.EVENT_LISTENING | zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED)

_GONE = (
    zmq.EHOSTUNREACH,
    zmq.EAGAIN,
)  # the errors of a ROUTER and of a DEALER for a connection that has ended

_EVENT = struct.Struct("=HI")  # the kind of an event, and its value

_numbers = itertools.count()


class ZmqContext(zmq.Context["zmq.Socket[bytes]"]):
    """A context that closes its sockets when it is garbage-collected.

    `zmq.Context` has weak references to its sockets. The garbage collector clears these before it calls
    finalizers, and terminating a context waits forever for an open socket.
    """

    _owned: "list[zmq.Socket[bytes]]"

    def __init__(self) -> None:
        self._owned = []
        super().__init__()

    def socket(self, *args: Any, **options: Any) -> "zmq.Socket[bytes]":
        """Create a socket, and keep a reference to it until it is closed."""
        made = super().socket(*args, **options)
        self._owned = [*(one for one in self._owned if not one.closed), made]
        return made

    def term(self) -> None:
        """End the threads; all sockets must be closed."""
        super().term()
        self._owned = []  # the sockets refer to this context

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # An event loop that watches a socket refers to this context, so no loop watches one now.
        if not is_finalizing() and not self.closed:
            for one in self._owned:
                one.close(0)
            self.term()


def new_context() -> ZmqContext:
    """Create a context, and start the thread of pyzmq that releases messages which are sent without a copy.

    Raises:
        OSError: this process has too few descriptors left, or no thread can be started.
    """
    with contextlib.ExitStack() as spare:  # ZeroMQ aborts the process if its threads get no descriptors
        for _ in range(_BEGINS_WITH):
            spare.callback(os.close, os.eventfd(0))
    try:
        if not collector.is_alive():
            collector.start()
        return ZmqContext()
    except RuntimeError as error:
        raise no_thread(error) from error
    except zmq.ZMQError as error:
        raise OSError(error.errno, error.strerror) from error


def is_ipv6(target: str) -> bool:
    """Return whether a numeric address of ZeroMQ is, or includes, one of IPv6; an option of its socket."""
    return "[" in target or "*" in target


class LoopSocket(ABC):
    """A socket that reads its messages and its events; belongs to the running loop.

    Args:
        context: the context of the socket.
        kind: the type of the socket, `zmq.DEALER` or `zmq.ROUTER`.
        events: the kinds of events that are reported, besides those of new and of ended connections.
        options: the socket options, by their numbers.

    Raises:
        zmq.ZMQError: the process has no descriptors left.
    """

    def __init__(
        self, context: ZmqContext, kind: int, events: int, options: Mapping[int, int | bytes]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._has_shut = self._is_scheduled = False
        self._connections: dict[int, ForeignDescriptor] = {}  # and the listener; by descriptor
        # Messages
        self._messages_read = 0
        self._discards = False  # the rest of a message: it has too many parts, or its reading was interrupted
        self._ending: deque[tuple[int, bytes]] = deque()  # see `end_after_messages`
        # Events, and the first messages of connections, in the order in which to handle them. The key of an
        # accepted connection is its descriptor; all other keys are negative.
        self._waiting: OrderedDict[int, tuple[int, int] | list[zmq.Frame]] = OrderedDict()
        self._keys = itertools.count(-1, -1)
        self._postponed = 0  # messages among these
        self._paused_at = math.inf  # when reporting stopped, though more was waiting
        with contextlib.ExitStack() as made:
            self._socket = made.enter_context(context.socket(kind))
            self._monitor = made.enter_context(context.socket(zmq.PAIR))
            for option, value in {zmq.LINGER: 0, **options}.items():
                self._socket.set(option, value)
            # Unlimited: when this queue is full, ZeroMQ waits while it holds a lock. Closing would wait for
            # that lock with the GIL.
            self._monitor.rcvhwm = 0
            address = f"inproc://aiotensor-{next(_numbers)}"  # names are never reused
            self._socket.monitor(address, _OPENED | DISCONNECTED | events)
            self._monitor.connect(address)
            made.pop_all()
        self._polled = [(self._socket, _POLLIN)]
        self._descriptors = [int(self._socket.get(zmq.FD)), int(self._monitor.get(zmq.FD))]
        self._loop.add_reader(self._descriptors[0], self._read)
        self._loop.add_reader(self._descriptors[1], self._report)
        self._read_soon()  # a descriptor does not become readable before its socket was checked once
        self._loop.call_soon(self._report)

    @abstractmethod
    def event(self, kind: int, value: int) -> None:
        """Called with an event: for most kinds, the value is the descriptor of the connection."""

    @abstractmethod
    def message_arrived(self, parts: "list[zmq.Frame]") -> None:
        """Called with a message: its part, after the identity of its connection at a ROUTER."""

    @abstractmethod
    def ended(self, identity: bytes) -> None:
        """Called after `end_after_messages`."""

    def send(self, message: bytes | memoryview, copies: bool, identity: bytes | None = None) -> bool:
        """Pass a message to ZeroMQ; return False if the connection has ended.

        Args:
            message: the message.
            copies: whether ZeroMQ copies a large message; otherwise its memory must not change until ZeroMQ
                releases it, for which it wakes a thread of pyzmq.
            identity: at a ROUTER, the identity of the connection.
        """
        if self._has_shut:
            return False
        try:
            if identity is not None:
                self._socket.send(identity, _MORE)
            self._socket.send(message, _LAST, copy=copies)
        except zmq.ZMQError as error:
            self._read_soon()
            if error.errno not in _GONE:
                raise
            return False
        # Sending processes pending signals of the socket, and its descriptor does not report them again.
        if zmq.zmq_poll(self._polled, 0):
            self._read_soon()
        return True

    def read_now(self, most: int = 1) -> bool:
        """Read messages that have arrived, at most so many, and return whether there was one."""
        count = 0
        while count < most and self._has_messages():
            self._read_one()
            count += 1
        if count:
            self._read_soon()
        return count > 0

    def end_after_messages(self, identity: bytes = b"") -> None:
        """Call `ended` in a later iteration, once all messages that have arrived by now are read.

        During a flood of messages it is called after `LAST_MESSAGES` of them.
        """
        self._ending.append((self._messages_read + LAST_MESSAGES, identity))
        self._read_soon()

    def shut(self) -> None:
        """Close both sockets, and discard the messages that ZeroMQ has not sent."""
        if self._has_shut:
            return
        self._has_shut = True
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        self._connections.clear()
        self._waiting.clear()
        self._ending.clear()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    # Messages

    def _has_messages(self) -> bool:
        """Process pending signals of the socket, and return whether a message can be read."""
        return not self._has_shut and bool(zmq.zmq_poll(self._polled, 0))

    def _read_soon(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Read messages, and report events; after a time limit, the rest follows in the next iteration."""
        self._is_scheduled = is_drained = False
        until = time.monotonic() + _READING_S
        while self._postponed <= _MOST_POSTPONED and time.monotonic() < until:
            is_drained = not self._has_messages()
            if is_drained:
                break
            self._read_one()
        if self._waiting:
            self._report()
        while self._ending and (is_drained or self._ending[0][0] <= self._messages_read):
            self.ended(self._ending.popleft()[1])
        if not is_drained:
            self._read_soon()

    def _read_one(self) -> None:
        """Read a message, or discard some of the remaining parts of one that has too many."""
        parts: list[zmq.Frame] = []
        try:
            for _ in range(3):  # the identity, and one part too many
                part = self._socket.recv(_LAST, copy=False)
                if not self._discards:
                    parts.append(part)
                if not part.more:
                    self._discards = False
                    break
            else:
                self._discards = True
        except BaseException:
            # A signal handler raised, for example `SystemExit`. The next part does not begin a message.
            self._discards = bool(self._socket.get(zmq.RCVMORE))
            raise
        if parts:
            self._messages_read += 1
            self.message_arrived(parts)

    def postpone(self, parts: "list[zmq.Frame]") -> None:
        """Pass a message to `message_postponed` once the events before it were reported.

        The operating system reuses descriptors: the end of an earlier connection with the same descriptor may
        have to be reported before the first message of a connection.
        """
        self._read_events()
        self._waiting[next(self._keys)] = parts
        self._postponed += 1
        self._read_soon()

    def message_postponed(self, parts: "list[zmq.Frame]") -> None:
        """Called with a message that was postponed."""
        raise AssertionError("no message was postponed")

    # Events

    def _report(self) -> None:
        """Report events; after a time limit, the rest follows in the next iteration."""
        self._read_events()
        if not self._waiting:
            return
        now = time.monotonic()
        until, count = now + min(now - self._paused_at, _EVENTS_MOST_S), 0
        self._paused_at = math.inf
        while self._waiting:
            _, first = self._waiting.popitem(last=False)
            if isinstance(first, list):
                self._postponed -= 1
                self.message_postponed(first)
            else:
                kind, value = first
                if kind & _OPENED:
                    self._connections[value] = ForeignDescriptor(value)
                elif kind == DISCONNECTED:
                    self._connections.pop(value, None)
                self.event(kind, value)
            count += 1
            if count % _EVENTS_A_TURN == 0 and time.monotonic() >= until:
                self._paused_at = time.monotonic()
                self._read_soon()
                return

    def _read_events(self) -> None:
        """Read all events; omit connections that end before they are reported.

        So there is little to report during a flood, and only open connections occupy memory.
        """
        receive, waiting = self._monitor.recv, self._waiting
        try:
            while not self._has_shut:
                kind, value = _EVENT.unpack(receive(_LAST))
                receive(_LAST)  # the address
                if kind == ACCEPTED:
                    waiting[value] = kind, value
                elif kind != DISCONNECTED or waiting.pop(value, None) is None:
                    waiting[next(self._keys)] = kind, value
        except zmq.Again:
            pass
        except BaseException:
            if self._monitor.get(zmq.RCVMORE):  # a signal handler raised between the two parts
                receive(_LAST)
            raise
