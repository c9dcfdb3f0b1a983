"""Both ends of the connection between a publisher and a subscriber, without sockets."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiotensor import ProtocolError, RefusedError
from aiotensor.protocol.audience import Backlog, Item
from aiotensor.protocol.broadcast import (
    FROM_SUBSCRIBER,
    TO_SUBSCRIBER,
    Admit,
    Content,
    Detach,
    PlacedTensor,
    Publish,
)
from aiotensor.protocol.connection import Close, ConnectionState
from aiotensor.protocol.frames import (
    ARENA,
    INLINE,
    MAX_FRAMES,
    MAX_RECORD_BYTES,
    OPENING,
    VERSION,
    Attach,
    Discard,
    Discarded,
    Release,
    Subscribe,
    Taken,
    Welcome,
    decode,
    encode,
    encode_record,
)
from aiotensor.protocol.publisher import PublisherConnection
from aiotensor.protocol.segments import MAX_SEGMENTS
from aiotensor.protocol.subscriber import SubscriberConnection, read_content

WELCOME = Welcome(VERSION, 7, MAX_RECORD_BYTES, "p", is_admitted=True)
ADMIT = Admit(1 << 20, 2, 5)


def subscribe(**changes: object) -> Subscribe:
    fields: dict[str, Any] = {"version": VERSION, "pid": 8, "subscriber": "s"}
    return Subscribe(**{**fields, **changes})


def publish(number: int, **changes: object) -> Publish:
    fields: dict[str, Any] = {"number": number, "placement": INLINE, "payload": b"x", "nbytes": 1}
    return Publish(**{**fields, **changes})


def item(number: int, *blocks: int) -> Item:
    return Item(number, encode_record([publish(number)]), blocks=tuple((block, 10) for block in blocks))


def record(*frames: object) -> bytes:
    return encode_record(frames)


def publisher_end(*numbers: int) -> PublisherConnection:
    """Return the end of a publisher that has admitted a subscriber and announced some publications."""
    connection = PublisherConnection(subscribe(), WELCOME)
    backlog = Backlog(4, None)
    connection.admit(backlog, ADMIT)
    for number in numbers:
        backlog.add(item(number, number))
        announced = backlog.next()
        assert announced is not None
        connection.announce(announced)
    sent(connection)
    return connection


def subscriber_end(*frames: object) -> SubscriberConnection:
    """Return the end of a subscriber that was admitted, and has received some frames."""
    connection = SubscriberConnection(subscribe())
    [first] = connection.data_to_send()
    assert decode(OPENING, first) == [subscribe()]
    connection.receive(record(WELCOME, ADMIT))
    for frame in frames:
        connection.receive(record(frame))
    return connection


def sent(connection: PublisherConnection) -> list[object]:
    return [frame for data in connection.data_to_send() for frame in decode(TO_SUBSCRIBER, data)]


def answered(connection: SubscriberConnection) -> list[object]:
    return [frame for data in connection.data_to_send() for frame in decode(FROM_SUBSCRIBER, data)]


def test_a_publisher_admits_a_subscriber() -> None:
    connection = PublisherConnection(subscribe(), WELCOME)
    states = [connection.state]
    connection.admit(Backlog(2, None), ADMIT)
    states.append(connection.state)
    assert states == [ConnectionState.OPENING, ConnectionState.OPEN]
    assert sent(connection) == [WELCOME, ADMIT]


def test_a_refused_subscriber_receives_the_version_and_the_reason() -> None:
    connection = PublisherConnection(subscribe(version=VERSION + 1), WELCOME)
    assert connection.mismatch is not None
    assert f"the subscriber has protocol version {VERSION + 1}, and the publisher has" in connection.mismatch
    connection.refuse(connection.mismatch)
    welcome, close = sent(connection)
    assert isinstance(welcome, Welcome)
    assert not welcome.is_admitted
    assert close == Close(connection.mismatch, is_refusal=True)
    assert connection.is_closed


def test_frames_are_sent_in_the_order_of_the_commands() -> None:
    connection = publisher_end()
    connection.withdraw(1)
    connection.announce(item(3))
    connection.detach(4)
    connection.announce(item(5))
    connection.withdraw(3)
    assert sent(connection) == [Discard(1), publish(3), Detach(4), publish(5), Discard(3)]
    assert sent(connection) == []


def test_nothing_is_sent_after_a_close() -> None:
    connection = publisher_end()
    connection.close(Close("enough"))
    connection.announce(item(3))
    connection.withdraw(3)
    connection.detach(1)
    assert sent(connection) == [Close("enough")]


def test_answers_free_blocks() -> None:
    connection = publisher_end(0, 1, 2)
    connection.receive(record(Taken((0, 2))))
    assert connection.freed == []
    connection.receive(record(Release((2,)), Discarded((1,))))
    assert connection.freed == [2, 1]
    assert list(connection.backlog.pins()) == [0]


def test_answers_before_an_invalid_answer_free_blocks() -> None:
    connection = publisher_end(5, 6)
    with pytest.raises(ProtocolError, match="more often than it was announced"):
        connection.receive(record(Taken((5,)), Discarded((6,)), Release((5, 5))))
    assert connection.freed == [6, 5]
    assert list(connection.backlog.pins()) == []


@pytest.mark.parametrize(
    "frame",
    [Taken((3,)), Taken((0, 0)), Discarded((3,)), Release((0,)), Release((9,)), Discarded((0, 0))],
    ids=repr,
)
def test_wrong_answers_are_violations(frame: object) -> None:
    connection = publisher_end(0, 1)
    with pytest.raises(ProtocolError):
        connection.receive(record(frame))
    assert connection.is_closed
    assert connection.receive(record(Taken((1,)))) == []


@pytest.mark.parametrize("frame", [WELCOME, ADMIT, publish(1), Attach(0, ARENA, 1), Discard(1)], ids=repr)
def test_a_subscriber_sends_no_frames_of_a_publisher(frame: object) -> None:
    with pytest.raises(ProtocolError, match="cannot be decoded"):
        publisher_end().receive(record(frame))


def test_a_subscriber_answers_each_publication_once() -> None:
    connection = subscriber_end(publish(5), publish(7))
    connection.taken(5)
    connection.release(3)
    connection.dropped(7)
    connection.release(3)
    assert answered(connection) == [Taken((5,)), Discarded((7,)), Release((3, 3))]
    for answer in (connection.taken, connection.dropped):
        with pytest.raises(KeyError):
            answer(5)


def test_answers_are_sent_before_a_close() -> None:
    connection = subscriber_end(publish(5))
    connection.taken(5)
    connection.close(Close())
    connection.release(1)
    assert answered(connection)[:2] == [Taken((5,)), Close()]


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([publish(4)], "sent publication 4 after 4"),
        ([publish(6), publish(6)], "sent publication 6 after 6"),
        ([publish(number) for number in range(5, 10)], "more publications than max_behind=2 allows"),
        ([publish(5, placement="disk")], "unknown placement 'disk' for a publication"),
        ([publish(5, placement=ARENA)], "unknown placement 'arena' for a publication"),
        ([publish(5, block=1)], "unknown placement 'inline' for a publication"),
        ([Discard(5)], "withdrew publication 5, which it never sent"),
        ([Attach(0, "disk", 1)], "attached memory for the unknown placement 'disk'"),
        ([Attach(0, ARENA, 1), Attach(0, ARENA, 1)], "attached segment 0 twice"),
        ([Attach(number, ARENA, 1) for number in range(MAX_SEGMENTS + 1)], "more than 8 segments"),
        ([Attach(0, ARENA, 1 << 30)], "attached 1073741824 bytes, more than the "),
        ([Detach(0)], "detached segment 0, which it never attached"),
        ([ADMIT], "admitted this subscriber twice"),
        ([WELCOME], "a second hello"),
        ([Taken((1,))], "cannot be decoded"),
    ],
)
def test_violations_of_a_publisher(frames: list[object], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        subscriber_end(*frames)


@pytest.mark.parametrize(
    "frame",
    [publish(5), Discard(1), Attach(0, ARENA, 1), Detach(0), ADMIT],
    ids=lambda frame: type(frame).__name__,
)
def test_a_frame_before_the_admission_of_the_subscriber_is_a_violation(frame: object) -> None:
    connection = SubscriberConnection(subscribe())
    with pytest.raises(ProtocolError):
        connection.receive(record(frame))
    connection = SubscriberConnection(subscribe())
    connection.receive(record(msgspec.structs.replace(WELCOME, is_admitted=False)))
    with pytest.raises(ProtocolError):
        connection.receive(record(frame))


def test_another_version_is_refused() -> None:
    with pytest.raises(RefusedError, match=f"the publisher has protocol version {VERSION + 1}, and the sub"):
        SubscriberConnection(subscribe()).receive(
            record(msgspec.structs.replace(WELCOME, version=VERSION + 1))
        )


def test_detached_segments_do_not_count_against_the_limit() -> None:
    frames = [frame for number in range(50) for frame in (Attach(number, ARENA, 1), Detach(number))]
    assert not subscriber_end(*frames).is_closed


def test_a_record_may_contain_max_frames_and_no_more() -> None:
    connection = subscriber_end()
    connection.receive(record(*[Discard(1)] * MAX_FRAMES))
    with pytest.raises(ProtocolError):
        connection.receive(record(*[Discard(1)] * (MAX_FRAMES + 1)))


PLACED = PlacedTensor("uint8", (3, 4), ARENA, b"where", 9, requires_grad=True)


def test_a_content_is_read_without_a_copy_of_its_body() -> None:
    data = msgspec.msgpack.encode(Content(memoryview(b"body"), (PLACED,)))
    content = read_content(memoryview(data))
    assert (bytes(content.body), content.tensors) == (b"body", (PLACED,))
    assert content.body.obj is not None


@given(st.binary(max_size=50))
def test_arbitrary_bytes_are_content_or_a_violation(data: bytes) -> None:
    try:
        content = read_content(data)
    except ProtocolError:
        return
    assert isinstance(content, Content)


def test_an_opening_record_with_two_frames_is_a_violation() -> None:
    with pytest.raises(ProtocolError):
        decode(OPENING, encode(subscribe(), subscribe()))
