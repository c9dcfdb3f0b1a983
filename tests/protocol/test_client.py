"""A client's end of a connection, without a socket."""

import pytest

from aiotensor.errors import PeerLostError, ProtocolError, RefusedError, TooLargeError
from aiotensor.protocol.client import ClientConnection
from aiotensor.protocol.connection import Close, ConnectionState
from aiotensor.protocol.exchange import (
    VERSION,
    Answer,
    Ask,
    Cancel,
    ClientHello,
    Credit,
    Failure,
    FromServer,
    ServerHello,
    read_from_client,
    write,
)
from aiotensor.protocol.frames import MAX_TENSORS
from aiotensor.protocol.parts import BODY_BYTES, MAX_PARTS, PartLimits, Parts
from aiotensor.types import TensorHandle

BODY = b"\x01"
HANDLE = TensorHandle("f" * 32, 0, 0, "int64", (1,), "cpu")
HELLO = ServerHello(VERSION, 77, "receiver", 3, 1000, 200_000, 150_000)


def opening(limits: PartLimits | None = None) -> ClientConnection:
    """Return a connection that waits for the hello of the server."""
    connection = ClientConnection(limits or PartLimits(), "ipc:///m")
    connection.hello(7, "")
    return connection


def opened(hello: ServerHello = HELLO, limits: PartLimits | None = None) -> ClientConnection:
    """Return an open connection."""
    connection = opening(limits)
    receive(connection, hello)
    return connection


def receive(connection: ClientConnection, frame: FromServer, *parts: bytes) -> list[bytes]:
    """Receive a frame with further parts, and return the body and the buffers."""
    received, body = connection.receive([memoryview(write(frame)), *(memoryview(part) for part in parts)])
    assert received == frame
    return [bytes(part) for part in body]


def sent(connection: ClientConnection, body: bytes = BODY) -> int:
    """Send a message, and return its number."""
    number, _ = connection.ask([body], (), wants_answer=True)
    connection.sent(number, len(body))
    return number


def frames(message: Parts) -> tuple[object, list[bytes]]:
    """Return the frame and the further parts of a message to the server."""
    return read_from_client(message[0]), [bytes(part) for part in message[1:]]


def test_the_hello_states_the_version_the_receiver_and_the_limits() -> None:
    message = ClientConnection(PartLimits(10, 20)).hello(7, "id")
    assert frames(message) == (ClientHello(VERSION, 7, "id", 10, 20), [])


def test_a_connection_opens_with_the_hello_of_the_server_and_its_limits() -> None:
    connection = opening()
    before = connection.state, connection.window.credit
    receive(connection, HELLO)
    assert (before, connection.state) == ((ConnectionState.OPENING, 0), ConnectionState.OPEN)
    assert (connection.peer_pid, connection.receiver) == (77, "receiver")
    assert connection.limits == PartLimits(200_000, 150_000)
    assert connection.window.credit == 3


def test_a_server_of_another_version_raises_refused_error_with_both_versions() -> None:
    connection = opening()
    text = (
        r"the server \(pid 77\) at ipc:///m refused this client: the server has protocol version "
        f"{VERSION + 1}, and the client has version {VERSION}: install the same version of aiotensor"
    )
    with pytest.raises(RefusedError, match=text) as caught:
        receive(connection, ServerHello(VERSION + 1, 77))
    assert caught.value.pid == 77
    assert connection.is_closed


def test_messages_are_numbered_and_a_small_body_is_in_the_header() -> None:
    connection = opened()
    for number in range(2):
        asked, message = connection.ask([BODY, b"buffer"], (HANDLE,), wants_answer=number == 0)
        assert asked == number
        assert frames(message) == (Ask(number, memoryview(BODY), (HANDLE,), number == 0), [b"buffer"])


def test_a_large_body_is_a_separate_part() -> None:
    body = bytes(BODY_BYTES)
    _, message = opened().ask([body, b"buffer"], (), wants_answer=True)
    assert frames(message) == (Ask(0, None), [body, b"buffer"])


@pytest.mark.parametrize(
    ("parts", "reason", "limit"),
    [
        ([bytes(150_001)], "the body of this message has 150001 bytes", 150_000),
        (
            [BODY, memoryview(bytes(200_001))],
            "a tensor, or all small tensors together, of this message",
            200_000,
        ),
        ([BODY, *[memoryview(b"x")] * (MAX_TENSORS + 1)], f"this one has {MAX_TENSORS + 1}", MAX_TENSORS),
    ],
    ids=["body", "part", "tensors"],
)
def test_a_message_beyond_a_limit_of_the_server_is_not_numbered(
    parts: Parts, reason: str, limit: int
) -> None:
    connection = opened()
    with pytest.raises(TooLargeError, match=reason) as caught:
        connection.ask(parts, (), wants_answer=True)
    assert caught.value.limit == limit
    assert connection.ask([BODY], (), wants_answer=True)[0] == 0


def test_packed_tensors_do_not_count_as_a_large_tensor() -> None:
    opened().ask([BODY, *[memoryview(b"x")] * MAX_TENSORS, b"packed"], (), wants_answer=True)


def test_credit_is_used_by_messages_and_bytes_and_returned_by_answers() -> None:
    connection = opened()
    first, _, _ = [sent(connection) for _ in range(3)]
    assert connection.window.credit == 0
    receive(connection, Failure(first, "ValueError", "no", taken=1, taken_bytes=1))
    assert connection.window.credit == 1
    sent(connection, bytes(1000))
    receive(connection, Credit(3, 3))
    assert connection.window.credit == 0  # the last message alone has all bytes
    receive(connection, Credit(4, 1003))
    assert connection.window.credit == 3


