"""Inspect a running receiver, server or publisher."""

import os
import time
from multiprocessing.queues import Queue
from typing import Literal

import msgspec
from msgspec.structs import asdict

from aiotensor.errors import AioTensorError, PeerLostError, ProtocolError, RefusedError, again
from aiotensor.protocol.connection import Connection
from aiotensor.protocol.frames import (
    VERSION,
    Close,
    Hello,
    PublisherReport,
    ReceiverReport,
    SenderSummary,
    ServerReport,
)
from aiotensor.runtime.descriptors import close_all
from aiotensor.runtime.waiting import Waiters, until
from aiotensor.transports.address import TcpArguments, socket_path
from aiotensor.transports.base import Connector, Events, Transport
from aiotensor.transports.endpoints import TensorQueue, route_to
from aiotensor.types import CurveKey, PublisherStatistics, ReceiverStatistics, ServerStatistics

__all__ = ["Inspection", "SenderInspection", "inspect"]


class SenderInspection(SenderSummary, frozen=True, array_like=False):
    """One sender of an inspected receiver, as far as the receiver knows it.

    Attributes:
        sender: the id of the sender.
        pid: the process id of the sender.
        max_concurrent_videos: the limit on its messages in flight.
        arena_bytes: the limit on its bytes of shared memory.
        messages: the number of messages that it has announced, on all its connections.
        in_flight: the number of its messages that were announced, and neither taken nor discarded.
        unclaimed_tensors: the number of its tensors that have arrived and were not taken.
        unclaimed_bytes: the bytes of the unclaimed tensors.
        leases: the number of living tensors at the receiver that pin blocks of its memory.
        leased_bytes: the bytes of these tensors.
    """


class Inspection(msgspec.Struct, frozen=True):
    """The result of one inspection of a receiver, a publisher or a message server.

    Attributes:
        kind: ``"receiver"``, ``"publisher"`` or ``"server"``.
        id: the id of the inspected object.
        pid: its process id.
        statistics: the result of its `statistics()`, with at most 128 subscribers of a publisher; numbers
            above 2^63 - 1 are reported as 2^63 - 1.
        senders: the connected senders of a receiver, in the order in which they connected.
        answered_at: the time of the answer, by `time.monotonic`.
    """

    kind: Literal["receiver", "publisher", "server"]
    id: str
    pid: int
    statistics: ReceiverStatistics | PublisherStatistics | ServerStatistics
    senders: tuple[SenderInspection, ...]
    answered_at: float


async def inspect(
    address: str,
    *,
    patience_s: float,
    secret_key: CurveKey | None = None,
    server_key: CurveKey | None = None,
) -> Inspection:
    """Inspect the receiver, server or publisher that listens at an address, and return its statistics.

    An inspection changes nothing in the inspected process, and does not count towards its limits on senders,
    clients or subscribers. The result contains what that process knows; these are not asked.

    Args:
        address: the address, such as ``unix:///run/user/1000/engine.sock``.
        patience_s: the time limit in seconds for the answer.
        secret_key: the CURVE secret key of this process, for a ``tcp://`` address on another machine.
        server_key: the CURVE public key of the process at that address.

    Cancellation has no side effects.

    Raises:
        TypeError: `address` is not an address; a queue has none, so it cannot be inspected.
        ValueError: the address or a key is invalid, or `patience_s` is not positive.
        AccessDeniedError: the other side runs as another user, or the two sides do not agree on their keys.
        PeerLostError: no process listens at the address, or the process closed or did not answer in time.
        ProtocolError: the other side has another version of the protocol, or violated it.
        UsageError: the process at the address does not listen for senders, clients or subscribers.
        OSError: the machine has no descriptors left.
    """
    if isinstance(address, TensorQueue | Queue):
        raise TypeError(
            "a queue has no address at which to inspect it: call `statistics()` in the processes that use it"
        )
    if not patience_s > 0:
        raise ValueError(f"patience_s must be positive, got {patience_s}")
    inspection = _Inspection(address)
    route = route_to(address, TcpArguments(True, secret_key, server_key))
    connector = route.connector(Events(inspection.connected, inspection.fail))
    try:
        connector.connect()
        if not (address.lower().startswith("tcp:") or inspection.is_connected or connector.is_backlogged):
            raise _not_listening(address)
        return await until(
            inspection.result,
            inspection.changes,
            patience_s,
            lambda: _no_answer(address, inspection, connector, patience_s),
        )
    finally:
        connector.close()
        inspection.close()


