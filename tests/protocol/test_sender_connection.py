import pytest

from aiotensor.errors import PeerLostError, ProtocolError, RefusedError
from aiotensor.protocol.connection import Close, ConnectionState
from aiotensor.protocol.frames import (
    FROM_SENDER,
    LEAST_FRAME_BYTES,
    VERSION,
    Attach,
    Discard,
    Discarded,
    End,
    Release,
    Taken,
    ToSender,
    Welcome,
    decode,
    encode,
)
from aiotensor.protocol.sender import SenderConnection
from aiotensor.types import MAX_NUMBER
from tests.frames import frames_of, hello, put

OPENING, OPEN, CLOSED = ConnectionState

WELCOME = Welcome(VERSION, 43, LEAST_FRAME_BYTES, "r", is_admitted=True)
NOT_ADMITTED = Welcome(VERSION, 43, LEAST_FRAME_BYTES, "r")


def new(*received: ToSender, first_message: int = 0) -> SenderConnection:
    """Return a sender's end after its hello, and after some frames of the receiver."""
    sender = SenderConnection(hello(first_message=first_message))
    sender.data_to_send()
    if received:
        sender.receive(encode(*received))
    return sender


def admitted(first_message: int = 0) -> SenderConnection:
    return new(WELCOME, first_message=first_message)


def with_message(state: str) -> SenderConnection:
    """Return a sender's end with message 0 in a state."""
    sender = admitted()
    sender.put(put(last=state == "whole by its last tensor"))
    match state:
        case "whole by its end":
            sender.end(0)
        case "discarded":
            sender.discard(0)
        case "taken":
            sender.end(0)
            sender.receive(encode(Taken((0,))))
        case "discarded by the receiver":
            sender.receive(encode(Discarded((0,))))
    sender.data_to_send()
    return sender


# The states of the connection


def test_the_hello_is_alone_in_the_first_record() -> None:
    sender = SenderConnection(hello())
    sender.put(put())

    assert list(sender.data_to_send()) == [encode(hello()), encode(put())]


def test_a_sender_is_not_admitted_before_the_welcome() -> None:
    sender = new()

    assert sender.state is OPENING
    assert sender.state is not ConnectionState.OPEN
    assert sender.receiver_id is None
    assert sender.peer_pid is None


def test_a_welcome_admits_the_sender_and_identifies_the_receiver() -> None:
    sender = new()

    assert sender.receive(encode(WELCOME)) == [WELCOME]
    assert sender.state is OPEN
    assert sender.state is ConnectionState.OPEN
    assert (sender.receiver_id, sender.peer_pid) == ("r", 43)


def test_a_sender_that_is_not_admitted_learns_the_reason_from_the_last_frame() -> None:
    sender = new(NOT_ADMITTED)
    assert sender.state is OPENING
    close = Close("max_senders=1", is_refusal=True)

    assert sender.receive(encode(close)) == [close]
    assert sender.state is CLOSED
    loss = sender.closed(close)
    assert isinstance(loss.error, RefusedError)
    assert str(loss.error) == "the receiver (pid 43) refused this sender: max_senders=1"


def test_a_receiver_of_another_version_is_refused_whatever_it_answers() -> None:
    sender = new()

    with pytest.raises(RefusedError, match=f"the receiver has protocol version {VERSION + 1}"):
        sender.receive(encode(Welcome(VERSION + 1, 43, is_admitted=True), Close("it closed too")))
    assert sender.state is CLOSED
    assert sender.state is not ConnectionState.OPEN


@pytest.mark.parametrize("first", [WELCOME, NOT_ADMITTED])
@pytest.mark.parametrize("second", [WELCOME, NOT_ADMITTED])
def test_a_second_welcome_is_a_violation(first: Welcome, second: Welcome) -> None:
    sender = new(first)

    with pytest.raises(ProtocolError, match="a second hello"):
        sender.receive(encode(second))
    assert sender.state is CLOSED


@pytest.mark.parametrize("received", [(), (NOT_ADMITTED,)], ids=["no welcome", "not admitted"])
@pytest.mark.parametrize(
    "frame",
    [Taken((0,)), Taken(()), Discarded((0,)), Release((0,))],
    ids=repr,
)
def test_only_a_welcome_admits_other_frames(received: tuple[Welcome, ...], frame: ToSender) -> None:
    sender = new(*received)
    sender.put(put(last=True))

    with pytest.raises(ProtocolError, match="a frame before its hello"):
        sender.receive(encode(frame))
    assert sender.state is CLOSED


