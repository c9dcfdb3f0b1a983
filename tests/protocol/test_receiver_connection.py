import tracemalloc
from collections.abc import Sequence

import pytest

from aiotensor.errors import ProtocolError
from aiotensor.protocol.connection import Close, ConnectionState
from aiotensor.protocol.frames import (
    MAX_FRAMES,
    MAX_RECORD_BYTES,
    MAX_TENSORS,
    TO_SENDER,
    VERSION,
    Attach,
    Discard,
    Discarded,
    End,
    FromSender,
    Release,
    Taken,
    ToSender,
    Welcome,
    decode,
    encode,
)
from aiotensor.protocol.receiver import ReceiverConnection
from aiotensor.protocol.segments import MAX_SEGMENTS
from tests.frames import hello, put

OPENING, OPEN, CLOSED = ConnectionState

SEGMENT_BYTES = 1 << 20
WELCOME = Welcome(VERSION, 43, MAX_RECORD_BYTES, "r", is_admitted=True)
NOT_ADMITTED = Welcome(VERSION, 43, MAX_RECORD_BYTES, "r")


def new(**changes: object) -> ReceiverConnection:
    """Return a receiver's end that has a hello, and has not answered it."""
    return ReceiverConnection(hello(**changes), WELCOME, SEGMENT_BYTES)


def admitted(**changes: object) -> ReceiverConnection:
    receiver = new(**changes)
    receiver.admit()
    receiver.data_to_send()
    return receiver


def frames_of(receiver: ReceiverConnection) -> list[ToSender]:
    return [frame for record in receiver.data_to_send() for frame in decode(TO_SENDER, record)]


def receive(receiver: ReceiverConnection, *frames: FromSender) -> Sequence[FromSender]:
    return receiver.receive(encode(*frames))


def violation(receiver: ReceiverConnection, *frames: FromSender) -> str:
    """Receive frames, the last of which is a violation, and return the reason."""
    for frame in frames[:-1]:
        receive(receiver, frame)
    with pytest.raises(ProtocolError) as caught:
        receive(receiver, frames[-1])
    assert receiver.state is CLOSED
    return str(caught.value)


# The states of the connection


def test_a_sender_is_admitted_with_a_welcome() -> None:
    receiver = new()
    assert receiver.state is OPENING
    assert receiver.peer_pid == receiver.hello.pid
    receiver.admit()

    assert receiver.state is OPEN
    assert frames_of(receiver) == [WELCOME]


@pytest.mark.parametrize("frame", [put(), End(0, 1), Discard(0), Attach(0, "arena", 1)])
def test_a_frame_before_the_admission_is_a_violation(frame: FromSender) -> None:
    assert "before its hello" in violation(new(), frame)


@pytest.mark.parametrize("is_refusal", [True, False])
def test_a_sender_that_is_refused_gets_the_version_and_the_reason(is_refusal: bool) -> None:
    receiver = new()
    receiver.refuse("max_senders=1", is_refusal=is_refusal)

    assert receiver.state is CLOSED
    assert frames_of(receiver) == [NOT_ADMITTED, Close("max_senders=1", is_refusal)]
    assert receive(receiver, put()) == []


def test_refusing_an_admitted_sender_sends_pending_answers_and_no_welcome() -> None:
    receiver = admitted()
    receive(receiver, put(last=True))
    receiver.taken(0)
    receiver.refuse("its memory cannot be mapped")

    assert receiver.state is CLOSED
    assert frames_of(receiver) == [Taken((0,)), Close("its memory cannot be mapped", is_refusal=True)]


def test_the_version_of_the_sender_is_compared() -> None:
    assert new().mismatch is None
    assert f"the sender has protocol version {VERSION + 1}" in str(new(version=VERSION + 1).mismatch)


def test_either_side_may_close() -> None:
    receiver = admitted()
    assert receive(receiver, put(), Close()) == [put(), Close()]
    assert receiver.state is CLOSED

    receiver = admitted()
    receiver.close(Close("a newer connection replaced it"))
    assert receiver.state is CLOSED
    assert frames_of(receiver) == [Close("a newer connection replaced it")]


