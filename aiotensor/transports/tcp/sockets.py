"""A ZeroMQ socket on the event loop: its options, its messages, and the events of its connections.

This uses plain sockets and their descriptors rather than `zmq.asyncio`, which needs a future and two
iterations of the loop for each message. ZeroMQ's descriptors are edge-triggered: they become readable once
after a change, so the reader must continue until nothing is left.
"""

import asyncio
import contextlib
import itertools
import os
import struct
import sys
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.garbage import gc as collector

from aiotensor.protocol.network import OPENING, STEP_BYTES
from aiotensor.runtime.descriptors import ForeignDescriptor
from aiotensor.runtime.worker import no_thread
from aiotensor.transports.address import TcpAddress, TcpArguments, tcp_address
from aiotensor.types import CurveKey

# More than the header of a step and the 33 bytes of encryption (https://rfc.zeromq.org/spec/26/) together.
_OVERHEAD_BYTES = 256
_PEER_TIMEOUT_S = 2.0  # by default, between machines
_LEAST_TIMEOUT_S, _MOST_TIMEOUT_S = 0.1, 3600.0

# A lost host is detected within the timeout plus this interval; the documentation promises the timeout plus a
# second. The rest of that second is a margin for busy processes. It need not grow with the timeout.
_HEARTBEAT_INTERVAL_S = 0.5

_KEY_BYTES = 32

# Descriptors that a context, its threads and its first sockets need, and the collector of pyzmq as well.
_BEGINS_WITH = 16

# After this time, the other callbacks of the loop run before further messages or events are handled. A number
# of messages would not limit the time: one may announce a thousand tensors, or have a megabyte to copy.
_READING_S = 0.001

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


class TcpOptions(NamedTuple):
    """How one side uses an address.

    Attributes:
        address: the address.
        socket: the options of its sockets.
        allowed: at the side that listens, the public keys of its peers; empty if they need no keys.
        opening: the first message of either side.
        loss_reason: the text of errors about a lost connection.
    """

    address: TcpAddress
    socket: Mapping[int, int | bytes]
    allowed: frozenset[bytes]
    opening: bytes
    loss_reason: str


def options_of(endpoint: str, given: TcpArguments) -> TcpOptions:
    """Return the options of a ``tcp://`` address.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the address or an argument is invalid, or other machines can reach the address and there
            are no keys.
    """
    keys, allowed = curve_options(given)
    address = tcp_address(endpoint, has_keys=bool(keys or given.token), connects=given.connects)
    if not (address.port or given.token or given.finds_port):
        raise ValueError(f"the address {endpoint!r} does not contain a port that others could connect to")
    options: dict[int, int | bytes] = {
        **keys,
        # Credit limits both queues. A limit of ZeroMQ would make it stop reading, and then not notice the
        # end of a connection.
        zmq.SNDHWM: 0,
        zmq.RCVHWM: 0,
        zmq.MAXMSGSIZE: STEP_BYTES + _OVERHEAD_BYTES,
    }
    timeout_s = given.peer_timeout_s
    if timeout_s is None and not address.is_local:
        timeout_s = _PEER_TIMEOUT_S
    loss_reason = "the peer closed the connection"
    if timeout_s is not None:
        if not _LEAST_TIMEOUT_S <= timeout_s <= _MOST_TIMEOUT_S:
            raise ValueError(
                f"peer_timeout_s must be between {_LEAST_TIMEOUT_S} and {_MOST_TIMEOUT_S:g} seconds, got "
                f"{timeout_s}"
            )
        options |= {
            zmq.HEARTBEAT_IVL: int(_HEARTBEAT_INTERVAL_S * 1000),
            zmq.HEARTBEAT_TIMEOUT: round(timeout_s * 1000),
            # ZeroMQ sends no heartbeat while a message waits for the network; the kernel ends the connection.
            zmq.TCP_MAXRT: round(timeout_s * 1000),
        }
        loss_reason += f", or did not answer for {timeout_s:g} s"
    return TcpOptions(address, options, allowed, OPENING + given.token.encode(), loss_reason)


def curve_options(given: TcpArguments) -> tuple[dict[int, int | bytes], frozenset[bytes]]:
    """Return the CURVE options of a socket, and the public keys of its peers if it listens.

    Raises:
        TypeError: a key is neither `str` nor `bytes`, or one key was passed in place of a collection.
        ValueError: a key is invalid, or one of the two sides has none.
    """
    if isinstance(given.client_keys, str | bytes):  # a collection of characters
        raise TypeError("client_keys must be a collection of public keys, such as [key], got one key")
    name, theirs = "client_keys", list(given.client_keys)
    if given.connects:
        name, theirs = "server_key", [] if given.server_key is None else [given.server_key]
    if given.secret_key is None and not theirs:
        return {}, frozenset()
    if given.secret_key is None or not theirs:
        raise ValueError(
            f"secret_key and {name} must be passed together: the secret key of this side, and the public "
            f"{'key' if given.connects else 'keys'} of the other"
        )
    public = [_key(name, one) for one in theirs]
    secret = _key("secret_key", given.secret_key)
    if not given.connects:
        return {zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: secret}, frozenset(public)
    return {
        zmq.CURVE_SECRETKEY: secret,
        zmq.CURVE_PUBLICKEY: zmq.curve_public(secret),
        zmq.CURVE_SERVERKEY: public[0],
    }, frozenset()


def _key(name: str, value: CurveKey) -> bytes:
    """Check a CURVE key."""
    if not isinstance(value, str | bytes):
        raise TypeError(
            f"{name} must contain keys of 40 characters, as returned by zmq.curve_keypair(), got {value!r}"
        )
    text = value.encode() if isinstance(value, str) else value
    try:
        is_key = len(z85.decode(text)) == _KEY_BYTES
    except (KeyError, ValueError, struct.error):  # the last for digits that exceed 32 bits
        is_key = False
    if not is_key:  # the error does not show it: it may be a secret with a typo
        raise ValueError(f"{name} must contain keys of 40 characters, as returned by zmq.curve_keypair()")
    return text


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
        self._discards = False  # the rest of a message that has too many parts
        self._ending: deque[tuple[int, bytes]] = deque()  # see `end_after_messages`
        # Events, and the first messages of connections, in the order in which to handle them. The key of an
        # accepted connection is its descriptor; all other keys are negative.
        self._waiting: OrderedDict[int, tuple[int, int] | list[zmq.Frame]] = OrderedDict()
        self._keys = itertools.count(-1, -1)
        self._postponed = 0  # messages among these
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
        for _ in range(3):  # the identity, and one part too many
            part = self._socket.recv(_LAST, copy=False)
            if not self._discards:
                parts.append(part)
            if not part.more:
                self._discards = False
                break
        else:
            self._discards = True
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
        until = time.monotonic() + _READING_S
        while self._waiting:
            if time.monotonic() >= until:
                self._read_soon()
                return
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
