"""The sessions of one sender: connect to a receiver, and to the next one after a loss.

(no session) --connected--> session, not admitted --Welcome--> session, admitted
^                              |                              |
'--------- retried loss -------+------------------------------'
'--------- other loss, refusal, permanent failure: `failure` is set, until a call connects again
"""

import logging
import os
from collections.abc import Callable
from typing import Protocol

from aiotensor.errors import AioTensorError, ClosedError, RefusedError, again
from aiotensor.protocol.connection import Loss
from aiotensor.protocol.frames import VERSION, Hello
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.waiting import Waiters
from aiotensor.sending.session import MessageEvents, Session
from aiotensor.sending.settings import Settings
from aiotensor.transports.base import Connector, ConnectorEvents, Transport
from aiotensor.types import SenderStatistics

__all__ = ["Sessions", "SessionsEvents"]

logger = logger_of("sender")


class SessionsEvents(MessageEvents, Protocol):
    """The callbacks of the sessions of a sender."""

    def receiver_found(self) -> None:
        """Handle a receiver that messages can be sent to."""

    def receiver_lost(self, error: AioTensorError, pid: int | None) -> int:
        """Handle a receiver that is gone or refuses this sender; return the number of lost messages.

        Args:
            error: the reason.
            pid: the id of the receiver's process; None if it is not known.
        """