# The states of a message

NEXT, STALE = "next", "earlier connection"
MESSAGES = (NEXT, STALE, "begun", "whole by End", "whole by Put", "taken", "discarded", "Discard")
ENDED = ("taken", "discarded", "Discard")
NUMBER = 5


def with_message(state: str) -> ReceiverConnection:
    """Return a receiver's end with message 5 in a state; it has one tensor."""
    receiver = admitted(first_message=NUMBER + 1 if state == STALE else NUMBER)
    if state in (NEXT, STALE):
        return receiver
    receive(receiver, put(message=NUMBER, last=state in ("whole by Put", "taken")))
    match state:
        case "whole by End":
            receive(receiver, End(NUMBER, 1))
        case "taken":
            receiver.taken(NUMBER)
        case "discarded":
            receiver.discard(NUMBER)
        case "Discard":
            receive(receiver, Discard(NUMBER))
    return receiver


# The frames that a sender may send about a message, by the state of the message at the receiver.
VALID: dict[str, set[FromSender]] = {
    NEXT: {put(message=NUMBER), put(message=NUMBER, last=True)},
    "begun": {
        put(message=NUMBER, tensor=1),
        put(message=NUMBER, tensor=1, last=True),
        End(NUMBER, 1),
        Discard(NUMBER),
    },
    "whole by End": {Discard(NUMBER)},
    "whole by Put": {Discard(NUMBER)},
}
FRAMES: tuple[FromSender, ...] = (
    *(put(message=NUMBER, tensor=tensor, last=last) for tensor in (0, 1, 2) for last in (False, True)),
    *(End(NUMBER, count) for count in (0, 1, 2, 2**60)),
    Discard(NUMBER),
)


@pytest.mark.parametrize("state", MESSAGES)
@pytest.mark.parametrize("frame", FRAMES, ids=str)
def test_each_frame_is_valid_in_some_states_of_its_message_only(state: str, frame: FromSender) -> None:
    receiver = with_message(state)
    # A sender may continue a message that this side has ended in the meantime.
    if state in ENDED or frame in VALID.get(state, ()):
        assert receive(receiver, frame) == [frame]
        assert receiver.state is OPEN
    else:
        violation(receiver, frame)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([put(message=6)], "message 6 while the next one is 5"),
        ([put(message=5, last=True), put(message=7)], "message 7 while the next one is 6"),
        ([put(message=5), put(message=4)], "message 4 while the next one is 6"),
        ([put(message=5, tensor=1)], "tensor 1 of message 5 out of order"),
        ([put(message=5), put(message=5)], "tensor 0 of message 5 out of order"),
        ([put(message=5), put(message=5, tensor=2)], "tensor 2 of message 5 out of order"),
        ([put(message=5, last=True), put(message=5, tensor=1)], "tensor 1 of message 5 out of order"),
        ([put(message=5), End(5, 2)], "ended message 5 with a wrong count"),
        ([put(message=5, last=True), End(5, 1)], "ended message 5 with a wrong count"),
        ([End(5, 0)], "message 5 while the next one is 5"),
        ([Discard(5)], "message 5 while the next one is 5"),
    ],
)
def test_the_reason_of_a_violation_names_the_message(frames: list[FromSender], reason: str) -> None:
    assert reason in violation(admitted(first_message=5), *frames)


def test_the_order_of_frames_in_one_record_is_validated_as_well() -> None:
    receiver = admitted()
    frames: list[FromSender] = [put(), put(message=1, last=True), put(tensor=1), End(0, 2)]
    assert receive(receiver, *frames) == frames

    with pytest.raises(ProtocolError, match="tensor 2 of message 0 out of order"):
        receive(receiver, Discard(1), put(tensor=2))


def test_a_message_may_grow_while_later_ones_arrive_and_are_taken() -> None:
    receiver = admitted()
    receive(receiver, put(), put(message=1, last=True))
    receiver.taken(1)
    receive(receiver, put(message=2, last=True), put(tensor=1))
    receiver.taken(2)

    assert receive(receiver, End(0, 2)) == [End(0, 2)]
    assert receiver.in_flight == 1


