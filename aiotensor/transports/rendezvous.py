"""How two processes find each other over a plain `multiprocessing.Queue`.

A sender listens at an abstract name, and puts the name into the queue. The receiver takes the names from the
queue in a thread, and connects to the senders. Nothing else travels through the queue.
"""

import asyncio
import errno
import re
import secrets
from contextlib import suppress
from multiprocessing.queues import Queue
from multiprocessing.util import Finalize
from queue import Full
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from aiotensor.errors import AccessDeniedError, UsageError
from aiotensor.runtime.logs import RepeatedEvent, logger_of, others
from aiotensor.runtime.worker import no_thread
from aiotensor.transports.base import MAX_UNREAD_BYTES, Acceptor, Connector, ConnectorEvents, Transport
from aiotensor.transports.unix import UnixListener, connect_to, listen_by_name

__all__ = ["PlainQueue", "QueueConnector", "QueueListener", "listen_on"]

logger = logger_of("transports")

if TYPE_CHECKING:
    PlainQueue: TypeAlias = Queue[Any]
else:
    PlainQueue = Queue  # generic at runtime only since Python 3.12

_NAME = re.compile(rb"aiotensor-[0-9a-f]{32}")
_WAKE = b"aiotensor-closed"  # ends the thread of a closed receiver

# Before the finalizers of multiprocessing, which end the threads that write to queues.
_EXIT_PRIORITY = 20
_EXIT_S = 1.0


class QueueConnector(Connector):
    """Wait until the receiver of a queue has connected, and again after a loss."""

    def __init__(self, queue: PlainQueue, events: ConnectorEvents) -> None:
        super().__init__("queue", events)
        self._queue = queue
        self._listener: UnixListener | None = None  # until the receiver has connected
        self._name = b""
        self._is_put = False

    def connect(self) -> None:
        """Put the name into the queue, and again whenever it was taken by a receiver that did not connect."""
        if self._listener is None:
            self._name, self._is_put = f"aiotensor-{secrets.token_hex(16)}".encode(), False
            # A sender has no limit on queued records, as over other sockets.
            self._listener = listen_by_name(f"\0{self._name.decode()}", self, None)
        try:
            if not self._is_put or self._queue.empty():
                self._queue.put_nowait(self._name)
                self._is_put = True
        except Full:
            pass
        except (ValueError, OSError, RuntimeError) as error:
            self._stop_listening()
            if isinstance(error, RuntimeError):  # the first object starts a thread of the queue
                raise no_thread(error) from error
            raise UsageError(f"this queue was closed: create a new one ({error})") from error
        self.reconnect()

    def missing(self) -> str:
        """Return why no receiver is connected, as `Connector.missing` does."""
        return "no receiver has connected: none is open, or one was killed and has left the queue locked"

    def close(self) -> None:
        """Stop waiting for the receiver."""
        super().close()
        self._stop_listening()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # Events of the listener

    def connection_accepted(self, transport: Transport) -> None:
        """Begin the connection; further connections to the name are refused."""
        self._stop_listening()
        self.cancel_attempt()
        self.try_to(lambda: self.begin(transport))

    def listening_failed(self, error: OSError) -> None:
        """Do nothing: the listener of a socket does not call this."""


async def listen_on(queue: PlainQueue, acceptor: Acceptor) -> "QueueListener":
    """Begin to take names from a queue, as `Route.listen` does; does not wait.

    Raises:
        OSError: no thread can be started.
    """
    return QueueListener(queue, acceptor)


class QueueListener:
    """Connect to the senders whose names a thread takes from a queue; created by `listen_on`."""

    address = ""

    def __init__(self, queue: PlainQueue, acceptor: Acceptor) -> None:
        self._queue = queue
        self._acceptor = acceptor
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        # Any process with the queue can cause these at any rate.
        self._failed = RepeatedEvent(_log_failed)
        self._objects = RepeatedEvent(_log_object)
        # The thread holds the lock of the queue while it waits. If the process ended then, no other process
        # could take from the queue any more.
        self._exit = Finalize(None, self._end, exitpriority=_EXIT_PRIORITY)
        self._thread = Thread(target=self._take, name="aiotensor-queue", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._exit.cancel()
            raise no_thread(error) from error

    def accept_now(self) -> None:
        """Do nothing: the thread reports each name."""

    def close(self) -> None:
        """Stop taking names; the thread leaves a name that it takes from now on for the next receiver."""
        if self._is_closed:
            return
        self._wake()
        self._failed.close()
        self._objects.close()

    def _wake(self) -> None:
        """End the thread, which waits for the next object."""
        self._is_closed = True
        with suppress(Full, ValueError, RuntimeError):  # if the queue is full, there is a next object
            self._queue.put_nowait(_WAKE)

    def _end(self) -> None:
        """End the thread at the end of the process."""
        self._wake()
        self._thread.join(_EXIT_S)

    def _take(self) -> None:
        """Take names, and pass them to the loop; runs in the thread."""
        item: object = None
        with suppress(RuntimeError):  # the loop was closed
            while not self._is_closed:
                item = None  # it must not live as long as the wait
                try:
                    item = self._queue.get()
                except (ValueError, OSError, EOFError) as error:
                    self._loop.call_soon_threadsafe(self._fail, error)
                    break
                except Exception:  # noqa: BLE001, S110 - an object that cannot be unpickled here
                    pass
                if not self._is_closed:
                    self._loop.call_soon_threadsafe(self._found, item)
                    item = None
        if _is_name(item):
            with suppress(Full, ValueError):
                self._queue.put_nowait(item)
        self._exit.cancel()

    def _found(self, item: object) -> None:
        """Connect to the sender with a name; an unreachable one puts its name into the queue again."""
        if self._is_closed or (isinstance(item, bytes) and item == _WAKE):
            return
        if not _is_name(item):
            self._objects.add()
            return
        try:
            transport = connect_to(f"\0{item.decode()}", MAX_UNREAD_BYTES)
        except ConnectionRefusedError:
            logger.info(
                "a sender that put its name into the queue has ended, or runs in another network namespace",
                extra={"event": "sender_unreachable", "address": "queue"},
            )
        except (AccessDeniedError, OSError) as error:
            self._failed.add(str(error))
        else:
            self._acceptor.connection_accepted(transport)

    def _fail(self, error: Exception) -> None:
        if not self._is_closed:
            self._acceptor.listening_failed(OSError(errno.EBADF, f"the queue was closed: {error}"))


def _is_name(item: object) -> TypeGuard[bytes]:
    return isinstance(item, bytes) and _NAME.fullmatch(item) is not None


def _log_failed(count: int, reason: str) -> None:
    logger.error(
        "connecting to a sender failed: %s%s",
        reason,
        others(count),
        extra={"event": "connecting_failed", "address": "queue", "reason": reason, "count": count},
    )


def _log_object(count: int) -> None:
    logger.error(
        "an object that the application put into the queue was ignored: use another queue for it%s",
        others(count),
        extra={"event": "object_ignored", "address": "queue", "count": count},
    )
