from typing import Any

import pytest

from aiotensor.errors import PeerLostError, ProtocolError, RefusedError
from aiotensor.protocol.connection import Close, ConnectionState
from aiotensor.protocol.frames import (
    MAX_RECORD_BYTES,
    MAX_ROWS,
    OPENING,
    TO_INSPECTOR,
    VERSION,
    Attach,
    Discard,
    FromSender,
    Inspect,
    ReceiverReport,
    SenderSummary,
    ToInspector,
    Welcome,
    decode,
    encode,
)
from aiotensor.protocol.inspector import InspectedConnection, InspectorConnection
from aiotensor.types import MAX_NUMBER
from tests.frames import hello, put, receiver_statistics

INSPECT = Inspect(VERSION, 42)
WELCOME = Welcome(VERSION, 43, receiver="r", is_admitted=True)


def summary(sender: str = "s") -> SenderSummary:
    return SenderSummary(sender, *[0] * 9)


def report(*senders: str, last: bool = True, **changes: object) -> ReceiverReport:
    return ReceiverReport(receiver_statistics(**changes), tuple(map(summary, senders)), last)


def inspector(*received: ToInspector) -> InspectorConnection:
    """Return an inspector's end after some frames of the receiver."""
    connection = InspectorConnection(42)
    connection.data_to_send()
    for frame in received:
        connection.receive(encode(frame))
    return connection


def inspected(version: int = VERSION) -> InspectedConnection:
    """Return a receiver's end after its welcome."""
    connection = InspectedConnection(Inspect(version, 42), WELCOME)
    connection.data_to_send()
    return connection


def frames_of(connection: InspectedConnection) -> list[ToInspector]:
    return [frame for record in connection.data_to_send() for frame in decode(TO_INSPECTOR, record)]


def violation(connection: InspectorConnection, frame: ToInspector) -> str:
    with pytest.raises(ProtocolError) as caught:
        connection.receive(encode(frame))
    assert connection.is_closed
    return str(caught.value)


# The inspector's end


def test_an_inspector_sends_one_frame() -> None:
    connection = InspectorConnection(42)

    [record] = connection.data_to_send()
    assert decode(OPENING, record) == [INSPECT]
    assert list(connection.data_to_send()) == []


def test_a_welcome_opens_the_connection_and_identifies_the_receiver() -> None:
    assert inspector().state is ConnectionState.OPENING

    connection = inspector()
    assert connection.receive(encode(WELCOME)) == [WELCOME]
    assert connection.state is ConnectionState.OPEN
    assert (connection.receiver_id, connection.peer_pid) == ("r", 43)
    assert connection.statistics is None
    assert not connection.is_complete


def test_a_receiver_of_another_version_is_refused() -> None:
    connection = inspector()

    with pytest.raises(RefusedError, match=f"the receiver has protocol version {VERSION + 1}"):
        connection.receive(encode(Welcome(VERSION + 1, 43), Close("and so does it")))
    assert connection.is_closed


@pytest.mark.parametrize("received", [(), (WELCOME,), (WELCOME, report("s"))])
def test_the_receiver_may_close_in_every_state(received: tuple[ToInspector, ...]) -> None:
    connection = inspector(*received)
    close = Close("a newer connection replaced it", retry=True)

    assert connection.receive(encode(close, report())) == [close]
    assert connection.is_closed
    assert isinstance(connection.closed(close).error, PeerLostError)


def test_reports_accumulate_up_to_the_last_one() -> None:
    first, last = report("a", "b", last=False, senders=3), report("c", senders=3)
    assert not inspector(WELCOME, first).is_complete

    connection = inspector(WELCOME, first, last)
    assert connection.is_complete
    assert connection.senders == {sender: summary(sender) for sender in "abc"}
    assert connection.statistics == receiver_statistics(senders=3)


@pytest.mark.parametrize(
    ("received", "frame", "reason"),
    [
        ((), report(), "a frame before its hello"),
        ((WELCOME,), WELCOME, "a second hello"),
        ((WELCOME, report("s")), report("s"), "a report after the last one"),
    ],
)
def test_a_frame_out_of_order_is_a_violation(
    received: tuple[ToInspector, ...], frame: ToInspector, reason: str
) -> None:
    assert reason in violation(inspector(*received), frame)


