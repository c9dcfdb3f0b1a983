"""The policies for slow subscribers, and both ends of the connection to a subscriber, without sockets."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiotensor import ProtocolError, RefusedError
from aiotensor.protocol.audience import Audience, Backlog, Item, SlowPolicy
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
    MAX_RECORD_BYTES,
    OPENING,
    VERSION,
    Attach,
    Attributes,
    Discard,
    Discarded,
    Release,
    Subscribe,
    Taken,
    Welcome,
    decode,
    encode_record,
)
from aiotensor.protocol.publisher import PublisherConnection
from aiotensor.protocol.segments import MAX_SEGMENTS
from aiotensor.protocol.subscriber import SubscriberConnection, read_content
from tests.selection import COMPLETE

WELCOME = Welcome(VERSION, 7, MAX_RECORD_BYTES, "p", is_admitted=True)
ADMIT = Admit(1 << 20, 2, 5)


def subscribe(**changes: object) -> Subscribe:
    fields: dict[str, Any] = {"version": VERSION, "pid": 8, "subscriber": "s"}
    return Subscribe(**{**fields, **changes})


def publish(number: int, **changes: object) -> Publish:
    fields: dict[str, Any] = {"number": number, "placement": INLINE, "payload": b"x", "nbytes": 1}
    return Publish(**{**fields, **changes})


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


SIZES = {block: 10 * (block + 1) for block in range(7)}


def item(number: int, *blocks: int) -> Item:
    """Return a publication with tensors in some blocks."""
    record = encode_record([publish(number)])
    return Item(number, record, blocks=tuple((block, SIZES[block]) for block in blocks))


def backlog(max_behind: int = 3, max_held_bytes: int | None = None, *items: Item) -> Backlog:
    made = Backlog(max_behind, max_held_bytes)
    for one in items:
        made.add(one)
    return made


def announced(of: Backlog) -> list[int]:
    """Announce as many publications as the limits allow, and return their numbers."""
    return [one.number for one in iter(of.next, None)]


# The policies for slow subscribers


def test_the_oldest_publication_is_dropped_first() -> None:
    one = backlog(2, None, *map(item, range(4)))
    assert announced(one) == [0, 1]
    assert [(lost.item.number, lost.is_withdrawn) for lost in (one.drop(), one.drop(), one.drop())] == [
        (0, True),
        (1, True),
        (2, False),
    ]
    assert announced(one) == []  # two are unanswered
    assert (one.behind, one.dropped) == (1, 3)
    one.discarded(0)
    assert announced(one) == [3]
    one.taken(1)  # before it was withdrawn
    assert (one.behind, one.dropped, one.delivered) == (1, 2, 1)


def test_closing_a_backlog_keeps_only_the_blocks_of_taken_publications() -> None:
    one = backlog(3, None, item(0, 0), item(1, 1, 1), item(2, 0, 2), item(3, 3))
    assert announced(one) == [0, 1, 2]
    one.taken(0)
    one.drop()
    assert one.close() == [0, 2, 1, 1]
    assert (list(one.pins()), list(one.pending_blocks())) == ([0], [3])
    assert (one.held_bytes, one.dropped, one.delivered) == (SIZES[0], 1, 1)
    one.released(0)
    assert one.held_bytes == 0


def test_publications_wait_for_the_memory_that_a_subscriber_may_use() -> None:
    one = backlog(5, SIZES[0] + SIZES[1], item(0, 0), item(1, 1), item(2, 0), item(3, 2), item(4))
    assert announced(one) == [0, 1, 2]  # the third uses the block of the first
    assert list(one.pending_blocks()) == [2]
    for number in range(3):
        one.taken(number)
    assert announced(one) == []
    for block in (0, 1, 0):
        assert one.next() is None
        one.released(block)
    assert announced(one) == [3, 4]


def test_rest_announces_all_pending_publications_regardless_of_limits() -> None:
    one = backlog(2, SIZES[0], item(0, 0), item(1, 1), item(2, 2))
    assert announced(one) == [0]
    assert [each.number for each in one.rest()] == [1, 2]
    assert one.held_bytes == SIZES[0] + SIZES[1] + SIZES[2]


@pytest.mark.promise(34)
@pytest.mark.parametrize("slow", ["wait", "drop", "disconnect"])
def test_each_slow_policy_affects_full_subscribers_only(slow: SlowPolicy) -> None:
    audience: Audience[str] = Audience(slow, 2, None)
    for name in ("full", "other"):
        audience.join(name)
    for number in range(2):
        assert audience.publish(item(number)) == []
        for one in audience.backlogs.values():
            announced(one)
    audience.backlogs["other"].taken(0)
    assert audience.delaying() == (["full"] if slow == "wait" else [])
    assert audience.to_disconnect() == (["full"] if slow == "disconnect" else [])
    if slow == "drop":
        [(name, lost)] = audience.publish(item(2))
        assert (name, lost.item.number, lost.is_withdrawn) == ("full", 0, True)
    left = audience.leave("full")
    assert left is not None
    assert left.behind == 2
    assert audience.leave("full") is None
    assert audience.delaying() == audience.to_disconnect() == []


def test_a_subscriber_begins_with_the_history() -> None:
    audience: Audience[str] = Audience("wait", 3, None)
    one = audience.join("late", [item(4, 1), item(5)])
    assert (one.behind, announced(one)) == (2, [4, 5])
    assert one.oldest == item(4, 1)


class Model:
    """One subscriber as lists of its pending and announced publications, in order."""

    def __init__(self, max_behind: int) -> None:
        self.limit = max_behind
        self.waiting: list[Item] = []
        self.open: list[Item] = []
        self.withdrawn: list[Item] = []
        self.in_use: list[int] = []

    def announce(self) -> list[int]:
        found = []
        while self.waiting and len(self.open) + len(self.withdrawn) < self.limit:
            self.open.append(self.waiting.pop(0))
            found.append(self.open[-1].number)
        return found

    def drop(self) -> tuple[int, bool]:
        if self.open:
            self.withdrawn.append(self.open.pop(0))
            return self.withdrawn[-1].number, True
        return self.waiting.pop(0).number, False

    def held(self) -> list[int]:
        return sorted(
            [*self.in_use, *(block for one in self.open + self.withdrawn for block, _ in one.blocks)]
        )


ACTIONS = st.one_of(
    st.tuples(st.just("publish"), st.lists(st.sampled_from(sorted(SIZES)), max_size=3)),
    st.tuples(st.sampled_from(["take", "discard", "release"]), st.integers(0, 100)),
)


@pytest.mark.promise(33)
@settings(max_examples=500 if COMPLETE else 60)
@given(max_behind=st.integers(1, 4), actions=st.lists(ACTIONS, max_size=60))
def test_any_sequence_agrees_with_the_model(max_behind: int, actions: list[tuple[str, object]]) -> None:
    audience: Audience[str] = Audience("drop", max_behind, None)
    real, model = audience.join("it"), Model(max_behind)
    number, dropped, delivered = 0, 0, 0
    for action, value in actions:
        answerable = model.open + model.withdrawn
        match action, value:
            case "publish", list(blocks):
                expected = model.drop() if len(model.open) + len(model.waiting) >= max_behind else None
                lost = audience.publish(item(number, *blocks))
                assert [(one.item.number, one.is_withdrawn) for _, one in lost] == [expected][
                    : expected is not None
                ]
                dropped += expected is not None
                model.waiting.append(item(number, *blocks))
                number += 1
            case "take", int(choice) if answerable:
                one = answerable[choice % len(answerable)]
                real.taken(one.number)
                dropped -= one in model.withdrawn
                (model.open if one in model.open else model.withdrawn).remove(one)
                model.in_use += [block for block, _ in one.blocks]
                delivered += 1
            case "discard", int(choice) if answerable:
                one = answerable[choice % len(answerable)]
                assert real.discarded(one.number) == one
                (model.open if one in model.open else model.withdrawn).remove(one)
            case "release", int(choice) if model.in_use:
                block = model.in_use.pop(choice % len(model.in_use))
                real.released(block)
        assert announced(real) == model.announce()
        assert real.behind == len(model.open) + len(model.waiting) <= max_behind
        assert real.unanswered == len(model.open) + len(model.withdrawn) <= max_behind
        assert sorted(real.pins()) == model.held()
        assert real.held_bytes == sum(SIZES[block] for block in set(model.held()))
        assert (real.dropped, real.delivered) == (dropped, delivered)
        oldest = (model.open + model.waiting)[:1]
        assert real.oldest == (oldest[0] if oldest else None)


# Connections


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


def test_frames_are_sent_in_the_order_of_the_commands_up_to_a_close() -> None:
    connection = publisher_end()
    connection.withdraw(1)
    connection.announce(item(3))
    connection.detach(4)
    connection.announce(item(5))
    connection.withdraw(3)
    assert sent(connection) == [Discard(1), publish(3), Detach(4), publish(5), Discard(3)]
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


@pytest.mark.promise(25)
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


def test_a_frame_before_the_admission_of_the_subscriber_is_a_violation() -> None:
    for frame in (publish(5), Discard(1), Attach(0, ARENA, 1), Detach(0), ADMIT):
        for before in ([], [msgspec.structs.replace(WELCOME, is_admitted=False)]):
            connection = SubscriberConnection(subscribe())
            for one in before:
                connection.receive(record(one))
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


PLACED = PlacedTensor("uint8", (3, 4), ARENA, b"where", 9, Attributes(requires_grad=True))


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
