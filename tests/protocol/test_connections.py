"""The connection between a sender and a receiver without sockets: its states, limits and violations."""

import tracemalloc
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from aiotensor.errors import PeerLostError, ProtocolError, RefusedError
from aiotensor.protocol.connection import Close, Connection, ConnectionState, Loss
from aiotensor.protocol.frames import (
    FROM_SENDER,
    LEAST_FRAME_BYTES,
    MAX_FRAMES,
    MAX_NUMBERS,
    MAX_RECORD_BYTES,
    MAX_TENSORS,
    TO_SENDER,
    VERSION,
    Attach,
    Begin,
    Discard,
    Discarded,
    End,
    FromSender,
    Put,
    Release,
    Taken,
    ToSender,
    Welcome,
    decode,
    encode,
)
from aiotensor.protocol.receiver import ReceiverConnection
from aiotensor.protocol.segments import MAX_SEGMENTS
from aiotensor.protocol.sender import SenderConnection
from aiotensor.tensors.inline import MAX_INLINE_BYTES
from aiotensor.types import MAX_NUMBER
from tests.frames import LONGEST_TRACE, frames_of, hello, put

OPENING, OPEN, CLOSED = ConnectionState

FIRST = 5  # the number of the first message
SEGMENT_BYTES = 1 << 20


def welcome(
    max_frame_bytes: int = MAX_RECORD_BYTES, version: int = VERSION, *, admits: bool = True
) -> Welcome:
    return Welcome(version, 43, max_frame_bytes, "r", is_admitted=admits)


def new_sender(*received: ToSender) -> SenderConnection:
    """Return a sender's end after its hello, and after some frames of the receiver."""
    sender = SenderConnection(hello(first_message=FIRST))
    sender.data_to_send()
    for frame in received:
        sender.receive(encode(frame))
    return sender


def new_receiver(
    *received: FromSender, limit: int = 2, max_frame_bytes: int = MAX_RECORD_BYTES
) -> ReceiverConnection:
    """Return a receiver's end that has admitted the sender, after some frames of the sender."""
    receiver = ReceiverConnection(
        hello(max_concurrent_videos=limit, first_message=FIRST), welcome(max_frame_bytes), SEGMENT_BYTES
    )
    receiver.admit()
    receiver.data_to_send()
    for frame in received:
        receiver.receive(encode(frame))
    return receiver


def answers_of(receiver: ReceiverConnection) -> list[ToSender]:
    return [frame for record in receiver.data_to_send() for frame in decode(TO_SENDER, record)]


def message(tensor: int = 0, *, number: int = FIRST, last: bool = False, nbytes: int = 3) -> Put:
    """Announce a tensor of a message."""
    return put(message=number, tensor=tensor, shape=(nbytes,), payload=bytes(nbytes), last=last)


# Opening and closing


def test_the_hello_is_alone_in_the_first_record_and_the_welcome_admits_the_sender() -> None:
    sender = SenderConnection(hello(first_message=FIRST))
    sender.put(message())  # messages may be announced before the welcome
    assert list(sender.data_to_send()) == [encode(hello(first_message=FIRST)), encode(message())]
    assert (sender.state, sender.receiver_id, sender.peer_pid) == (OPENING, None, None)

    receiver = ReceiverConnection(hello(), welcome(), SEGMENT_BYTES)
    assert (receiver.state, receiver.peer_pid, receiver.mismatch) == (OPENING, 42, None)
    receiver.admit()
    assert receiver.state is OPEN
    [record] = receiver.data_to_send()
    assert sender.receive(record) == [welcome()]
    assert (sender.state, sender.receiver_id, sender.peer_pid) == (OPEN, "r", 43)


def test_a_sender_that_is_not_admitted_gets_the_version_and_the_reason() -> None:
    receiver = ReceiverConnection(hello(), welcome(), SEGMENT_BYTES)
    receiver.refuse("max_senders=1")
    refused = [welcome(admits=False), Close("max_senders=1", is_refusal=True)]
    [record] = receiver.data_to_send()
    assert decode(TO_SENDER, record) == refused
    assert receiver.receive(encode(message())) == []

    sender = new_sender()
    assert sender.receive(record) == refused
    loss = sender.closed(Close("max_senders=1", is_refusal=True))
    assert isinstance(loss.error, RefusedError)
    assert str(loss.error) == "the receiver (pid 43) refused this sender: max_senders=1"
    assert sender.receiver_id == "r"


