"""A ZeroMQ socket on the event loop.

This uses a plain socket and its descriptor rather than `zmq.asyncio`, which needs a future and two iterations
of the loop for each message, and cannot wait for one of the many peers of a ROUTER. ZeroMQ's descriptor is
edge-triggered: it becomes readable once after a change, so the reader must continue until nothing is left.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import zmq
from zmq.utils.garbage import gc as collector

from aiotensor.protocol.parts import MAX_PARTS, Parts
from aiotensor.runtime.worker import no_thread
from aiotensor.transports.zeromq.context import ZmqContext, check_descriptors
from aiotensor.transports.zeromq.monitor import Monitor, SocketEvents

__all__ = ["LoopSocket", "PeerGoneError"]

# After this time, the other callbacks of the loop run before further messages are handled. A number of
# messages would not limit the time: one may announce a thousand tensors, or have a megabyte to copy.
_READING_S = 0.001

# The maximum number of deferred callbacks, or of postponed events, that one iteration of the loop handles.
_CALLBACKS_A_TURN = 64

# The maximum number of messages that are read before the end of a connection is handled.
_LAST_MESSAGES = 1024

# Plain numbers: each operation on an enum takes as long as a call into ZeroMQ.
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_POLLIN = int(zmq.POLLIN)

_TRY_AGAIN_S = 0.05  # bounds the delay when ZeroMQ's signal that the socket is writable was missed


class PeerGoneError(Exception):
    """The recipient of a message is no longer connected."""


class LoopSocket:
    """A socket that calls its owner back for messages and events; belongs to the running loop.

    Args:
        context: the context of the socket.
        kind: the type of the socket, `zmq.DEALER` or `zmq.ROUTER`.
        options: the socket options, by their numbers.
        events: the owner, whose callbacks are called.

    Attributes:
        monitor: reports the connection events.

    Raises:
        zmq.ZMQError: the process has no descriptors left.
    """

    def __init__(
        self,
        context: ZmqContext,
        kind: int,
        options: Mapping[int, int | bytes],
        events: SocketEvents,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._events = events
        self._is_closed = self._is_scheduled = self._was_full = self._is_suspended = False
        self._after_messages: deque[tuple[int, Callable[[], None]]] = deque()
        self._messages_read = 0
        self._retry: asyncio.TimerHandle | None = None
        self._discards = False  # discarding the rest of a message: it has too many parts, or was interrupted
        with ExitStack() as made:
            self._socket = made.enter_context(context.socket(kind))
            self._socket.linger = 0
            for option, value in options.items():
                self._socket.set(option, value)
            self.monitor = Monitor(context, self._socket, events)
            made.pop_all()
        self._polled = [(self._socket, _POLLIN)]
        self._descriptor = int(self._socket.get(zmq.FD))
        self._loop.add_reader(self._descriptor, self._read)

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
        # Report EVENT_LISTENING now, so that a child forked in this iteration closes the listener, too.
        self.monitor.report_first()

    @property
    def address(self) -> str:
        """The address where the socket listens, with the actual port in place of a wildcard."""
        return bytes(self._socket.get(zmq.LAST_ENDPOINT)).decode().rstrip("\0")

    def send(self, parts: Parts, is_retry: bool = False, *, copies: bool = False) -> bool:
        """Pass a message to ZeroMQ, and return whether ZeroMQ accepted it.

        Args:
            parts: the parts of the message.
            is_retry: whether `SocketEvents.writable` calls this; the socket is checked after that callback.
            copies: whether ZeroMQ copies large parts, too; otherwise their memory must not change until
                ZeroMQ releases it, for which it wakes a thread of pyzmq.

        Raises:
            PeerGoneError: the recipient is not connected; only a ROUTER raises this.
            OSError: this process has no descriptors or no thread to send a large part; nothing was sent.
        """
        send, last = self._socket.send, len(parts) - 1
        # Wrap all parts before sending any: parts sent before a failure would begin the next message.
        ready: Sequence[bytes | memoryview | zmq.Frame] = parts
        if not copies and max(map(len, parts)) >= zmq.COPY_THRESHOLD:
            ready = [part if len(part) < zmq.COPY_THRESHOLD else _uncopied(part) for part in parts]
        try:
            for number, part in enumerate(ready):
                send(part, _LAST if number == last else _MORE, copy=not isinstance(part, zmq.Frame))
        except zmq.Again:
            # Only the first part can be rejected: after it, ZeroMQ accepts all other parts of the message.
            self._was_full = True
            if not is_retry:
                self._read_soon()
            return False
        except zmq.ZMQError as error:
            self._read_soon()
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerGoneError from error
            raise
        # Sending processes pending signals of the socket, and its descriptor does not report them again.
        if not is_retry and (self._was_full or zmq.zmq_poll(self._polled, 0)):
            self._read_soon()
        return True

    def read_last(self) -> None:
        """Read the messages that have arrived, at most `_LAST_MESSAGES`."""
        for _ in range(_LAST_MESSAGES):
            if not self.has_messages():
                break
            self._read_one()
        self._read_soon()

    def read_now(self) -> bool:
        """Read a message, and return whether there was one."""
        if not self.has_messages():
            return False
        self._read_one()
        self._read_soon()
        return True

    def after_messages(self, callback: Callable[[], None]) -> None:
        """Call a function in a later iteration, once all messages that have arrived by now are read.

        During a flood of messages it is called after `_LAST_MESSAGES` of them.
        """
        self._after_messages.append((self._messages_read + _LAST_MESSAGES, callback))
        self._read_soon()

    def close(self, linger_s: float = 0.0) -> None:
        """Close; ZeroMQ has `linger_s` seconds to send accepted messages, while the context exists."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._descriptor)
        self._after_messages.clear()
        if self._retry is not None:
            self._retry.cancel()
        self._socket.disable_monitor()
        self.monitor.close()
        # The owner refers to this object. In a cycle, only the garbage collector would free the owner and its
        # tensor receiver.
        del self._events
        self._socket.close(int(linger_s * 1000))

    def has_messages(self) -> bool:
        """Process pending signals of the socket, and return whether a message can be read."""
        return not self._is_closed and bool(zmq.zmq_poll(self._polled, 0))

    def _begin(self) -> None:
        # The descriptor does not become readable before the socket was checked once.
        self._read_soon()
        self.monitor.begin()

    def _read_one(self) -> None:
        """Read a message, or discard some remaining parts of a message with too many."""
        parts: list[zmq.Frame] = []
        try:
            for _ in range(MAX_PARTS + 2):  # the identity, and one part too many
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
            self._events.message_arrived(parts)

    def _read_soon(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._is_scheduled = is_drained = False
        until = time.monotonic() + _READING_S
        while True:
            # Messages of unidentified peers wait until the events before them have been reported. If many
            # wait, read no more.
            if self.monitor.postponed > _CALLBACKS_A_TURN:
                self._suspend()
                break
            is_drained = self._is_closed or not zmq.zmq_poll(self._polled, 0)
            if is_drained:
                break
            self._read_one()
            if time.monotonic() >= until:
                self._read_soon()
                break
        for _ in range(_CALLBACKS_A_TURN):
            if not self._after_messages:
                break
            if not is_drained and self._after_messages[0][0] > self._messages_read:
                break
            self._after_messages.popleft()[1]()
        else:
            self._read_soon()
        if self._was_full:
            self._try_again()

    def _suspend(self) -> None:
        """Read no messages until the events up to now have been reported."""
        if not self._is_suspended:
            self._is_suspended = True
            self.monitor.after_events(self._resume)

    def _resume(self) -> None:
        self._is_suspended = False
        self._read_soon()

    def _try_again(self) -> None:
        """Retry waiting messages; any call into ZeroMQ may consume the signal that the socket is writable."""
        for _ in range(2):
            if not self._was_full or self._is_closed:
                return
            self._was_full = False
            self._events.writable()
            if self.has_messages():
                self._read_soon()
                return
        if self._was_full and self._retry is None:
            # If the signal was consumed after the last attempt, ZeroMQ does not repeat it.
            self._retry = self._loop.call_later(_TRY_AGAIN_S, self._retry_now)

    def _retry_now(self) -> None:
        self._retry = None
        if not self._is_closed:
            self._read()


def _uncopied(part: bytes | memoryview) -> zmq.Frame:
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
