"""The admission of the other rank's connection: the first one over which that rank sends a `Join`."""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from aiotensor.errors import AioTensorError, ProtocolError, RefusedError
from aiotensor.protocol.connection import Loss
from aiotensor.protocol.ranks import Join, RankConnection
from aiotensor.ranks.session import Session
from aiotensor.runtime.descriptors import close_all
from aiotensor.transports.base import Transport

__all__ = ["Door"]

# The most connections without a `Join`. Only processes of this user, or with the token, can connect at all.
_MAX_CANDIDATES = 16

NewSession: TypeAlias = Callable[[Transport, RankConnection], Session]


class Door:
    """Admit one connection, as `Acceptor` or as `ConnectorEvents`; belongs to the running loop.

    Args:
        join: the first frame of this end.
        peer: the other end, for the texts of errors.
        new_session: makes the session of the connection.

    Attributes:
        session: the future of the session; done once the other end has joined, or failed if it never will.
    """

    def __init__(self, join: Join, peer: str, new_session: NewSession) -> None:
        self.session: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        self._join = join
        self._peer = peer
        self._new_session = new_session
        self._candidates: set[_Candidate] = set()

    def close(self) -> None:
        """Admit no more connections."""
        for candidate in list(self._candidates):
            self._drop(candidate)
        if not self.session.done():
            self.session.cancel()

    def abort(self) -> None:
        """Close the session without waiting, if there is one."""
        if self.session.done() and not self.session.cancelled() and self.session.exception() is None:
            self.session.result().abort()

    # Events of the listener and the connector

    def connection_accepted(self, transport: Transport) -> None:
        """Begin a connection from a process that may be the other rank."""
        if len(self._candidates) >= _MAX_CANDIDATES or self.session.done():
            transport.close()
            return
        try:
            self._begin(transport, is_only_one=False)
        except OSError:
            transport.close()  # the first record could not be written

    def listening_failed(self, error: OSError) -> None:
        """Fail the future of the session, because no more connections arrive."""
        self._fail(error)

    def connected(self, transport: Transport) -> None:
        """Begin the connection to the other rank.

        Raises:
            OSError: the first record could not be written.
        """
        if self.session.done():
            transport.close()
        else:
            self._begin(transport, is_only_one=True)

    def connecting_failed(self, error: AioTensorError) -> None:
        """Fail the future of the session, because no connection to the other rank is possible."""
        self._fail(error)

    # Events of the candidates

    def joined(self, candidate: "_Candidate") -> None:
        """Create the session after the `Join` of the peer."""
        self._candidates.discard(candidate)
        if self.session.done():
            candidate.transport.close()
        else:
            self.session.set_result(self._new_session(candidate.transport, candidate.connection))

    def ended(self, candidate: "_Candidate", loss: Loss, *, is_final: bool) -> None:
        """Close a connection that has ended; with `is_final`, fail the future of the session."""
        self._drop(candidate)
        if is_final:
            self._fail(loss.error)

    def _begin(self, transport: Transport, *, is_only_one: bool) -> None:
        candidate = _Candidate(transport, RankConnection(self._join, self._peer), self, is_only_one)
        self._candidates.add(candidate)
        transport.start(candidate)
        for record in candidate.connection.data_to_send():
            transport.write(record)

    def _drop(self, candidate: "_Candidate") -> None:
        self._candidates.discard(candidate)
        candidate.transport.close()

    def _fail(self, error: AioTensorError | OSError) -> None:
        if not self.session.done():
            self.session.set_exception(error)


class _Candidate:
    """A connection before the `Join` of its peer.

    Args:
        transport: the connection.
        connection: the connection object of this end.
        door: the object that is notified.
        is_only_one: whether the other rank is lost if this connection is lost.
    """

    def __init__(
        self, transport: Transport, connection: RankConnection, door: Door, is_only_one: bool
    ) -> None:
        self.transport = transport
        self.connection = connection
        self._door = door
        self._is_only_one = is_only_one

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        """Read the first record, and report whether the other rank has joined."""
        close_all(descriptors)
        try:
            [frame] = self.connection.receive(data)
        except RefusedError as error:
            self._door.ended(self, Loss(error, is_retried=False), is_final=True)
        except (ProtocolError, ValueError) as error:
            self._ended(self.connection.violated(ProtocolError(*error.args)))
        else:
            if isinstance(frame, Join):
                self._door.joined(self)
            else:
                self._ended(self.connection.lost("it closed the connection", is_retried=False))

    def connection_lost(self, reason: str | ProtocolError) -> None:
        """Report the end of the connection."""
        self._ended(self.connection.lost(str(reason), is_retried=False))

    def resume_writing(self) -> None:
        """Do nothing: only one frame is written."""

    def _ended(self, loss: Loss) -> None:
        self._door.ended(self, loss, is_final=self._is_only_one)