def test_refusing_an_admitted_sender_sends_pending_answers_and_no_welcome() -> None:
    receiver = new_receiver(message(last=True))
    receiver.taken(FIRST)
    receiver.refuse("its memory cannot be mapped")
    assert answers_of(receiver) == [Taken((FIRST,)), Close("its memory cannot be mapped", is_refusal=True)]


def test_each_side_refuses_another_version_and_names_both_versions() -> None:
    remedy = "install the same version of aiotensor on both sides"
    with pytest.raises(RefusedError) as caught:
        new_sender().receive(encode(welcome(version=VERSION + 1), Close("it closed too")))
    assert str(caught.value) == (
        f"the receiver (pid 43) refused this sender: the receiver has protocol version {VERSION + 1}, and "
        f"the sender has version {VERSION}: {remedy}"
    )
    assert caught.value.pid == 43
    receiver = ReceiverConnection(hello(version=VERSION - 1), welcome(), SEGMENT_BYTES)
    assert receiver.mismatch == (
        f"the sender has protocol version {VERSION - 1}, and the receiver has version {VERSION}: {remedy}"
    )


@pytest.mark.parametrize(
    ("end", "error", "is_retried", "text"),
    [
        (lambda at: at.closed(Close()), PeerLostError, True, "was lost: it closed the connection"),
        (lambda at: at.closed(Close("why")), PeerLostError, False, "was lost: it closed the connection: why"),
        (
            lambda at: at.closed(Close("why", retry=True)),
            PeerLostError,
            True,
            "it closed the connection: why",
        ),
        (
            lambda at: at.closed(Close("why", is_refusal=True)),
            RefusedError,
            False,
            "refused this sender: why",
        ),
        (lambda at: at.violated(ProtocolError("why")), PeerLostError, False, "it broke the protocol: why"),
        (lambda at: at.lost("why", is_retried=True), PeerLostError, True, "was lost: why"),
        (lambda at: at.refused("why"), RefusedError, False, "refused this sender: why"),
    ],
    ids=["closed", "rejected", "replaced", "refused", "violated", "lost", "refused by this side"],
)
def test_the_way_in_which_a_connection_ends_decides_the_error_and_the_retry(
    end: Callable[[Connection], Loss], error: type[Exception], is_retried: bool, text: str
) -> None:
    for connection, name, pid in (
        (new_sender(), "the receiver", None),
        (new_sender(welcome()), "the receiver (pid 43)", 43),
    ):
        loss = end(connection)
        assert connection.is_closed
        assert type(loss.error) is error
        assert (loss.error.pid, loss.is_retried) == (pid, is_retried)
        assert text in str(loss.error)
        assert name in str(loss.error)


@pytest.mark.promise(29)
def test_the_cause_of_a_violation_keeps_no_record_alive() -> None:
    connection = new_sender()
    with pytest.raises(ProtocolError) as caught:
        connection.receive(b"nonsense")
    cause = connection.violated(caught.value).error.__cause__
    assert isinstance(cause, ProtocolError)
    assert cause.args == caught.value.args
    assert cause.__traceback__ is None


def test_frames_up_to_the_last_one_count_and_nothing_follows_it() -> None:
    sender = new_sender(welcome())
    sender.put(message())
    sender.close(Close(uses_memory=False))
    sender.end(FIRST)
    sender.discard(FIRST)
    sender.close(Close())
    assert frames_of(sender) == [message(), Close(uses_memory=False)]
    sender.put(message(number=FIRST + 1))
    assert frames_of(sender) == []
    assert sender.receive(encode(Taken((0,)))) == sender.receive(b"nonsense") == []

    receiver = new_receiver(message(last=True), message(number=FIRST + 1, last=True))
    receiver.taken(FIRST)
    receiver.release(7)
    receiver.close(Close())
    receiver.taken(FIRST + 1)
    receiver.release(8)
    receiver.refuse("too late")
    assert answers_of(receiver) == [Taken((FIRST,)), Release((7,)), Close()]
    assert answers_of(receiver) == []

    ending = encode(message(), Close(), message(number=99))
    receiver = new_receiver()
    assert receiver.receive(memoryview(b"x" + ending + b"y")[1:-1]) == [message(), Close()]
    assert receiver.receive(ending) == receiver.receive(b"nonsense") == []


# Messages


