"""The sessions of one sender: connect to a receiver, and to the next one after a loss.

(no session) --connected--> session, not admitted --Welcome--> session, admitted
^                              |                              |
'--------- retried loss -------+------------------------------'
'--------- other loss, refusal, permanent failure: `failure` is set, until a call connects again
"""

import logging
import os

from aiotensor.errors import AioTensorError, ClosedError, RefusedError, again
from aiotensor.protocol.connection import Close, ConnectionState, Loss
from aiotensor.protocol.frames import VERSION, Hello
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.outage import Outage
from aiotensor.sending.grants import Grants
from aiotensor.sending.session import Session
from aiotensor.transports.base import Mover, Transport
from aiotensor.transports.endpoints import Route

__all__ = ["Sessions"]

logger = logger_of("sender")


class Sessions:
    """Keep at most one session with a receiver; belongs to the running loop.

    Args:
        sender: the id of the sender.
        route: makes the connector to the receiver.
        grants: the messages and their resources.

    Attributes:
        current: the session; None while there is none.
        mover: moves bytes to the receiver; None without a receiver, or if memory is shared with it.
        failure: the reason why this object does not connect until a call needs a receiver; None otherwise.
        needs_admission: whether messages wait until a receiver admits this sender: after a refusal, and on a
            new connection between machines.
        outage: measures for how long no receiver has admitted this sender.
    """

    def __init__(
        self,
        sender: str,
        route: Route,
        grants: Grants,
    ) -> None:
        self.current: Session | None = None
        self.mover: Mover | None = None
        self.failure: AioTensorError | None = None
        self.needs_admission = False
        self.outage = Outage(grants.settings.grace_s, lambda: grants.fail_waiting(self.unavailable))
        self._sender = sender
        self._grants = grants
        self._changes = grants.changes
        self._label = route.label
        self._connector = route.connector(self)
        self._refusal: RefusedError | None = None  # from a receiver that may still be running
        self._next_message = 0

    @property
    def is_receiver_there(self) -> bool:
        """Whether a receiver is connected, or listens with a full backlog."""
        return self.current is not None or self._connector.is_backlogged

    @property
    def is_admitted(self) -> bool:
        """Whether a receiver has admitted this sender and is still connected."""
        return self.current is not None and self.current.connection.state is ConnectionState.OPEN

    @property
    def receiver_id(self) -> str | None:
        """The id of the receiver; None while none is connected, or before it has answered."""
        return None if self.current is None else self.current.connection.receiver_id

    @property
    def receiver_pid(self) -> int | None:
        """The process id of the receiver; None while none is connected, or before it has answered."""
        return None if self.current is None else self.current.connection.peer_pid

    @property
    def is_ready(self) -> bool:
        """Whether a message can be announced.

        After a refusal, no message is announced until a receiver has admitted this sender: another refusal
        would lose the message silently, because its call would already have returned. Between machines, the
        same holds for each new connection.
        """
        session = self.current
        return session is not None and session.transport.is_writable and not self.needs_admission

    def connect(self) -> None:
        """Begin to connect; errors are those of `Connector.connect`."""
        self.outage.begin()
        self._connector.connect()

    def unavailable(self) -> AioTensorError:
        """Return the error of a call after a long outage: the last refusal, or an `UnavailableError`."""
        where = self._grants.holders.where
        is_there = self.current is not None
        reason = f"the receiver{where} has not answered" if is_there else f"no receiver is connected{where}"
        more = f", and none has been for the grace period of {self._grants.settings.grace_s:g} s"
        return self.refusal() or self._grants.holders.would_block(f"{reason}{more}", 1, 0)

    async def admission(self) -> None:
        """Wait until a receiver has admitted this sender, even if others connect and disconnect before.

        Raises:
            RefusedError: a receiver refused this sender during this call.
            AioTensorError: this sender does not connect to another receiver; the error states the reason.
            ClosedError: the sender was closed.
        """
        if self.current is None:
            self.failure = None  # of an earlier attempt
            self.connect_now()
        while not self.is_admitted:
            if self._grants.is_closed:
                raise ClosedError("this TensorSender was closed")
            if self.failure is not None:
                raise again(self.failure)
            await self._changes.wait()

    async def change(self) -> None:
        """Wait until `is_ready` or the state of a waiting message may have changed; connect if necessary."""
        if self.current is None:
            self.connect_now()
        if not self.is_ready:
            await self._changes.wait()

    def connect_now(self) -> None:
        """Connect now, if there is no session and no attempt is scheduled."""
        self._connector.connect_now()
        if not self.is_receiver_there:
            self._refusal = None  # the receiver that refused this sender has ended

    def refusal(self) -> AioTensorError | None:
        """Connect now, and return the last refusal as a new error if its receiver may still be running."""
        self.connect_now()
        return self._refusal if self._refusal is None else again(self._refusal)

    async def close(self, *, uses_memory: bool) -> None:
        """Write the last frame of the session, and wait until closing the transport loses no record."""
        self._changes.wake()
        session = self.current
        if session is None:
            return
        session.connection.close(Close(uses_memory=uses_memory))
        session.flush()
        session.transport.finish()
        while self.current is session and not session.transport.is_writable:
            await self._changes.wait()

    def abort(self) -> None:
        """Close the session without waiting, and stop connecting."""
        self._connector.close()
        self.outage.end()
        session, self.current, self.mover = self.current, None, None
        if session is not None:
            session.transport.close()
        self._changes.wake()

    # Events of the connector

    def connected(self, transport: Transport) -> None:
        """Begin a session.

        Raises:
            OSError: its first record could not be written.
        """
        limits = self._grants.settings
        hello = Hello(
            VERSION, os.getpid(), self._sender, limits.max_messages, limits.max_bytes, self._next_message
        )
        self.current = None
        self.current = Session(hello, transport, self._grants, self._admitted, self._session_lost)
        self.mover = transport.mover
        if transport.mover is not None:
            self._grants.memory.movers.add(transport.mover)
            # A handle may reach the receiver over another channel before the first record of this session.
            # The receiver would then still consider this sender lost, and raise an error for the handle.
            self.needs_admission = True
        self.failure = None
        self._changes.wake()
        self._grants.capacity_changed()

    def connecting_failed(self, error: AioTensorError) -> None:
        """Handle a permanent failure to connect."""
        self.failure, self._refusal = error, None
        self._grants.receiver_lost(error, None)

    def _admitted(self) -> None:
        """Let messages be announced, because the receiver has admitted this sender."""
        self._refusal, self.needs_admission = None, False
        self.outage.end()
        self._changes.wake()
        self._grants.capacity_changed()

    def _session_lost(self, session: Session, loss: Loss) -> None:
        """End all messages in flight, and connect again if the loss permits it."""
        if self.current is not session:
            return  # this side has closed it
        self.current = self.mover = None
        error, pid = loss.error, session.connection.peer_pid
        self._next_message = session.connection.next_message
        self.failure = error
        if loss.is_retried:
            self.failure = None
            self._connector.reconnect()
        self._refusal = error if isinstance(error, RefusedError) else None
        self.needs_admission |= self._refusal is not None
        self.outage.begin()
        lost = self._grants.receiver_lost(error, session.transport.watch_peer)
        self._grants.counts["receivers_lost"] += 1
        logger.log(
            logging.WARNING if lost or self._refusal is not None else logging.INFO,
            "%s; messages in flight that were lost: %s",
            error,
            lost,
            extra={
                "event": "receiver_lost",
                "address": self._label,
                "sender_id": self._sender,
                "peer_pid": pid,
                "reason": str(error),
                "messages_lost": lost,
            },
        )