def test_a_message_has_no_more_tensors_than_the_limit() -> None:
    receiver = admitted()
    for start in range(0, MAX_TENSORS, MAX_FRAMES):
        receive(receiver, *(put(tensor=tensor) for tensor in range(start, start + MAX_FRAMES)))

    assert f"tensor {MAX_TENSORS} of message 0 out of order" in violation(receiver, put(tensor=MAX_TENSORS))


def test_a_wrong_count_is_refused_without_counting_to_it() -> None:
    receiver = admitted()
    receive(receiver, put())
    tracemalloc.start()
    try:
        violation(receiver, End(0, 2**62))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 1_000_000


# The limit of messages in flight


@pytest.mark.parametrize("last", [False, True])
def test_more_messages_in_flight_than_the_sender_has_stated_are_a_violation(last: bool) -> None:
    receiver = admitted(max_concurrent_videos=2)

    assert "more than its limit of 2 messages" in violation(
        receiver, *(put(message=message, last=last) for message in range(3))
    )


@pytest.mark.parametrize("end", ["taken", "discarded", "Discard"])
def test_a_message_that_has_ended_makes_room_for_another_one(end: str) -> None:
    receiver = admitted(max_concurrent_videos=2)
    receive(receiver, put(last=True), put(message=1))
    receive(receiver, put(message=1, tensor=1))
    assert receiver.in_flight == 2
    match end:
        case "taken":
            receiver.taken(0)
        case "discarded":
            receiver.discard(0)
        case "Discard":
            receive(receiver, Discard(0))

    assert receiver.in_flight == 1
    receive(receiver, put(message=2))
    violation(receiver, put(message=3))


# Answers


def test_each_message_is_answered_once() -> None:
    receiver = admitted(max_concurrent_videos=4)
    receive(receiver, put(last=True), put(message=1), put(message=2, last=True), put(message=3))
    for message in (0, 2):
        receiver.taken(message)
        receiver.taken(message)
        receiver.discard(message)
    receiver.discard(1)
    receiver.discard(1)
    receive(receiver, Discard(3))
    receiver.discard(3)  # the sender has discarded it before
    receiver.discard(99)  # it has not arrived

    assert frames_of(receiver) == [Taken((0, 2)), Discarded((1,))]
    assert receiver.in_flight == 0


def test_a_block_is_released_once_for_each_tensor_in_it() -> None:
    receiver = admitted()
    for block in (7, 7, 3):
        receiver.release(block)

    assert frames_of(receiver) == [Release((7, 7, 3))]


def test_answers_precede_the_last_frame() -> None:
    receiver = admitted()
    receive(receiver, put(last=True), put(message=1))
    receiver.taken(0)
    receiver.discard(1)
    receiver.release(0)
    receiver.close(Close())

    assert frames_of(receiver) == [Taken((0,)), Discarded((1,)), Release((0,)), Close()]


# Segments


def test_segments_are_recorded_by_their_numbers() -> None:
    receiver = admitted()
    receive(receiver, Attach(3, "arena", 4096), Attach(0, "arena", SEGMENT_BYTES - 4096))

    assert receiver.segments == {3: 4096, 0: SEGMENT_BYTES - 4096}


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([Attach(0, "inline", 1)], "memory for the unknown placement 'inline'"),
        ([Attach(0, "device", 1)], "memory for the unknown placement 'device'"),
        ([Attach(0, "arena", 1), Attach(0, "arena", 1)], "attached segment 0 twice"),
        ([Attach(0, "arena", SEGMENT_BYTES + 1)], f"attached {SEGMENT_BYTES + 1} bytes"),
        ([Attach(0, "arena", SEGMENT_BYTES), Attach(1, "arena", 1)], "attached 1 bytes, more than the 0 of"),
        (
            [Attach(number, "arena", 1) for number in range(MAX_SEGMENTS + 1)],
            f"more than {MAX_SEGMENTS} segments",
        ),
    ],
)
def test_a_segment_beyond_a_limit_is_a_violation(frames: list[FromSender], reason: str) -> None:
    assert reason in violation(admitted(), *frames)