def test_numbers_of_messages_continue_after_a_loss_and_ends_state_the_count() -> None:
    sender = new_sender(welcome())
    assert sender.begin() == FIRST
    sender.put(message(number=FIRST + 1))
    sender.put(message(0))
    sender.put(message(1))
    sender.end(FIRST)
    sender.put(message(1, number=FIRST + 1, last=True))
    assert [frame for frame in frames_of(sender) if isinstance(frame, End)] == [End(FIRST, 2)]
    sender.lost("its process was killed", is_retried=True)
    assert sender.next_message == FIRST + 2


@pytest.mark.parametrize("end", ["taken", "discarded", "Discard"])
def test_a_message_is_answered_once_and_makes_room_for_another_one(end: str) -> None:
    receiver = new_receiver(message(last=True), message(number=FIRST + 1), message(1, number=FIRST + 1))
    assert receiver.in_flight == 2
    for _ in range(2):
        match end:
            case "taken":
                receiver.taken(FIRST)
            case "discarded":
                receiver.discard(FIRST)
            case "Discard":
                receiver.receive(encode(Discard(FIRST)))
    for done in (receiver.taken, receiver.discard):
        done(FIRST)
        done(99)  # it has not arrived
    receiver.release(7)
    receiver.release(7)  # once for each tensor in it
    answers: dict[str, list[ToSender]] = {"taken": [Taken((FIRST,))], "discarded": [Discarded((FIRST,))]}
    assert answers_of(receiver) == [*answers.get(end, []), Release((7, 7))]
    assert receiver.in_flight == 1
    receiver.receive(encode(Begin(FIRST + 2)))
    assert receiver.in_flight == 2


# The frames that a sender may send about a message, by the state of the message at the receiver.
VALID: dict[str, list[FromSender]] = {
    "next": [message(), message(last=True), Begin(FIRST)],
    "of an earlier connection": [],
    "begun without a tensor": [message(), message(last=True), End(FIRST, 0), Discard(FIRST)],
    "begun": [message(1), message(1, last=True), End(FIRST, 1), Discard(FIRST)],
    "whole": [Discard(FIRST)],
}
ANY: list[FromSender] = [
    *(message(tensor, last=last) for tensor in (0, 1, 2) for last in (False, True)),
    *(End(FIRST, count) for count in (0, 1, 2, 2**60)),
    Discard(FIRST),
]


@pytest.mark.parametrize("state", [*VALID, "taken", "discarded", "Discard"])
def test_each_frame_is_valid_in_some_states_of_its_message_only(state: str) -> None:
    def in_state() -> ReceiverConnection:
        match state:
            case "next":
                return new_receiver()
            case "of an earlier connection":
                return ReceiverConnection(hello(first_message=FIRST + 1), welcome(), SEGMENT_BYTES)
            case "begun without a tensor":
                return new_receiver(Begin(FIRST))
            case "begun":
                return new_receiver(message())
            case "whole" | "taken" | "discarded":
                receiver = new_receiver(message(), End(FIRST, 1))
                if state != "whole":
                    {"taken": receiver.taken, "discarded": receiver.discard}[state](FIRST)
                return receiver
        return new_receiver(message(), Discard(FIRST))

    # A sender may continue a message that this side has ended in the meantime.
    valid = VALID.get(state, ANY)
    for frame in [*ANY, Begin(FIRST)]:
        receiver = in_state()
        if frame in valid:
            assert receiver.receive(encode(frame)) == [frame]
            assert receiver.state is OPEN
        else:
            with pytest.raises(ProtocolError):
                receiver.receive(encode(frame))
            assert receiver.is_closed


def test_answers_to_messages_that_the_sender_has_ended_have_no_effect() -> None:
    answers: list[ToSender] = [Taken((FIRST,)), Discarded((FIRST,))]
    for answer in answers:
        for end in (None, *answers):
            sender = new_sender(welcome())
            sender.put(message(last=True))
            if end is None:
                sender.discard(FIRST)
            else:
                sender.receive(encode(end))
            assert sender.receive(encode(answer)) == [answer]
            assert sender.state is OPEN


# Records


