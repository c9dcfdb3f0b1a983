"""One end of a connection without sockets: its states, the messages in both directions, and violations."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from aiotensor.errors import PeerLostError, ProtocolError, RefusedError
from aiotensor.memory.tensors import MAX_INLINE_BYTES
from aiotensor.protocol.blocks import ADDRESSES_PER_BYTE
from aiotensor.protocol.connection import MAX_SEGMENTS, Connection, ConnectionState, Loss
from aiotensor.protocol.frames import (
    ARENA,
    INLINE,
    MAX_FRAMES,
    MAX_NUMBERS,
    MAX_RECORD_BYTES,
    MAX_TENSORS,
    VERSION,
    Attach,
    Begin,
    Close,
    Detach,
    Discard,
    Discarded,
    End,
    Failure,
    Frame,
    Hello,
    Message,
    Put,
    Release,
    Taken,
    decode,
    encode,
)
from aiotensor.types import MAX_NUMBER
from tests.frames import LONGEST_TRACE, frames_of, hello, publish, put, receiver_hello

OPENING, OPEN, CLOSED = ConnectionState

FIRST = 5  # the number of the first message of each end
ARENA_BYTES = 1 << 20
LARGEST_SEGMENT = ADDRESSES_PER_BYTE * (ARENA_BYTES + 64 * 1024)
MINE = hello(first=FIRST)
THEIRS = receiver_hello(first=FIRST, max_messages=2, arena_bytes=ARENA_BYTES)

on_both_sides = pytest.mark.parametrize("connects", [True, False], ids=["connecting", "accepting"])


def opened(*received: Frame | bytes, connects: bool = True, theirs: Hello = THEIRS) -> Connection:
    """Return an open end that has connected or accepted, after some records of the other end."""
    connection = Connection(MINE, "the receiver", None if connects else theirs)
    if connects:
        receive(connection, theirs)
    else:
        connection.admit(FIRST)
    connection.data_to_send()
    for one in received:
        receive(connection, one)
    return connection


def receive(connection: Connection, *frames: Frame | bytes) -> list[Frame]:
    """Pass a record of frames, or of any bytes, to an end."""
    if isinstance(frames[0], bytes):
        return connection.receive(frames[0])
    return connection.receive(encode(*[frame for frame in frames if not isinstance(frame, bytes)]))


def tensor(number: int = 0, *, of: int = FIRST, last: bool = False, nbytes: int = 3) -> Put:
    """Announce a tensor of a message."""
    return put(message=of, tensor=number, shape=(nbytes,), payload=bytes(nbytes), last=last)


def record_of(nbytes: int) -> bytes:
    """Return a record of this size with one frame."""
    overhead = len(encode(tensor(nbytes=nbytes - 100))) - (nbytes - 100)
    record = encode(tensor(nbytes=nbytes - overhead))
    assert len(record) == nbytes
    return record


# Opening and closing


def test_the_first_record_is_the_hello_alone_and_the_answer_admits_the_connecting_end() -> None:
    near = Connection(MINE, "the receiver")
    near.put(tensor())  # messages may be announced before the answer
    records = near.data_to_send()
    assert records == [encode(MINE), encode(tensor())]
    assert (near.state, near.theirs, near.peer_pid) == (OPENING, None, None)

    far = Connection(receiver_hello(), "the sender", MINE)
    assert (far.state, far.theirs, far.peer_pid, far.mismatch) == (OPENING, MINE, 42, None)
    far.admit(9)
    answer = receiver_hello(first=9)
    assert (far.state, far.hello, far.next_message) == (OPEN, answer, 9)
    [record] = far.data_to_send()
    assert near.receive(record) == [answer]
    assert (near.state, near.theirs, near.peer_pid) == (OPEN, answer, 7)
    assert far.receive(records[1]) == [tensor()]


def test_an_end_that_is_not_admitted_gets_a_hello_with_the_version_and_the_reason() -> None:
    far = Connection(THEIRS, "the sender", MINE)
    far.refuse("max_senders=1")
    [record] = far.data_to_send()
    refused = [replace(THEIRS, is_admitted=False), Close("max_senders=1", is_refusal=True)]
    assert decode(record) == refused
    assert receive(far, tensor()) == []

    near = Connection(MINE, "the receiver")
    assert near.receive(record) == refused
    loss = near.closed(Close("max_senders=1", is_refusal=True))
    assert isinstance(loss.error, RefusedError)
    assert str(loss.error) == "the receiver (pid 7) refused this sender: max_senders=1"


def test_refusing_an_admitted_end_sends_the_pending_answers_and_no_hello() -> None:
    connection = opened(tensor(last=True))
    connection.taken(FIRST)
    connection.refuse("no memory", is_refusal=False)
    assert frames_of(connection) == [Taken((FIRST,)), Close("no memory")]


def test_each_end_refuses_another_version_and_names_both_versions() -> None:
    remedy = "install the same version of aiotensor on both sides"
    near = Connection(MINE, "the receiver")
    with pytest.raises(RefusedError) as caught:
        receive(near, replace(THEIRS, version=VERSION + 1), Close("it closed too"))
    assert str(caught.value) == (
        f"the receiver (pid 7) refused this sender: the receiver has protocol version {VERSION + 1}, and "
        f"the sender has version {VERSION}: {remedy}"
    )
    assert (caught.value.pid, near.state) == (7, CLOSED)
    assert Connection(THEIRS, "the sender", replace(MINE, version=VERSION - 1)).mismatch == (
        f"the sender has protocol version {VERSION - 1}, and the receiver has version {VERSION}: {remedy}"
    )


ENDS: dict[str, tuple[Callable[[Connection], Loss], type[Exception], bool, str]] = {
    "closed": (lambda at: at.closed(Close()), PeerLostError, True, "lost: it closed the connection"),
    "closed with a reason": (lambda at: at.closed(Close("why")), PeerLostError, False, "connection: why"),
    "replaced": (lambda at: at.closed(Close("why", retry=True)), PeerLostError, True, "connection: why"),
    "refused": (lambda at: at.closed(Close("why", is_refusal=True)), RefusedError, False, "sender: why"),
    "violated": (lambda at: at.violated(ProtocolError("why")), PeerLostError, False, "the protocol: why"),
    "lost": (lambda at: at.lost("why", is_retried=True), PeerLostError, True, "was lost: why"),
    "rejected": (lambda at: at.rejected("why", is_refusal=False), PeerLostError, False, "cannot use the re"),
    "refused by this end": (
        lambda at: at.rejected("why", is_refusal=True),
        RefusedError,
        False,
        "the sender cannot use the receiver",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("end", "error", "is_retried", "text"), ENDS.values(), ids=ENDS)
def test_the_way_in_which_a_connection_ends_decides_the_error_and_the_retry(
    end: Callable[[Connection], Loss], error: type[Exception], is_retried: bool, text: str
) -> None:
    for connection, name, pid in (
        (Connection(MINE, "the receiver"), "the receiver", None),
        (opened(), "the receiver (pid 7)", 7),
    ):
        loss = end(connection)
        assert connection.is_closed
        assert (type(loss.error), loss.error.pid, loss.is_retried) == (error, pid, is_retried)
        assert text in str(loss.error)
        assert name in str(loss.error)
        assert loss.is_clean == (end is ENDS["closed"][0])


def test_commands_before_a_close_are_sent_and_nothing_follows_it() -> None:
    connection = opened(tensor(last=True), tensor(of=6, last=True))
    connection.put(tensor())
    connection.taken(FIRST)
    connection.release(7)
    connection.close(Close(uses_memory=False))
    connection.end(FIRST)
    connection.begin()
    connection.publish(8, encode(publish(8)))
    connection.discard(FIRST)
    connection.detach(0)
    connection.taken(6)
    connection.release(8)
    connection.refuse("too late")
    assert frames_of(connection) == [tensor(), Taken((FIRST,)), Release((7,)), Close(uses_memory=False)]
    assert frames_of(connection) == []


def test_frames_before_a_close_count_and_those_behind_it_do_not() -> None:
    ending = encode(tensor(), Close(), tensor(of=99), THEIRS)
    connection = opened()
    assert connection.receive(memoryview(b"x" + ending + b"y")[1:-1]) == [tensor(), Close()]
    assert connection.receive(ending) == connection.receive(b"nonsense") == []
    unadmitted = Connection(MINE, "the receiver")
    assert receive(unadmitted, Close("replaced", retry=True)) == [Close("replaced", retry=True)]
    assert unadmitted.is_closed


# Messages


@on_both_sides
def test_numbers_of_messages_continue_after_a_loss_and_ends_state_the_count(connects: bool) -> None:
    connection = opened(connects=connects)
    assert connection.begin() == FIRST
    connection.put(tensor(of=7))  # 6 has failed before its first tensor
    connection.put(tensor(0))
    connection.put(tensor(1))
    connection.end(FIRST)
    connection.put(tensor(1, of=7, last=True))
    connection.end(9)  # a new message is whole without a tensor
    connection.publish(10, encode(publish(10)))
    sent = frames_of(connection)
    assert [frame for frame in sent if isinstance(frame, End)] == [End(FIRST, 2), End(9, 0)]
    receive(connection, Taken((FIRST, 7, 9, 10)))  # all of them are whole
    connection.lost("its process was killed", is_retried=True)
    assert connection.next_message == 11


@on_both_sides
def test_publishers_skip_numbers_and_others_do_not(connects: bool) -> None:
    theirs = replace(THEIRS, role="publisher")
    connection = opened(tensor(of=7, last=True), publish(9), connects=connects, theirs=theirs)
    assert (connection.in_flight, connection.messages) == (2, 10)
    with pytest.raises(ProtocolError, match="message 8, but the next one is 10"):
        receive(connection, tensor(of=8, last=True))
    for frame in (tensor(of=6), Begin(6), End(6, 0), publish(6)):
        with pytest.raises(ProtocolError, match="message 6, but the next one is 5"):
            receive(opened(connects=connects), frame)


@on_both_sides
@pytest.mark.parametrize("end", ["taken", "discarded", "Discard"])
def test_a_message_is_answered_once_and_makes_room_for_another_one(end: str, connects: bool) -> None:
    connection = opened(tensor(last=True), End(6, 0), connects=connects)
    assert connection.in_flight == 2
    for _ in range(2):
        match end:
            case "taken":
                connection.taken(FIRST)
            case "discarded":
                connection.discarded(FIRST)
            case "Discard":
                receive(connection, Discard(FIRST))
    for done in (connection.taken, connection.discarded):
        done(FIRST)
        done(99)  # it has not arrived
    connection.release(7)
    connection.release(7)  # once for each tensor in it
    answers: dict[str, list[Frame]] = {"taken": [Taken((FIRST,))], "discarded": [Discarded((FIRST,))]}
    assert frames_of(connection) == [*answers.get(end, []), Release((7, 7))]
    assert connection.in_flight == 1
    receive(connection, Begin(7))
    assert connection.in_flight == 2


# The frames that an end may send about a message, by the state of the message at the other end.
VALID: dict[str, list[Frame]] = {
    "next": [tensor(), tensor(last=True), Begin(FIRST), End(FIRST, 0), publish(FIRST)],
    "of an earlier connection": [],
    "begun without a tensor": [tensor(), tensor(last=True), End(FIRST, 0), Discard(FIRST)],
    "begun": [tensor(1), tensor(1, last=True), End(FIRST, 1), Discard(FIRST)],
    "whole": [Discard(FIRST)],
    "empty": [Discard(FIRST)],
    "published": [Discard(FIRST)],
}
# An end may continue a message that the other one has ended in the meantime.
CONTINUED: list[Frame] = [
    *(tensor(number, last=last) for number in (0, 1, 2) for last in (False, True)),
    *(End(FIRST, count) for count in (0, 1, 2, 2**60)),
    Discard(FIRST),
]


@pytest.mark.parametrize("state", [*VALID, "taken", "discarded", "Discard"])
def test_each_frame_is_valid_in_some_states_of_its_message_only(state: str) -> None:
    before: dict[str, list[Frame]] = {
        "next": [],
        "begun without a tensor": [Begin(FIRST)],
        "begun": [tensor()],
        "empty": [End(FIRST, 0)],
        "published": [publish(FIRST)],
        "Discard": [tensor(), Discard(FIRST)],
    }
    valid = VALID.get(state, CONTINUED)
    for frame in [*CONTINUED, Begin(FIRST), publish(FIRST)]:
        if state == "of an earlier connection":
            connection = Connection(MINE, "the receiver", replace(THEIRS, first=FIRST + 1))
            connection.admit()
        else:
            connection = opened(*before.get(state, [tensor(), End(FIRST, 1)]))
        if state == "taken":
            connection.taken(FIRST)
        if state == "discarded":
            connection.discarded(FIRST)
        if frame in valid:
            assert receive(connection, frame) == [frame]
            assert connection.state is OPEN
        else:
            with pytest.raises(ProtocolError):
                receive(connection, frame)
            assert connection.is_closed


# Publications


def test_publications_and_frames_are_sent_in_the_order_of_the_commands() -> None:
    connection = opened()
    connection.discard(1)
    connection.publish(7, encode(publish(7)))
    connection.detach(4)
    connection.publish(9, encode(publish(9)))
    connection.discard(7)
    assert frames_of(connection) == [Discard(1), publish(7), Detach(4), publish(9), Discard(7)]
    assert receive(connection, Taken((7, 9))) == [Taken((7, 9))]
    assert connection.next_message == 10


def test_a_withdrawn_publication_is_confirmed_unless_it_was_taken() -> None:
    connection = opened(publish(FIRST), publish(6))
    connection.taken(FIRST)
    receive(connection, Discard(FIRST), Discard(6))
    assert connection.in_flight == 0
    connection.discarded(6, confirms=True)
    assert frames_of(connection) == [Taken((FIRST,)), Discarded((6,))]


# Requests


def question(number: int = FIRST) -> Message:
    """Announce a message that asks for an answer."""
    return publish(number, asks=True)


def asking(*received: Frame, connects: bool = True) -> Connection:
    """Return an open end that has asked for two answers, after some records of the other end."""
    connection = opened(connects=connects)
    assert decode(connection.post(question())[0]) == [question()]
    connection.post(question(6))
    for one in received:
        receive(connection, one)
    return connection


@on_both_sides
def test_a_message_that_asks_gets_one_answer_which_needs_no_permit(connects: bool) -> None:
    answers = [publish(5, answers=6), publish(6, answers=FIRST, placement=ARENA, block=3)]
    connection = asking(Taken((FIRST, 6)), *answers, connects=connects)
    assert connection.in_flight == 0
    assert receive(connection, publish(7), publish(8)) == [publish(7), publish(8)]  # within its limit of 2
    far = opened(question(), connects=connects)
    assert decode(far.post(publish(FIRST, answers=FIRST))[0]) == [publish(FIRST, answers=FIRST)]
    with pytest.raises(ProtocolError, match="answered message 5, which asks for no answer"):
        receive(far, publish(6, answers=FIRST))


@pytest.mark.parametrize(
    "end", [publish(FIRST, answers=FIRST), Failure(FIRST, "ValueError", "no"), Discarded((FIRST,))]
)
def test_a_message_with_an_answer_gets_no_other(end: Frame) -> None:
    connection = asking(end, Failure(FIRST, "ValueError", "a message may be refused after its answer"))
    with pytest.raises(ProtocolError, match="answered message 5, which asks for no answer, or has one"):
        receive(connection, publish(6 if isinstance(end, Message) else FIRST, answers=FIRST))


def test_an_answer_to_a_message_that_this_end_has_withdrawn_is_valid() -> None:
    for end in (publish(FIRST, answers=FIRST), Failure(FIRST, "ValueError", "no"), Discarded((FIRST,))):
        connection = asking()
        connection.discard(FIRST)
        assert receive(connection, end) == [end]
        assert connection.state is OPEN


# Records and segments


@settings(max_examples=40)
@given(
    sizes=st.lists(st.sampled_from([0, 3, 2048, 6 * 1024, MAX_INLINE_BYTES]), max_size=100),
    is_traced=st.booleans(),
    answers=st.sampled_from([0, 1, MAX_NUMBERS, MAX_NUMBERS + 1, 40 * MAX_NUMBERS]),
)
def test_records_stay_within_every_limit_and_keep_the_order_of_frames(
    sizes: list[int], is_traced: bool, answers: int
) -> None:
    connection = opened()
    trace = LONGEST_TRACE if is_traced else None
    puts = [
        replace(tensor(of=FIRST + number, nbytes=nbytes, last=True), trace=trace)
        for number, nbytes in enumerate(sizes)
    ]
    blocks = [MAX_NUMBER - block for block in range(answers)]
    records: list[bytes] = []
    for frame in puts:
        connection.put(frame)
        if connection.records:
            records += connection.data_to_send()
    for block in blocks:
        connection.release(block)
    records += connection.data_to_send()
    assert not connection.records
    assert connection.data_to_send() == []
    assert all(len(record) <= MAX_RECORD_BYTES for record in records)
    found = [frame for record in records for frame in decode(record)]  # at most MAX_FRAMES in each
    assert found[: len(puts)] == puts
    released = [frame for frame in found[len(puts) :] if isinstance(frame, Release)]
    assert [block for frame in released for block in frame.blocks] == blocks


@on_both_sides
def test_segments_count_until_they_are_detached(connects: bool) -> None:
    largest = dict.fromkeys(range(MAX_SEGMENTS), LARGEST_SEGMENT)
    connection = opened(*(Attach(number, ARENA, LARGEST_SEGMENT) for number in largest), connects=connects)
    assert connection.segments == largest
    for number in range(50):
        receive(connection, Detach(number), Attach(number + MAX_SEGMENTS, ARENA, 1))
    assert connection.state is OPEN


# Violations. The last record breaks the protocol.

SEGMENTS = [Attach(number, ARENA, 1) for number in range(MAX_SEGMENTS + 1)]
THOUSAND = [
    encode(*map(tensor, range(start, start + MAX_FRAMES))) for start in range(0, MAX_TENSORS, MAX_FRAMES)
]
VIOLATIONS: dict[str, tuple[str, Sequence[Frame | bytes]]] = {
    "not a record": ("a frame that cannot be decoded", [b"\xff\x00nonsense"]),
    "an empty record": ("a frame that cannot be decoded", [b""]),
    "a record that is too long": (f"more than {MAX_RECORD_BYTES} bytes", [record_of(MAX_RECORD_BYTES + 1)]),
    "a second hello": ("a second hello", [THEIRS]),
    "a second hello of another version": ("a second hello", [replace(THEIRS, version=VERSION + 1)]),
    "a violation after valid frames": ("tensor 2 of message 5", [encode(tensor(), tensor(2))]),
    "a message of an earlier connection": ("of message 4, but the next one is 6", [tensor(), tensor(of=4)]),
    "beginning a message twice": ("began message 5 again", [Begin(5), Begin(5)]),
    "beginning a message that has ended": ("began message 5 again", [Begin(5), Discard(5), Begin(5)]),
    "publishing twice": ("began message 5 again", [publish(5), publish(5)]),
    "publishing an earlier number": ("began message 5 again", [publish(5), publish(6), publish(5)]),
    "publishing a begun message": ("began message 5 again", [tensor(), publish(5)]),
    "a tensor ahead": ("tensor 1 of message 5 out of order", [tensor(1)]),
    "a tensor twice": ("tensor 0 of message 5 out of order", [tensor(), tensor()]),
    "a tensor after the last": ("tensor 1 of message 5 out of order", [tensor(last=True), tensor(1)]),
    "a tensor of a publication": ("tensor 0 of message 5 out of order", [publish(5), tensor()]),
    "too many tensors": (f"tensor {MAX_TENSORS} of message 5 out of", [*THOUSAND, tensor(MAX_TENSORS)]),
    "a wrong count": ("ended message 5 with a wrong count", [tensor(), End(5, 2)]),
    "a count of tensors that did not come": ("ended message 5 with a wrong count", [End(5, 1)]),
    "a second end": ("ended message 5 with a wrong count", [tensor(last=True), End(5, 1)]),
    "withdrawing no message": ("message 5, but the next one is 5", [Discard(5)]),
    "too many messages": ("its limit of 2 messages", [tensor(of=number) for number in (5, 6, 7)]),
    "beginning too many messages": ("its limit of 2 messages", [Begin(5), Begin(6), Begin(7)]),
    "too many empty messages": ("its limit of 2 messages", [End(5, 0), End(6, 0), End(7, 0)]),
    "too many publications": ("its limit of 2 messages", [publish(5), publish(6), publish(7)]),
    "a publication in no memory": ("unknown placement 'disk' for message 5", [publish(5, placement="disk")]),
    "a publication without a block": ("unknown placement 'arena'", [publish(5, placement=ARENA)]),
    "a publication with a block": ("unknown placement 'inline'", [publish(5, block=1)]),
    "answering an earlier message": ("answered message 4, which was never sent", [Taken((4,))]),
    "answering a later message": ("answered message 8, which was never", [Discarded((6, 8))]),
    "an answer to a message that asks nothing": ("message 7, which asks", [publish(5, answers=7)]),
    "an answer in a block to none": (
        "message 6, which asks",
        [publish(5, answers=6, placement=ARENA, block=1)],
    ),
    "refusing a message of no one": ("refused message 8, which was never", [Failure(8, "ValueError", "no")]),
    "taking a message that is not whole": ("took message 5, which was not whole", [Taken((5,))]),
    "a segment in no memory": ("memory for the unknown placement 'inline'", [Attach(0, INLINE, 1)]),
    "a segment twice": ("attached segment 0 twice", [Attach(0, ARENA, 1), Attach(0, ARENA, 1)]),
    "too many segments": (f"more than {MAX_SEGMENTS} segments", SEGMENTS),
    "a segment that is too large": ("bytes, more than the", [Attach(0, ARENA, LARGEST_SEGMENT + 1)]),
    "detaching no segment": ("detached segment 0, which it never", [Detach(0)]),
    "detaching a segment twice": ("detached segment 0", [Attach(0, ARENA, 1), Detach(0), Detach(0)]),
}  # fmt: skip


@pytest.mark.promise(24, 26)
@on_both_sides
@pytest.mark.parametrize(("reason", "records"), VIOLATIONS.values(), ids=VIOLATIONS)
def test_a_violation_closes_the_connection(
    reason: str, records: Sequence[Frame | bytes], connects: bool
) -> None:
    *before, last = records
    connection = opened(*before, connects=connects)
    connection.put(tensor())
    connection.put(tensor(of=6, last=True))
    connection.begin()
    connection.data_to_send()
    with pytest.raises(ProtocolError, match=reason):
        receive(connection, last)
    connection.discarded(FIRST)
    connection.release(0)
    assert connection.is_closed
    assert frames_of(connection) == []
    assert receive(connection, tensor(of=20)) == []


@pytest.mark.promise(24)
def test_a_frame_before_the_admission_is_a_violation() -> None:
    frames: list[Frame] = [
        *(tensor(), Begin(5), End(5, 0), publish(5), Discard(5), Taken((5,)), Discarded(()), Release((0,))),
        *(Attach(0, ARENA, 1), Detach(0), Failure(5, "ValueError", "no")),
    ]
    for frame in frames:
        accepting = Connection(MINE, "the receiver", THEIRS)
        connecting, unadmitted = Connection(MINE, "the receiver"), Connection(MINE, "the receiver")
        receive(unadmitted, replace(THEIRS, is_admitted=False))
        for connection in (accepting, connecting, unadmitted):
            with pytest.raises(ProtocolError, match="a frame before its hello"):
                receive(connection, frame)
            assert connection.is_closed
