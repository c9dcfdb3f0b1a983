"""The server's end of a connection, without a socket."""

import msgspec
import pytest

from aiotensor.errors import ProtocolError, TooLargeError
from aiotensor.protocol.connection import Close, ConnectionState
from aiotensor.protocol.exchange import (
    VERSION,
    Answer,
    Ask,
    Cancel,
    Cause,
    ClientHello,
    Credit,
    Failure,
    FromClient,
    ServerHello,
    read_from_server,
    write,
)
from aiotensor.protocol.parts import BODY_BYTES, MAX_PARTS, PartLimits, Parts
from aiotensor.protocol.server import ClientLimits, ServerConnection
from aiotensor.types import TensorHandle

BODY = b"\x01"
HANDLE = TensorHandle("f" * 32, 0, 0, "int64", (1,), "cpu")
HELLO = ClientHello(VERSION, 7, "receiver", 200_000, 150_000)
LIMITS = ClientLimits(None, 4, 1000, PartLimits(50_000, 40_000))


def opened() -> ServerConnection:
    """Return an open connection."""
    connection = ServerConnection(LIMITS)
    receive(connection, HELLO)
    connection.accept(77, "")
    return connection


def receive(connection: ServerConnection, frame: FromClient, *parts: bytes) -> list[bytes]:
    """Receive a frame with further parts, and return the body and the buffers."""
    received, body = connection.receive([memoryview(write(frame)), *(memoryview(part) for part in parts)])
    assert received == frame
    return [bytes(part) for part in body]


def ask(number: int, body: bytes | None = BODY) -> Ask:
    return Ask(number, None if body is None else memoryview(body))


def frames(message: Parts) -> tuple[object, list[bytes]]:
    """Return the frame and the further parts of a message to the client."""
    return read_from_server(message[0]), [bytes(part) for part in message[1:]]


def test_a_connection_opens_when_the_server_accepts_the_client() -> None:
    connection = ServerConnection(LIMITS)
    receive(connection, HELLO)
    before = connection.state
    assert connection.refusal is None
    assert (connection.peer_pid, connection.receiver) == (7, "receiver")
    assert connection.limits == PartLimits(200_000, 150_000)
    message = connection.accept(77, "id")
    assert frames(message) == (ServerHello(VERSION, 77, "id", 4, 1000, 50_000, 40_000), [])
    assert (before, connection.state) == (ConnectionState.OPENING, ConnectionState.OPEN)


def test_the_refusal_of_a_client_of_another_version_names_both_versions() -> None:
    connection = ServerConnection(LIMITS)
    receive(connection, ClientHello(VERSION + 1, 7))
    assert connection.refusal is not None
    assert (
        f"the client has protocol version {VERSION + 1}, and the server has version {VERSION}"
        in connection.refusal
    )
    assert "install the same version of aiotensor" in connection.refusal
    message = connection.close(connection.refusal, is_refusal=True)
    assert frames(message) == (Close(connection.refusal, is_refusal=True), [])
    assert connection.is_closed


def test_a_long_rejection_reason_is_truncated() -> None:
    connection = opened()
    message = connection.close("\U0001f4a5" * 2000)
    assert frames(message) == (Close("\U0001f4a5" * 1024), [])
    assert connection.is_closed


def test_an_ordinary_close_has_no_reason() -> None:
    connection = opened()
    assert frames(connection.close()) == (Close(), [])
    assert connection.is_closed


def test_a_connection_that_ends_is_closed() -> None:
    connection = opened()
    connection.disconnected()
    assert connection.is_closed


def test_the_body_of_a_message_is_read_from_the_header_or_the_next_part() -> None:
    connection = opened()
    assert receive(connection, ask(0), b"buffer") == [BODY, b"buffer"]
    assert receive(connection, ask(5, None), BODY, b"buffer") == [BODY, b"buffer"]  # numbers may have gaps
    assert connection.window.waiting == 2


def test_any_earlier_message_number_can_be_cancelled() -> None:
    connection = opened()
    receive(connection, ask(3))
    for number in (3, 1):  # a number in a gap is ignored by the owner
        receive(connection, Cancel(number))