class Sessions:
    """Keep at most one session; belongs to the event loop's thread.

    Args:
        sender: the id of the sender.
        connector: makes the connecting side, given the id of the sender and the object that is notified.
        settings: the limits of the sender, for the hello.
        events: the object that is notified.
        counts: counts `receivers_lost`.
        statistics: as for `Session`.

    Attributes:
        current: the session; None while there is none.
        failure: the reason why no receiver is searched for until a call asks again; None while one is.
        needs_admission: whether a receiver has refused this sender, and none has admitted it since.
    """

    def __init__(
        self,
        sender: str,
        connector: Callable[[str, ConnectorEvents], Connector],
        settings: Settings,
        events: SessionsEvents,
        counts: dict[str, int],
        statistics: Callable[[], SenderStatistics | None],
    ) -> None:
        self.current: Session | None = None
        self.failure: AioTensorError | None = None
        self.needs_admission = False
        self._sender = sender
        self._settings = settings
        self._events = events
        self._counts = counts
        self._statistics = statistics
        self._connector = connector(sender, self)
        self._refusal: RefusedError | None = None  # from a receiver that may still be running
        self._next_message = 0
        self._changes = Waiters()
        self._is_closing = False

    @property
    def can_reconnect(self) -> bool:
        """Whether another receiver can be reached after a loss."""
        return self._connector.reconnects

    @property
    def is_receiver_there(self) -> bool:
        """Whether a receiver is connected, or listens with a full backlog."""
        return self.current is not None or self._connector.is_backlogged

    @property
    def is_admitted(self) -> bool:
        """Whether a receiver has admitted this sender and is still connected."""
        return self.current is not None and self.current.connection.is_admitted

    @property
    def receiver_id(self) -> str | None:
        """The id of the receiver; None while none is connected and known."""
        return None if self.current is None else self.current.connection.receiver_id

    @property
    def receiver_pid(self) -> int | None:
        """The process id of the receiver; None while none is connected and known."""
        return None if self.current is None else self.current.connection.peer_pid

    @property
    def is_ready(self) -> bool:
        """Whether a message can be announced.

        After a refusal, no message can be announced until a receiver has admitted this sender: the next
        refusal would lose the message silently, because its call would already have returned.
        """
        session = self.current
        return session is not None and session.transport.is_writable and not self.needs_admission

    def connect(self) -> None:
        """Begin to connect; errors are those of `Connector.connect`."""
        self._connector.connect()

    async def admission(self) -> None:
        """Wait until a receiver has admitted this sender, even if others connect and disconnect first.

        Raises:
            RefusedError: a receiver refused this sender during this call.
            AioTensorError: no other receiver will be searched for; the error states the reason.
            ClosedError: the sender was closed.
        """
        if self._connector.reconnects and self.current is None:
            self.failure = None  # from an earlier attempt
            self.connect_now()
        while not self.is_admitted:
            if self._is_closing:
                raise ClosedError("this TensorSender was closed")
            if self.failure is not None:
                raise again(self.failure)
            await self._changes.wait()

    async def change(self) -> None:
        """Wait until `is_ready` may have changed, or `wake` is called; connect now if there is no session."""
        if self.current is None:
            self.connect_now()
        if not self.is_ready:
            await self._changes.wait()

    def wake(self) -> None:
        """Wake all calls of `change` and `admission`, so that they check their conditions again."""
        self._changes.wake()

    def connect_now(self) -> None:
        """Connect now, if there is no session and no attempt is scheduled."""
        self._connector.connect_now()
        if not self.is_receiver_there:
            self._refusal = None  # that receiver is gone

    def refusal(self) -> AioTensorError | None:
        """Connect now, and return the last refusal as a new error if its receiver may still be running."""
        self.connect_now()
        return self._refusal if self._refusal is None else again(self._refusal)

    async def close(self, *, uses_memory: bool) -> None:
        """Write the last frame of the session, and wait until the transport has passed it to the kernel.

        Args:
            uses_memory: whether tensors allocated by this sender still exist.
        """
        self._is_closing = True
        self._changes.wake()
        session = self.current
        if session is None:
            return
        session.close(uses_memory=uses_memory)
        while self.current is session and not session.transport.is_writable:
            await self._changes.wait()

    def abort(self) -> None:
        """Close the session without waiting, and stop connecting."""
        self._connector.close()
        session, self.current = self.current, None
        if session is not None:
            session.abort()
        self._changes.wake()

    # Events of the connector

    def connected(self, transport: Transport) -> None:
        """Begin a session.

        Raises:
            OSError: its first record could not be written.
        """
        limits = self._settings
        hello = Hello(
            VERSION, os.getpid(), self._sender, limits.max_messages, limits.max_bytes, self._next_message
        )
        self.current = None
        self.current = Session(hello, transport, self, self._events, self._statistics)
        self.failure = None
        self._changes.wake()
        self._events.receiver_found()

    def connecting_failed(self, error: AioTensorError) -> None:
        """Handle a permanent failure to connect."""
        self._lost(error, None, is_retried=False)

    # Events of the session

    def session_admitted(self, session: Session) -> None:
        """Handle that the receiver has admitted this sender."""
        self._refusal, self.needs_admission = None, False
        self._changes.wake()
        self._events.receiver_found()

    def writing_resumed(self) -> None:
        """Handle that the transport accepts records again."""
        self._changes.wake()

    def session_lost(self, session: Session, loss: Loss) -> None:
        """Handle the end of the session."""
        if self.current is not session:
            return  # it was closed by this side
        self.current = None
        self._next_message = session.connection.next_message
        is_retried = loss.is_retried and self._connector.reconnects
        if is_retried:
            self._connector.reconnect()
        self._lost(loss.error, session, is_retried=is_retried)

    def _lost(self, error: AioTensorError, session: Session | None, *, is_retried: bool) -> None:
        self.failure = None if is_retried else error
        self._refusal = error if isinstance(error, RefusedError) else None
        self.needs_admission |= self._refusal is not None
        pid = None if session is None else session.connection.peer_pid
        peer_pid = None if session is None else session.transport.peer_pid
        lost = self._events.receiver_lost(error, pid if peer_pid is None else peer_pid)
        self._changes.wake()
        if session is None:
            return
        self._counts["receivers_lost"] += 1
        logger.log(
            logging.WARNING if lost or self._refusal is not None else logging.INFO,
            "%s; %s messages in flight are lost",
            error,
            lost,
            extra={
                "event": "receiver_lost",
                "sender_id": self._sender,
                "peer_pid": pid,
                "reason": str(error),
                "messages_lost": lost,
            },
        )