# The receiver's end


def test_an_inspector_is_welcomed_immediately() -> None:
    connection = InspectedConnection(INSPECT, WELCOME)

    assert connection.state is ConnectionState.OPEN
    assert connection.peer_pid == 42
    assert connection.mismatch is None
    assert frames_of(connection) == [WELCOME]


def test_an_inspector_of_another_version_gets_the_version_and_the_reason() -> None:
    connection = InspectedConnection(Inspect(VERSION + 1, 42), WELCOME)
    reason = connection.mismatch
    assert reason is not None
    assert f"the inspector has protocol version {VERSION + 1}" in reason
    connection.close(Close(reason, is_refusal=True))

    assert frames_of(connection) == [WELCOME, Close(reason, is_refusal=True)]


@pytest.mark.parametrize(
    "frame",
    [put(), Discard(0), Attach(0, "arena", 1), Close()],
    ids=lambda frame: type(frame).__name__,
)
def test_an_inspector_sends_no_other_frame(frame: FromSender) -> None:
    connection = inspected()

    with pytest.raises(ProtocolError, match="another frame after `Inspect`"):
        connection.receive(encode(frame))
    assert connection.is_closed


@pytest.mark.parametrize("frame", [INSPECT, hello()], ids=lambda frame: type(frame).__name__)
def test_an_inspector_sends_no_second_hello(frame: Any) -> None:
    with pytest.raises(ProtocolError, match="cannot be decoded"):
        inspected().receive(encode(frame))


@pytest.mark.parametrize("count", [0, 1, MAX_ROWS, MAX_ROWS + 1, 3 * MAX_ROWS])
def test_many_senders_are_split_into_reports_and_the_last_one_is_marked(count: int) -> None:
    connection = inspected()
    rows = [summary(f"{number}") for number in range(count)]
    connection.report(receiver_statistics(), rows)

    reports = [frame for frame in frames_of(connection) if isinstance(frame, ReceiverReport)]
    assert [row for one in reports for row in one.senders] == rows
    assert all(len(one.senders) <= MAX_ROWS for one in reports)
    assert [one.last for one in reports] == [False] * (len(reports) - 1) + [True]


def test_reports_of_the_longest_names_stay_within_the_limit_of_records() -> None:
    name = "\N{GRINNING FACE}" * 64
    connection = inspected()
    connection.report(receiver_statistics(), [SenderSummary(name, *[MAX_NUMBER] * 9)] * (2 * MAX_ROWS))
    connection.close(Close("x" * 1024))

    records = connection.data_to_send()
    assert all(len(record) <= MAX_RECORD_BYTES for record in records)
    assert decode(TO_INSPECTOR, records[-1])[-1] == Close("x" * 1024)


def test_limits_beyond_the_range_of_numbers_are_reported_as_the_largest_number() -> None:
    connection = inspected()
    connection.report(receiver_statistics(max_mapped_bytes=2**70, max_senders=None), [])

    statistics = receiver_statistics(max_mapped_bytes=MAX_NUMBER, max_senders=None)
    assert frames_of(connection) == [ReceiverReport(statistics, ())]


def test_nothing_is_sent_after_the_last_frame() -> None:
    connection = inspected()
    connection.close(Close("a newer connection replaced it", retry=True))
    connection.report(receiver_statistics(), [])

    assert frames_of(connection) == [Close("a newer connection replaced it", retry=True)]
    assert connection.receive(encode(put())) == []


@pytest.mark.parametrize("count", [0, 1, 2 * MAX_ROWS + 1])
def test_an_inspector_decodes_the_reports_of_a_receiver(count: int) -> None:
    ours = InspectorConnection(42)
    [opening] = (frame for record in ours.data_to_send() for frame in decode(OPENING, record))
    assert isinstance(opening, Inspect)
    theirs = InspectedConnection(opening, WELCOME)
    names = [f"{number}" for number in range(count)]
    theirs.report(receiver_statistics(senders=count), [summary(name) for name in names])
    for record in theirs.data_to_send():
        ours.receive(record)

    assert ours.is_complete
    assert list(ours.senders) == names