VIOLATIONS: dict[str, tuple[list[bytes], str]] = {
    "nothing": ([], "a message of 0 parts"),
    "an empty header": ([b""], "cannot be decoded"),
    "noise": ([b"\xc1noise"], "cannot be decoded"),
    "deep nesting": ([b"\x91" * 100_000], "cannot be decoded"),
    "a text that is none": ([b"\x94\xa3\xff\xff\xff"], "cannot be decoded"),
    "too many parts": ([write(ask(6)), *[b""] * MAX_PARTS], f"{MAX_PARTS + 1} parts"),
    "a second hello": ([write(HELLO)], "a second hello"),
    "a hello of a server": ([write(ServerHello(VERSION, 1))], "cannot be decoded"),
    "an answer": ([write(Answer(0, memoryview(BODY)))], "cannot be decoded"),
    "a close": ([write(Close())], "cannot be decoded"),
    "the same number again": ([write(ask(5))], "message 5 after message 5"),
    "a lower number": ([write(ask(4))], "message 4 after message 5"),
    "a negative number": ([msgspec.msgpack.encode(["ask", -1, b"", []])], "cannot be decoded"),
    "a message without a body": ([write(ask(6, None))], "without a body"),
    "a body in the header beyond the limit": (
        [write(ask(6, bytes(40_001)))],
        "a body of 40001 bytes, more than the announced max_body_bytes=40000",
    ),
    "a body beyond the limit": ([write(ask(6, None)), bytes(40_001)], "a body of 40001 bytes"),
    "cancelling a message that was never sent": ([write(Cancel(6))], "message 6, which it never sent"),
    "too many handles": ([msgspec.msgpack.encode(["ask", 6, b"", [{}] * 1025])], "cannot be decoded"),
    "a handle that is none": ([msgspec.msgpack.encode(["ask", 6, b"", [5]])], "cannot be decoded"),
}


@pytest.mark.parametrize(("message", "reason"), VIOLATIONS.values(), ids=VIOLATIONS)
def test_violations_of_a_client_raise_protocol_error(message: list[bytes], reason: str) -> None:
    connection = opened()
    receive(connection, ask(5))
    with pytest.raises(ProtocolError, match=reason):
        connection.receive([memoryview(part) for part in message])


@pytest.mark.parametrize("frame", [ask(0), Cancel(0)])
def test_a_frame_before_the_hello_of_the_client_is_a_violation(frame: FromClient) -> None:
    with pytest.raises(ProtocolError, match="a frame before its hello"):
        receive(ServerConnection(LIMITS), frame)


def test_a_hello_with_a_limit_of_zero_is_a_violation() -> None:
    message = msgspec.msgpack.encode(["client", VERSION, 1, "", 0])
    with pytest.raises(ProtocolError, match="cannot be decoded"):
        ServerConnection(LIMITS).receive([memoryview(message)])


def test_a_message_beyond_the_message_credit_is_a_violation() -> None:
    connection = opened()
    for number in range(4):
        receive(connection, ask(number))
    with pytest.raises(
        ProtocolError, match="another message while 4 messages of 4 bytes were already waiting"
    ):
        receive(connection, ask(4))
    connection.take(1)
    receive(connection, ask(4))


def test_a_message_beyond_the_byte_credit_is_a_violation() -> None:
    connection = opened()
    receive(connection, ask(0), bytes(999))
    with pytest.raises(
        ProtocolError, match="another message while 1 messages of 1000 bytes were already waiting"
    ):
        receive(connection, ask(1))


def test_credit_is_due_when_half_of_it_was_taken() -> None:
    connection = opened()
    for number in range(4):
        receive(connection, ask(number))
    assert not connection.take(1)
    assert connection.take(1)
    assert frames(connection.credit()) == (Credit(2, 2), [])
    assert not connection.take(1)


def test_an_answer_returns_credit_once_it_was_sent() -> None:
    connection = opened()
    for number in range(4):
        receive(connection, ask(number))
    assert not connection.take(1)
    frame, message = connection.answer(0, [BODY, b"buffer"], (HANDLE,))
    assert frames(message) == (Answer(0, memoryview(BODY), (HANDLE,), 1, 1), [b"buffer"])
    assert connection.take(1)  # the answer was not sent yet
    connection.answered(frame)
    receive(connection, ask(4))
    assert connection.take(1)  # two more than the answer stated


def test_a_large_body_of_an_answer_is_a_separate_part() -> None:
    body = bytes(BODY_BYTES)
    _, message = opened().answer(0, [body, b"buffer"], ())
    assert frames(message) == (Answer(0, None), [body, b"buffer"])


def test_a_failure_returns_credit() -> None:
    connection = opened()
    for number in range(4):
        receive(connection, ask(number))
    assert not connection.take(1)
    message = connection.fail(0, Cause("ValueError", "no", is_loss=True))
    assert frames(message) == (Failure(0, "ValueError", "no", 1, 1, is_loss=True), [])
    assert not connection.take(1)


@pytest.mark.parametrize("end", ["rejected", "closed", "disconnected"])
def test_no_credit_is_due_on_a_closed_connection(end: str) -> None:
    connection = opened()
    for number in range(4):
        receive(connection, ask(number))
    if end == "rejected":
        connection.close("it does not read its replies")
    elif end == "closed":
        connection.close()
    else:
        connection.disconnected()
    assert not any(connection.take(1) for _ in range(4))
    assert connection.window.waiting == 0


@pytest.mark.parametrize(
    ("parts", "limit"),
    [([bytes(150_001)], 150_000), ([BODY, memoryview(bytes(200_001))], 200_000)],
    ids=["body", "part"],
)
def test_an_answer_beyond_a_limit_of_the_client_is_refused(parts: Parts, limit: int) -> None:
    with pytest.raises(TooLargeError, match="the client accepts") as caught:
        opened().answer(0, parts, ())
    assert caught.value.limit == limit
