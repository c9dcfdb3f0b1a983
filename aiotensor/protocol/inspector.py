"""Both ends of the connection of an inspector to a receiver or a publisher.

The inspector's end, `InspectorConnection`:

    OPENING --Welcome--> OPEN --Close; violation--> CLOSED
       |                                              ^
       '--Welcome of another version; Close; violation'

A receiver sends one or more `ReceiverReport` frames, and then forwards one `StatisticsReply` of each sender.
A publisher sends a `PublisherReport`. The inspected end, `InspectedConnection`, is open from the `Inspect`
on, and accepts no further frame.
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
    StatisticsReply,
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
        replies: the replies of senders, by the ids of the senders.
        has_reports: whether the last report has arrived.
    """

    def __init__(self, pid: int) -> None:
        super().__init__("inspector", "the receiver", TO_INSPECTOR, MAX_RECORD_BYTES, LEAST_FRAME_BYTES)
        self.receiver_id = ""
        self.statistics: ReceiverStatistics | PublisherStatistics | None = None
        self.senders: dict[str, SenderSummary] = {}
        self.replies: dict[str, StatisticsReply] = {}
        self.has_reports = False
        self._records.append(encode(Inspect(VERSION, pid)))

    @property
    def has_replies(self) -> bool:
        """Whether every sender has replied."""
        return self.has_reports and len(self.replies) == len(self.senders)

    def _validate(self, frame: ToInspector) -> None:
        match frame:
            case Welcome():
                self.receiver_id = frame.receiver
                self.accept_hello(frame.version, frame.pid, VERSION)
                self.state = OPEN
            case ReceiverReport():
                self.check_open()
                if self.has_reports:
                    raise ProtocolError("it sent a report after the last one")
                self.statistics, self.has_reports = frame.statistics, frame.last
                self.senders.update((row.sender, row) for row in frame.senders)
            case PublisherReport():
                self.check_open()
                if self.statistics is not None:
                    raise ProtocolError("it sent a second report")
                self.statistics, self.has_reports = frame.statistics, True
            case StatisticsReply():
                if not self.has_reports or frame.sender not in self.senders:
                    raise ProtocolError("it forwarded a reply of a sender that it did not report")
                if frame.sender in self.replies:
                    raise ProtocolError("it forwarded two replies of one sender")
                self.replies[frame.sender] = frame
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

    def forward(self, reply: StatisticsReply) -> None:
        """Forward the reply of a sender, which contains the id of the sender."""
        self._send(reply, MAX_RECORD_BYTES)

    def _validate(self, frame: FromSender) -> None:
        raise ProtocolError("it sent another frame after `Inspect`, its only one")