@settings(max_examples=40)
@given(
    limit=st.none() | st.sampled_from([LEAST_FRAME_BYTES, 20_000, MAX_RECORD_BYTES, MAX_NUMBER]),
    sizes=st.lists(st.sampled_from([0, 3, 2048, 6 * 1024, MAX_INLINE_BYTES]), max_size=100),
    is_traced=st.booleans(),
    answers=st.sampled_from([0, 1, MAX_NUMBERS, MAX_NUMBERS + 1, 40 * MAX_NUMBERS]),
)
def test_records_stay_within_every_limit_and_keep_the_order_of_frames(
    limit: int | None, sizes: list[int], is_traced: bool, answers: int
) -> None:
    sender = new_sender(*([] if limit is None else [welcome(limit)]))
    trace = LONGEST_TRACE if is_traced else None
    puts = [
        replace(message(number=FIRST + number, nbytes=nbytes, last=True), trace=trace)
        for number, nbytes in enumerate(sizes)
    ]
    records: list[bytes] = []
    for frame in puts:
        sender.put(frame)
        if sender.has_full_record:
            records += sender.full_records()
    assert not sender.has_full_record
    records += sender.data_to_send()
    assert list(sender.data_to_send()) == []
    found = [decode(FROM_SENDER, record) for record in records]
    assert [frame for each in found for frame in each] == puts
    longest = LEAST_FRAME_BYTES if limit is None else min(limit, MAX_RECORD_BYTES)
    assert all(len(record) <= longest for record in records)
    assert all(len(each) <= MAX_FRAMES for each in found)

    receiver = new_receiver()
    for block in range(answers):
        receiver.release(MAX_NUMBER - block)
    records = list(receiver.data_to_send())
    assert all(len(record) <= MAX_RECORD_BYTES for record in records)
    released = [
        frame.blocks
        for record in records
        for frame in decode(TO_SENDER, record)
        if isinstance(frame, Release)
    ]
    assert [block for blocks in released for block in blocks] == [
        MAX_NUMBER - block for block in range(answers)
    ]


def test_a_segment_is_shared_by_a_record_of_its_own_and_counted_by_its_size() -> None:
    sender = new_sender(welcome())
    sender.put(message())
    record = sender.attach(3, "arena", SEGMENT_BYTES - 4096)
    assert decode(FROM_SENDER, record) == [Attach(3, "arena", SEGMENT_BYTES - 4096)]
    assert frames_of(sender) == [message()]
    receiver = new_receiver(Attach(3, "arena", SEGMENT_BYTES - 4096), Attach(0, "arena", 4096))
    assert receiver.segments == {3: SEGMENT_BYTES - 4096, 0: 4096}


def record_of(nbytes: int) -> bytes:
    """Return a record of this size with one frame."""
    overhead = len(encode(message(nbytes=nbytes - 100))) - (nbytes - 100)
    record = encode(message(nbytes=nbytes - overhead))
    assert len(record) == nbytes
    return record


# Violations. The last record breaks the protocol.

NUMBERS = range(MAX_SEGMENTS + 1)
OF_SENDERS: dict[str, tuple[str, Sequence[FromSender | bytes]]] = {
    "not a record": ("a frame that cannot be decoded", [b"\xff\x00nonsense"]),
    "a record that is too long": (f"more than {MAX_RECORD_BYTES} bytes", [record_of(MAX_RECORD_BYTES + 1)]),
    "a second hello": ("cannot be decoded", [encode(hello())]),
    "a frame of a receiver": ("cannot be decoded", [encode(Taken((0,)))]),
    "a message ahead": ("message 6 while the next one is 5", [message(number=6)]),
    "a message of an earlier connection": ("message 4 while the next", [message(), message(number=4)]),
    "beginning a message ahead": ("it began message 6 out of order", [Begin(6)]),
    "beginning a message twice": ("it began message 5 out of order", [Begin(5), Begin(5)]),
    "a tensor ahead": ("tensor 1 of message 5 out of order", [message(1)]),
    "a tensor twice": ("tensor 0 of message 5 out of order", [message(), message()]),
    "a tensor after the last": ("tensor 1 of message 5 out of order", [message(last=True), message(1)]),
    "a wrong count": ("ended message 5 with a wrong count", [message(), End(5, 2)]),
    "a second end": ("ended message 5 with a wrong count", [message(last=True), End(5, 1)]),
    "the end of no message": ("message 5 while the next one is 5", [End(5, 0)]),
    "withdrawing no message": ("message 5 while the next one is 5", [Discard(5)]),
    "a violation after valid frames": ("tensor 2 of message 5", [encode(message(), message(2))]),
    "too many messages": ("its limit of 2 messages", [message(number=number) for number in (5, 6, 7)]),
    "beginning too many messages": ("its limit of 2 messages", [Begin(5), Begin(6), Begin(7)]),
    "too many tensors": (
        f"tensor {MAX_TENSORS} of message 5 out of order",
        [encode(*map(message, range(at, at + MAX_FRAMES))) for at in range(0, MAX_TENSORS, MAX_FRAMES)]
        + [message(MAX_TENSORS)],
    ),
    "an unknown placement": ("memory for the unknown placement 'inline'", [Attach(0, "inline", 1)]),
    "a segment twice": ("attached segment 0 twice", [Attach(0, "arena", 1), Attach(0, "arena", 1)]),
    "too many segments": (f"than {MAX_SEGMENTS} segments", [Attach(one, "arena", 1) for one in NUMBERS]),
    "a segment that is too large": (
        "attached 1 bytes, more than the 0 of",
        [Attach(0, "arena", SEGMENT_BYTES), Attach(1, "arena", 1)],
    ),
}  # fmt: skip