def _not_listening(address: str) -> PeerLostError:
    advice = "start it, or inspect another address"
    if not address.lower().startswith("tcp:"):
        folder = os.path.dirname(socket_path(address))
        if not os.path.isdir(folder):
            advice = f"the folder {folder} does not exist"
    return PeerLostError(f"no process listens at {address}: {advice}")


def _no_answer(
    address: str, inspection: "_Inspection", connector: Connector, patience_s: float
) -> PeerLostError:
    if not (inspection.is_connected or connector.is_backlogged):
        return _not_listening(address)  # no process has accepted the connection
    return PeerLostError(
        f"the process at {address} has not answered for {patience_s:g} s: it is stopped, or its event loop "
        "is busy; try again, or wait longer",
        pid=inspection.connection.peer_pid,
    )


_KINDS: dict[type, Literal["receiver", "publisher", "server"]] = {
    ReceiverStatistics: "receiver",
    PublisherStatistics: "publisher",
    ServerStatistics: "server",
}


class _Inspection:
    """One inspection: its connection, and the reports that arrive on it."""

    def __init__(self, address: str) -> None:
        hello = Hello(VERSION, os.getpid(), "inspector")
        self.connection = Connection(hello, f"the process at {address}")
        self.changes = Waiters()
        self.reports: list[ReceiverReport | PublisherReport | ServerReport] = []
        self.failure: AioTensorError | None = None
        self.is_connected = False
        self._transport: Transport | None = None

    def result(self) -> Inspection | None:
        """Return the result once the last report has arrived; raise the error that ends the inspection."""
        theirs = self.connection.theirs
        if theirs is not None and self.reports and self.reports[-1].last:
            rows = [
                row for report in self.reports if isinstance(report, ReceiverReport) for row in report.senders
            ]
            senders = tuple(
                SenderInspection(**asdict(row)) for row in {row.sender: row for row in rows}.values()
            )
            statistics, now = self.reports[-1].statistics, time.monotonic()
            return Inspection(_KINDS[type(statistics)], theirs.id, theirs.pid, statistics, senders, now)
        if self.failure is not None:
            raise self.failure
        return None

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    # Events of the connector and the transport

    def connected(self, transport: Transport) -> None:
        """Start the transport, and send the only frame that an inspector sends."""
        self._transport = transport
        self.is_connected = True
        transport.start(self)
        for record in self.connection.data_to_send():
            transport.write(record)

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        """Process a record of the other process."""
        close_all(descriptors)  # none are expected
        try:
            for frame in self.connection.receive(data):
                match frame:
                    case ReceiverReport() | PublisherReport() | ServerReport():
                        if self.reports and self.reports[-1].last:
                            raise ProtocolError("it sent a report after the last one")
                        self.reports.append(frame)
                    case Close():
                        self.fail(self.connection.closed(frame).error)
                    case Hello():
                        pass
                    case _:
                        raise ProtocolError("it sent a frame that is not for inspectors")
        except (RefusedError, ProtocolError) as error:
            self.fail(again(error))
        self.changes.wake()

    def connection_lost(self, reason: str | ProtocolError) -> None:
        """End the inspection with an error: the other process is gone."""
        self.fail(self.connection.lost(str(reason), is_retried=False).error)

    def resume_writing(self) -> None:
        """Do nothing: only one frame is ever written."""

    def fail(self, error: AioTensorError) -> None:
        """End the inspection with an error."""
        self.close()
        if self.failure is None:  # the first error is the cause
            self.failure = ProtocolError(str(error)) if isinstance(error, RefusedError) else error
        self.changes.wake()