@pytest.mark.parametrize(
    "received", [(), (NOT_ADMITTED,), (WELCOME,)], ids=["none", "not admitted", "admitted"]
)
def test_either_side_may_close_in_every_state(received: tuple[Welcome, ...]) -> None:
    sender = new(*received)
    assert sender.receive(encode(Close())) == [Close()]
    assert sender.state is CLOSED
    assert isinstance(sender.closed(Close()).error, PeerLostError)

    sender = new(*received)
    sender.close(Close(uses_memory=True))
    assert sender.state is CLOSED
    assert sender.state is not ConnectionState.OPEN
    assert frames_of(sender) == [Close(uses_memory=True)]


def test_the_last_frame_follows_all_pending_ones_and_states_the_use_of_memory() -> None:
    sender = admitted()
    sender.put(put())
    sender.close(Close(uses_memory=False))

    assert frames_of(sender) == [put(), Close(uses_memory=False)]


# Numbers of messages


def test_messages_are_numbered_from_the_first_one_of_the_connection() -> None:
    sender = admitted(first_message=7)
    assert sender.next_message == 7
    sender.put(put(message=7))
    assert sender.next_message == 8
    sender.put(put(message=7, tensor=1))
    assert sender.next_message == 8
    sender.put(put(message=8, last=True))
    sender.put(put(message=7, tensor=2, last=True))
    assert sender.next_message == 9


def test_numbers_continue_when_the_connection_is_lost() -> None:
    sender = new(first_message=7)
    sender.put(put(message=7))
    sender.lost("its process was killed", is_retried=True)

    assert sender.next_message == 8


@pytest.mark.parametrize("answer", [Taken, Discarded])
@pytest.mark.parametrize("number", [0, 6, 8, MAX_NUMBER])
def test_an_answer_to_a_message_that_was_never_sent_is_a_violation(
    answer: type[Taken | Discarded], number: int
) -> None:
    sender = admitted(first_message=7)
    sender.put(put(message=7, last=True))

    with pytest.raises(ProtocolError, match=f"it answered message {number}, which was never sent"):
        sender.receive(encode(answer((7, number))))
    assert sender.state is CLOSED


# The states of a message


@pytest.mark.parametrize("answer", [Taken((0,)), Discarded((0,))], ids=repr)
@pytest.mark.parametrize("state", ["whole by its end", "whole by its last tensor"])
def test_a_whole_message_is_taken_or_discarded(state: str, answer: ToSender) -> None:
    assert with_message(state).receive(encode(answer)) == [answer]


def test_a_message_that_is_not_whole_is_discarded_and_never_taken() -> None:
    assert with_message("begun").receive(encode(Discarded((0,)))) == [Discarded((0,))]

    sender = with_message("begun")
    with pytest.raises(ProtocolError, match="it took message 0, which was not whole"):
        sender.receive(encode(Taken((0,))))
    assert sender.state is CLOSED


@pytest.mark.parametrize("answer", [Taken((0,)), Discarded((0,))], ids=repr)
@pytest.mark.parametrize("state", ["discarded", "taken", "discarded by the receiver"])
def test_an_answer_to_a_message_that_has_ended_has_no_effect(state: str, answer: ToSender) -> None:
    sender = with_message(state)

    assert sender.receive(encode(answer)) == [answer]
    assert sender.state is OPEN


def test_messages_may_be_announced_and_ended_before_the_welcome() -> None:
    sender = new()
    sender.put(put())
    sender.put(put(message=1))
    sender.end(0)
    sender.discard(1)
    assert frames_of(sender) == [put(), put(message=1), End(0, 1), Discard(1)]

    answers: list[ToSender] = [WELCOME, Taken((0,)), Discarded((1,))]
    assert sender.receive(encode(*answers)) == answers


def test_the_end_of_a_message_states_the_number_of_its_tensors() -> None:
    sender = admitted()
    for tensor in range(3):
        sender.put(put(tensor=tensor))
        sender.put(put(message=1, tensor=tensor))
    sender.end(0)
    sender.put(put(message=1, tensor=3))
    sender.end(1)

    assert [frame for frame in frames_of(sender) if isinstance(frame, End)] == [End(0, 3), End(1, 4)]


# Segments


def test_a_segment_is_shared_in_a_record_of_its_own() -> None:
    sender = admitted()
    sender.put(put())

    assert decode(FROM_SENDER, sender.attach(0, "arena", 4096)) == [Attach(0, "arena", 4096)]
    assert frames_of(sender) == [put()]


def test_releases_are_passed_to_the_owner() -> None:
    assert admitted().receive(encode(Release((5, 5)))) == [Release((5, 5))]