@pytest.mark.promise(24, 26)
@pytest.mark.parametrize(("reason", "records"), OF_SENDERS.values(), ids=OF_SENDERS)
def test_a_violation_of_a_sender_closes_the_connection(
    reason: str, records: Sequence[FromSender | bytes]
) -> None:
    receiver = new_receiver()
    *before, last = [one if isinstance(one, bytes) else encode(one) for one in records]
    for record in before:
        receiver.receive(record)
    with pytest.raises(ProtocolError, match=reason):
        receiver.receive(last)
    receiver.discard(FIRST)
    receiver.release(0)
    assert receiver.is_closed
    assert answers_of(receiver) == []
    assert receiver.receive(encode(message(number=6))) == []


OF_RECEIVERS: dict[str, tuple[str, Sequence[ToSender | bytes]]] = {
    "not a record": ("a frame that cannot be decoded", [welcome(), b""]),
    "a record that is too long": ("more than 65536 bytes", [welcome(), bytes(MAX_RECORD_BYTES + 1)]),
    "a second welcome": ("a second hello", [welcome(), welcome()]),
    "a second welcome that admits": ("a second hello", [welcome(admits=False), welcome()]),
    "an answer before the welcome": ("a frame before its hello", [Taken(())]),
    "memory before the welcome": ("a frame before its hello", [Release((0,))]),
    "an answer without admission": ("a frame before its hello", [welcome(admits=False), Discarded((5,))]),
    "an answer to an earlier message": ("answered message 4, which was never", [welcome(), Taken((4,))]),
    "an answer to a later message": ("answered message 8, which was", [welcome(), Discarded((6, 8))]),
    "taking a message that is not whole": ("message 5, which was not whole", [welcome(), Taken((5,))]),
}  # fmt: skip


@pytest.mark.promise(24)
@pytest.mark.parametrize(("reason", "records"), OF_RECEIVERS.values(), ids=OF_RECEIVERS)
def test_a_violation_of_a_receiver_closes_the_connection(
    reason: str, records: Sequence[ToSender | bytes]
) -> None:
    sender = new_sender()
    for frame in (message(), message(number=6, last=True), message(number=7)):
        sender.put(frame)
    *before, last = [one if isinstance(one, bytes) else encode(one) for one in records]
    for record in before:
        sender.receive(record)
    with pytest.raises(ProtocolError, match=reason):
        sender.receive(last)
    assert sender.is_closed
    assert sender.receive(encode(welcome())) == []


def test_a_frame_before_the_admission_is_a_violation() -> None:
    for frame in (message(), Begin(FIRST), End(FIRST, 1), Discard(FIRST), Attach(0, "arena", 1)):
        receiver = ReceiverConnection(hello(), welcome(), SEGMENT_BYTES)
        with pytest.raises(ProtocolError, match="before its hello"):
            receiver.receive(encode(frame))


def test_a_record_may_be_as_long_as_the_receiver_has_stated() -> None:
    receiver = new_receiver(max_frame_bytes=LEAST_FRAME_BYTES)
    assert len(receiver.receive(record_of(LEAST_FRAME_BYTES))) == 1
    with pytest.raises(ProtocolError, match=f"a record of more than {LEAST_FRAME_BYTES} bytes"):
        receiver.receive(record_of(LEAST_FRAME_BYTES + 1))


def test_a_wrong_count_is_refused_without_counting_to_it() -> None:
    receiver = new_receiver(message())
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            receiver.receive(encode(End(FIRST, 2**62)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
