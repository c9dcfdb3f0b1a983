"""Both ends of the connection of an inspector to a receiver or a publisher.

The inspector's end, `InspectorConnection`:

    OPENING --Welcome--> OPEN --Close; violation--> CLOSED
       |                                              ^
       '--Welcome of another version; Close; violation'

A receiver sends one or more `ReceiverReport` frames, and a publisher a `PublisherReport`. The inspected end,
`InspectedConnection`, is open from the `Inspect` on, and accepts no further frame.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from aiotensor.errors import ProtocolError
from aiotensor.protocol.connection import CLOSED, OPEN, Close
from aiotensor.protocol.frames import (
    FROM_SENDER,
    LEAST_FRAME_BYTES,
    MAX_RECORD_BYTES,
    MAX_ROWS,
    TO_INSPECTOR,
    VERSION,
    FromSender,
    Inspect,
    PublisherReport,
    ReceiverReport,
    SenderSummary,
    ToInspector,
    Welcome,
    bounded,
    encode,
)
from aiotensor.protocol.records import RecordConnection
from aiotensor.types import PublisherStatistics, ReceiverStatistics

__all__ = ["InspectedConnection", "InspectorConnection"]


class InspectorConnection(RecordConnection[ToInspector, Inspect]):
    """The inspector's end.

    Args:
        pid: the process id of the inspector.

    Attributes:
        receiver_id: the id of the receiver or publisher; "" before the `Welcome`.
        statistics: the statistics of the receiver or publisher; None before the first report.
        senders: the senders in the reports, by their ids.
        is_complete: whether the last report has arrived.
    """

    def __init__(self, pid: int) -> None:
        super().__init__("inspector", "the receiver", TO_INSPECTOR, MAX_RECORD_BYTES, LEAST_FRAME_BYTES)
        self.receiver_id = ""
        self.statistics: ReceiverStatistics | PublisherStatistics | None = None
        self.senders: dict[str, SenderSummary] = {}
        self.is_complete = False
        self._records.append(encode(Inspect(VERSION, pid)))

    def _validate(self, frame: ToInspector) -> None:
        match frame:
            case Welcome():
                self.receiver_id = frame.receiver
                self.accept_hello(frame.version, frame.pid, VERSION)
                self.state = OPEN
            case ReceiverReport():
                self.check_open()
                if self.is_complete:
                    raise ProtocolError("it sent a report after the last one")
                self.statistics, self.is_complete = frame.statistics, frame.last
                self.senders.update((row.sender, row) for row in frame.senders)
            case PublisherReport():
                self.check_open()
                if self.statistics is not None:
                    raise ProtocolError("it sent a second report")
                self.statistics, self.is_complete = frame.statistics, True
            case Close():
                self.state = CLOSED


class InspectedConnection(RecordConnection[FromSender, ToInspector]):
    """The end of the receiver or publisher.

    Args:
        inspect: the first frame of the inspector.
        welcome: the answer to it.

    Attributes:
        mismatch: the reason to refuse the inspector because of its version, if any.
    """

    def __init__(self, inspect: Inspect, welcome: Welcome) -> None:
        super().__init__("receiver", "the inspector", FROM_SENDER, welcome.max_frame_bytes, MAX_RECORD_BYTES)
        self.mismatch = self.record_hello(inspect.version, inspect.pid, VERSION)
        self.state = OPEN
        self._send(welcome)

    def report_publisher(self, statistics: PublisherStatistics) -> None:
        """Send the statistics of a publisher, with at most `MAX_ROWS` subscribers: the slowest ones."""
        self._send(
            PublisherReport(bounded(replace(statistics, lags=statistics.lags[:MAX_ROWS]))), MAX_RECORD_BYTES
        )

    def report(self, statistics: ReceiverStatistics, senders: Sequence[SenderSummary]) -> None:
        """Send the statistics of the receiver and the summaries of its senders, in one or more reports."""
        for start in range(0, max(1, len(senders)), MAX_ROWS):
            rows = tuple(senders[start : start + MAX_ROWS])
            last = start + MAX_ROWS >= len(senders)
            self._send(ReceiverReport(bounded(statistics), rows, last), MAX_RECORD_BYTES)

    def _validate(self, frame: FromSender) -> None:
        raise ProtocolError("it sent another frame after `Inspect`, its only one")