def test_the_body_of_an_answer_is_read_from_the_header_or_the_next_part() -> None:
    connection = opened()
    numbers = [sent(connection) for _ in range(2)]
    assert receive(connection, Answer(numbers[1], memoryview(BODY)), b"buffer") == [BODY, b"buffer"]
    assert receive(connection, Answer(numbers[0], None), BODY, b"buffer") == [BODY, b"buffer"]


def test_a_late_answer_to_a_cancelled_message_is_not_a_violation() -> None:
    connection = opened()
    number = sent(connection)
    assert frames(connection.cancel(number)) == (Cancel(number), [])
    receive(connection, Answer(number, memoryview(BODY), taken=1, taken_bytes=1))


def test_a_message_that_was_never_sent_leaves_a_gap_in_the_numbers() -> None:
    connection = opened()
    connection.ask([BODY], (), wants_answer=True)
    assert sent(connection) == 1
    receive(connection, Answer(1, memoryview(BODY)))


VIOLATIONS: dict[str, tuple[list[bytes], str]] = {
    "nothing": ([], "a message of 0 parts"),
    "an empty header": ([b""], "cannot be decoded"),
    "noise": ([b"\xc1"], "cannot be decoded"),
    "deep nesting": ([b"\x91" * 100_000], "cannot be decoded"),
    "too many parts": ([write(HELLO), *[b""] * MAX_PARTS], f"{MAX_PARTS + 1} parts"),
    "a second hello": ([write(HELLO)], "a second hello"),
    "a frame of a client": ([write(Cancel(0))], "cannot be decoded"),
    "an answer to a message that was never sent": ([write(Answer(1, memoryview(BODY)))], "message 1, which"),
    "a failure of a message that was never sent": (
        [write(Failure(1, "ValueError", "x"))],
        "message 1, which",
    ),
    "an answer without a body": ([write(Answer(0, None))], "without a body"),
    "a body in the header beyond the limit": (
        [write(Answer(0, memoryview(bytes(101))))],
        "a body of 101 bytes, more than the announced max_body_bytes=100",
    ),
    "a body beyond the limit": ([write(Answer(0, None)), bytes(101)], "a body of 101 bytes"),
    "more credit than was used": (
        [write(Credit(2, 0))],
        "it took 2 messages with 0 bytes, but 1 with 1 bytes were sent",
    ),
    "an answer with more credit": (
        [write(Answer(0, memoryview(BODY), taken=2))],
        "it took 2 messages with 0 bytes, but 1 with 1 bytes were sent",
    ),
    "more bytes than were sent": (
        [write(Credit(1, 2))],
        "it took 1 messages with 2 bytes, but 1 with 1 bytes were sent",
    ),
}


@pytest.mark.parametrize(("message", "reason"), VIOLATIONS.values(), ids=VIOLATIONS)
def test_a_violation_of_the_server_ends_the_connection_without_another_attempt(
    message: list[bytes], reason: str
) -> None:
    connection = opened(limits=PartLimits(None, 100))
    sent(connection)
    connection.ask([BODY], (), wants_answer=True)  # and not sent
    with pytest.raises(ProtocolError, match=reason) as caught:
        connection.receive([memoryview(part) for part in message])
    loss = connection.violated(caught.value)
    assert connection.is_closed
    assert not loss.is_retried
    assert isinstance(loss.error, PeerLostError)
    assert str(loss.error).startswith(
        "the connection to the server (pid 77) at ipc:///m was lost: it broke the protocol: "
    )
    assert loss.error.pid == 77
    assert isinstance(loss.error.__cause__, ProtocolError)
    assert loss.error.__cause__.__traceback__ is None


@pytest.mark.parametrize("frame", [Answer(0, memoryview(BODY)), Failure(0, "ValueError", "x"), Credit(0, 0)])
def test_a_frame_before_the_hello_of_the_server_is_a_violation(frame: FromServer) -> None:
    with pytest.raises(ProtocolError, match="a frame before its hello"):
        receive(opening(), frame)


def test_a_hello_before_that_of_the_client_is_a_violation() -> None:
    with pytest.raises(ProtocolError, match="its hello before that of the client"):
        receive(ClientConnection(PartLimits()), HELLO)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    ("close", "kind", "text", "is_retried"),
    [
        (Close(), PeerLostError, "was lost: it closed the connection", True),
        (Close("reads nothing"), PeerLostError, "was lost: it closed the connection: reads nothing", False),
        (Close("full", is_refusal=True), RefusedError, "refused this client: full", False),
    ],
    ids=["closed", "rejected", "refused"],
)
def test_a_close_frame_decides_the_error_and_the_retry(
    is_open: bool, close: Close, kind: type[Exception], text: str, is_retried: bool
) -> None:
    connection = opened() if is_open else opening()
    receive(connection, close)
    loss = connection.closed(close)
    assert connection.is_closed
    assert isinstance(loss.error, kind)
    assert text in str(loss.error)
    assert loss.is_retried == is_retried
    assert loss.error.pid == (77 if is_open else None)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_connection_that_ends_without_a_close_is_retried(is_open: bool) -> None:
    connection = opened() if is_open else opening()
    loss = connection.disconnected()
    assert connection.is_closed
    assert loss.is_retried
    assert loss.reason == "it ended, or the network failed"
    assert isinstance(loss.error, PeerLostError)
