"""The connection between a client and a server without sockets: its model, credit, limits and violations."""

from collections import deque
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiotensor.errors import PeerLostError, ProtocolError, RefusedError, TooLargeError
from aiotensor.protocol.client import ClientConnection
from aiotensor.protocol.connection import ConnectionState
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
    FromServer,
    ServerHello,
    read_from_client,
    read_from_server,
    write,
)
from aiotensor.protocol.frames import MAX_TENSORS, Close
from aiotensor.protocol.parts import BODY_BYTES, MAX_PARTS, PartLimits, Parts
from aiotensor.protocol.server import ClientLimits, ServerConnection
from aiotensor.types import TensorHandle
from tests.selection import COMPLETE

OPENING, OPEN, CLOSED = ConnectionState

BODY = b"\x01"
HANDLE = TensorHandle("f" * 32, 0, 0, "int64", (1,), "cpu")
MAX_BYTES = 100


def views(parts: Parts) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def answer(server: ServerConnection, number: int, parts: Parts, *handles: TensorHandle) -> Parts:
    """Answer a message, and return the message to the client, which counts as sent."""
    frame, message = server.answer(number, parts, handles)
    server.answered(frame)
    return message


def fail(server: ServerConnection, number: int, cause: Cause) -> Parts:
    return server.fail(number, cause)


class TwoEnds(RuleBasedStateMachine):
    """Both ends of an open connection, and the messages in flight between them.

    An honest side never causes a `ProtocolError`, which would fail the test. In the end, every message that
    was not cancelled has its answer, and the client has credit.
    """

    @initialize(messages=st.integers(1, 6), nbytes=st.integers(1, MAX_BYTES))
    def begin(self, messages: int, nbytes: int) -> None:
        self.limits = messages, nbytes
        self.client = ClientConnection(PartLimits())
        self.server = ServerConnection(ClientLimits(None, messages, nbytes, PartLimits()))
        self.server.receive(views(self.client.hello(7, "")))
        self.client.receive(views(self.server.accept(77, "")))
        self.to_server: deque[Parts] = deque()
        self.to_client: deque[Parts] = deque()
        self.sent: dict[int, int] = {}  # messages of the client without an answer, by their bytes
        self.arrived: dict[int, int] = {}  # messages that wait at the server
        self.taken: set[int] = set()  # messages in hand at the server
        self.untaken = 0

    @precondition(lambda self: self.client.window.credit > 0)
    @rule(nbytes=st.integers(1, MAX_BYTES), buffers=st.integers(0, 2))
    def ask(self, nbytes: int, buffers: int) -> None:
        parts = [bytes(nbytes), *[BODY] * buffers]
        number, message = self.client.ask(parts, (), wants_answer=True)
        self.client.sent(number, nbytes + buffers)
        self.sent[number] = nbytes + buffers
        self.to_server.append(message)
        self.untaken += 1

    @rule()
    def number_a_message_that_is_never_sent(self) -> None:
        self.client.ask([BODY], (), wants_answer=True)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.sent)))
        del self.sent[number]
        self.to_server.append(self.client.cancel(number))

    @precondition(lambda self: self.to_server)
    @rule()
    def deliver_to_server(self) -> None:
        frame, parts = self.server.receive(views(self.to_server.popleft()))
        match frame:
            case Ask(number):
                self.arrived[number] = sum(map(len, parts))
                assert self.arrived[number] == self.sent.get(number, self.arrived[number])
            case Cancel(number):
                if number in self.arrived:
                    self.take(number)
                self.taken.discard(number)

    @precondition(lambda self: self.arrived)
    @rule(data=st.data())
    def take_any(self, data: st.DataObject) -> None:
        self.take(data.draw(st.sampled_from(sorted(self.arrived))))

    def take(self, number: int) -> None:
        self.taken.add(number)
        self.untaken -= 1
        if self.server.take(self.arrived.pop(number)):
            self.to_client.append(self.server.credit())

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), fails=st.booleans())
    def answer(self, data: st.DataObject, fails: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.taken)))
        self.taken.remove(number)
        message = (
            fail(self.server, number, Cause("ValueError", "no"))
            if fails
            else answer(self.server, number, [BODY])
        )
        self.to_client.append(message)

    @precondition(lambda self: self.to_client)
    @rule()
    def deliver_to_client(self) -> None:
        frame, _ = self.client.receive(views(self.to_client.popleft()))
        if isinstance(frame, Answer | Failure):
            self.sent.pop(frame.number, None)  # the answer to a message that was cancelled is ignored

    @invariant()
    def no_more_messages_wait_than_may(self) -> None:
        messages, nbytes = self.limits
        assert self.untaken <= messages
        assert self.server.window.waiting == len(self.arrived)
        assert sum(list(self.arrived.values())[:-1]) < nbytes or not self.arrived

    def teardown(self) -> None:
        if not hasattr(self, "client"):
            return  # no rule has run
        while self.to_server or self.to_client or self.arrived or self.taken:
            if self.to_server:
                self.deliver_to_server()
            for number in sorted(self.arrived):
                self.take(number)
            for number in sorted(self.taken):
                self.taken.remove(number)
                self.to_client.append(answer(self.server, number, [BODY]))
            if self.to_client:
                self.deliver_to_client()
        assert not self.sent, "a message has no answer"
        assert self.client.window.credit > 0, "credit was lost"


TestHonestEnds = pytest.mark.promise(27)(TwoEnds.TestCase)
TestHonestEnds.settings = settings(max_examples=200 if COMPLETE else 40, stateful_step_count=40)


# Opening and closing

SERVER_HELLO = ServerHello(VERSION, 77, "receiver", 3, 1000, 200_000, 150_000)
CLIENT_HELLO = ClientHello(VERSION, 7, "receiver", 200_000, 150_000)
LIMITS = ClientLimits(None, 4, 1000, PartLimits(50_000, 40_000))


def client(*frames: FromServer) -> ClientConnection:
    """Return a client's end after its hello, and after frames of the server."""
    connection = ClientConnection(PartLimits(None, 100), "ipc:///m")
    connection.hello(7, "")
    for frame in frames:
        connection.receive([memoryview(write(frame))])
    return connection


def server(*frames: FromClient) -> ServerConnection:
    """Return a server's end that has accepted the client, after frames of the client."""
    connection = ServerConnection(LIMITS)
    connection.receive([memoryview(write(CLIENT_HELLO))])
    connection.accept(77, "")
    for frame in frames:
        connection.receive([memoryview(write(frame))])
    return connection


def ask(number: int, body: bytes | None = BODY) -> Ask:
    return Ask(number, None if body is None else memoryview(body))


def test_both_hellos_state_the_receiver_and_the_limits_of_their_side() -> None:
    near = ClientConnection(PartLimits(10, 20))
    far = ServerConnection(LIMITS)
    assert (near.state, near.window.credit, far.state) == (OPENING, 0, OPENING)
    frame, _ = far.receive(views(near.hello(7, "near")))
    assert frame == ClientHello(VERSION, 7, "near", 10, 20)
    assert (far.refusal, far.peer_pid, far.receiver, far.limits) == (None, 7, "near", PartLimits(10, 20))
    answer, _ = near.receive(views(far.accept(77, "far")))
    assert answer == ServerHello(VERSION, 77, "far", 4, 1000, 50_000, 40_000)
    assert (near.peer_pid, near.receiver, near.limits) == (77, "far", PartLimits(50_000, 40_000))
    assert (near.state, near.window.credit, far.state) == (OPEN, 4, OPEN)


def test_each_side_refuses_another_version_and_names_both_versions() -> None:
    remedy = "install the same version of aiotensor on both sides"
    with pytest.raises(RefusedError) as caught:
        client(ServerHello(VERSION + 1, 77))
    assert str(caught.value) == (
        f"the server (pid 77) at ipc:///m refused this client: the server has protocol version {VERSION + 1}"
        f", and the client has version {VERSION}: {remedy}"
    )
    assert caught.value.pid == 77
    connection = ServerConnection(LIMITS)
    connection.receive([memoryview(write(ClientHello(VERSION + 1, 7)))])
    reason = connection.refusal
    assert reason == (
        f"the client has protocol version {VERSION + 1}, and the server has version {VERSION}: {remedy}"
    )
    assert read_from_server(connection.close(reason, is_refusal=True)[0]) == Close(reason, is_refusal=True)
    assert connection.is_closed


def test_a_server_closes_with_a_reason_of_limited_length_and_returns_no_credit_afterwards() -> None:
    for reason in ("", "\U0001f4a5" * 2000):
        connection = server(*map(ask, range(4)))
        assert read_from_server(connection.close(reason)[0]) == Close(reason[:1024])
        assert connection.is_closed
        assert not any(connection.take(1) for _ in range(4))
    connection = server(*map(ask, range(4)))
    connection.disconnected()
    assert connection.is_closed
    assert not any(connection.take(1) for _ in range(4))


@pytest.mark.parametrize(
    ("close", "error", "text", "is_retried"),
    [
        (Close(), PeerLostError, "was lost: it closed the connection", True),
        (Close("reads nothing"), PeerLostError, "was lost: it closed the connection: reads nothing", False),
        (Close("full", is_refusal=True), RefusedError, "refused this client: full", False),
        (None, PeerLostError, "was lost: it ended, or the network failed", True),
    ],
    ids=["closed", "rejected", "refused", "disconnected"],
)
def test_the_end_of_a_connection_decides_the_error_and_the_retry(
    close: Close | None, error: type[Exception], text: str, is_retried: bool
) -> None:
    for connection, pid in ((client(), None), (client(SERVER_HELLO), 77)):
        if close is None:
            loss = connection.disconnected()
        else:
            connection.receive([memoryview(write(close))])
            loss = connection.closed(close)
        assert connection.is_closed
        assert type(loss.error) is error
        assert (loss.error.pid, loss.is_retried) == (pid, is_retried)
        assert text in str(loss.error)


# Bodies, buffers and limits


def test_a_large_body_is_a_separate_part_in_both_directions() -> None:
    near, far = (
        client(ServerHello(VERSION, 77, "", 3, 1 << 20)),
        ServerConnection(ClientLimits(None, 4, 1 << 20, PartLimits())),
    )
    far.receive([memoryview(write(ClientHello(VERSION, 7)))])
    far.accept(77, "")
    for number, body in enumerate((BODY, bytes(BODY_BYTES))):
        is_small = body is BODY
        parts = [body, b"buffer"]
        asked, message = near.ask(parts, (HANDLE,), wants_answer=is_small)
        assert asked == number
        frame = read_from_client(message[0])
        assert frame == Ask(number, memoryview(BODY) if is_small else None, (HANDLE,), is_small)
        assert far.receive(views(message))[1] == parts
        message = answer(far, number, parts, HANDLE)
        answered = read_from_server(message[0])
        assert answered == Answer(number, memoryview(BODY) if is_small else None, (HANDLE,))
        assert list(message[1:]) == parts[is_small:]


def test_credit_is_returned_once_half_of_it_was_taken_or_with_an_answer() -> None:
    connection = server(*map(ask, range(4)))
    assert not connection.take(1)
    frame, _ = connection.answer(0, [BODY], ())
    assert (frame.taken, frame.taken_bytes) == (1, 1)
    assert connection.take(1)  # the answer was not sent yet
    assert read_from_server(connection.credit()[0]) == Credit(2, 2)
    assert not connection.take(1)
    failure = read_from_server(fail(connection, 2, Cause("ValueError", "no", is_loss=True))[0])
    assert failure == Failure(2, "ValueError", "no", 3, 3, is_loss=True)
    connection.answered(frame)  # late, which returns no credit again
    assert not connection.take(1)


@pytest.mark.parametrize(
    ("parts", "reason", "limit"),
    [
        ([bytes(150_001)], "the body of this message has 150001 bytes", 150_000),
        ([BODY, memoryview(bytes(200_001))], "all small tensors together, of this message", 200_000),
        ([BODY, *[memoryview(b"x")] * (MAX_TENSORS + 1)], f"this one has {MAX_TENSORS + 1}", MAX_TENSORS),
    ],
    ids=["body", "part", "tensors"],
)
def test_a_message_beyond_a_limit_of_the_peer_is_not_sent(parts: Parts, reason: str, limit: int) -> None:
    connection = client(SERVER_HELLO)
    for refused in (
        lambda: connection.ask(parts, (), wants_answer=True),
        lambda: server().answer(0, parts, ()),
    ):
        with pytest.raises(TooLargeError, match=reason) as caught:
            refused()
        assert caught.value.limit == limit
    # Packed tensors do not count as a large one.
    packed: Parts = [BODY, *[memoryview(b"x")] * MAX_TENSORS, b"packed"]
    assert connection.ask(packed, (), wants_answer=True)[0] == 0


# Violations


def message(frame: FromServer | FromClient, *parts: bytes) -> list[bytes]:
    return [write(frame), *parts]


ASKED = "1 with 1 bytes were sent"
OF_SERVERS: dict[str, tuple[str, list[bytes]]] = {
    "nothing": ("a message of 0 parts", []),
    "noise": ("cannot be decoded", [b"\xc1"]),
    "too many parts": (f"{MAX_PARTS + 1} parts", message(SERVER_HELLO, *[b""] * MAX_PARTS)),
    "a second hello": ("a second hello", message(SERVER_HELLO)),
    "a frame of a client": ("cannot be decoded", message(Cancel(0))),
    "an answer to no message": ("message 1, which was never", message(Answer(1, memoryview(BODY)))),
    "a failure of no message": ("message 1, which was never", message(Failure(1, "ValueError", "x"))),
    "an answer without a body": ("without a body", message(Answer(0, None))),
    "a body in the header beyond the limit": (
        "a body of 101 bytes, more than the announced max_body_bytes=100",
        message(Answer(0, memoryview(bytes(101)))),
    ),
    "a body beyond the limit": ("a body of 101 bytes", message(Answer(0, None), bytes(101))),
    "credit that was not used": (f"it took 2 messages with 0 bytes, but {ASKED}", message(Credit(2, 0))),
    "an answer with such credit": (
        f"it took 2 messages with 0 bytes, but {ASKED}",
        message(Answer(0, memoryview(BODY), taken=2)),
    ),
    "bytes that were not sent": (f"it took 1 messages with 2 bytes, but {ASKED}", message(Credit(1, 2))),
}  # fmt: skip


@pytest.mark.promise(24)
@pytest.mark.parametrize(("reason", "parts"), OF_SERVERS.values(), ids=OF_SERVERS)
def test_a_violation_of_a_server_ends_the_connection_for_good(reason: str, parts: list[bytes]) -> None:
    connection = client(SERVER_HELLO)
    number, _ = connection.ask([BODY], (), wants_answer=True)
    connection.sent(number, 1)
    connection.ask([BODY], (), wants_answer=True)  # and not sent
    with pytest.raises(ProtocolError, match=reason) as caught:
        connection.receive(views(parts))
    loss = connection.violated(caught.value)
    assert connection.is_closed
    assert (loss.is_retried, loss.error.pid) == (False, 77)
    assert str(loss.error).startswith(
        "the connection to the server (pid 77) at ipc:///m was lost: it broke the protocol: "
    )


OF_CLIENTS: dict[str, tuple[str, list[bytes]]] = {
    "nothing": ("a message of 0 parts", []),
    "noise": ("cannot be decoded", [b"\xc1noise"]),
    "too many parts": (f"{MAX_PARTS + 1} parts", message(ask(6), *[b""] * MAX_PARTS)),
    "a second hello": ("a second hello", message(CLIENT_HELLO)),
    "a frame of a server": ("cannot be decoded", message(Close())),
    "the same number again": ("message 5 after message 5", message(ask(5))),
    "a lower number": ("message 4 after message 5", message(ask(4))),
    "a message without a body": ("without a body", message(ask(6, None))),
    "a body in the header beyond the limit": (
        "a body of 40001 bytes, more than the announced max_body_bytes=40000",
        message(ask(6, bytes(40_001))),
    ),
    "a body beyond the limit": ("a body of 40001 bytes", message(ask(6, None), bytes(40_001))),
    "cancelling no message": ("message 6, which it never sent", message(Cancel(6))),
    "a handle that is none": ("cannot be decoded", [msgspec.msgpack.encode(["ask", 6, b"", [5]])]),
}  # fmt: skip


@pytest.mark.promise(24)
@pytest.mark.parametrize(("reason", "parts"), OF_CLIENTS.values(), ids=OF_CLIENTS)
def test_a_violation_of_a_client_raises_protocol_error(reason: str, parts: list[bytes]) -> None:
    connection = server(ask(5), Cancel(5), Cancel(1))  # a number in a gap is ignored by the owner
    with pytest.raises(ProtocolError, match=reason):
        connection.receive(views(parts))


def test_a_frame_before_a_hello_is_a_violation() -> None:
    for frame in (Answer(0, memoryview(BODY)), Failure(0, "ValueError", "x"), Credit(0, 0)):
        with pytest.raises(ProtocolError, match="a frame before its hello"):
            client(frame)
    with pytest.raises(ProtocolError, match="its hello before that of the client"):
        ClientConnection(PartLimits()).receive([memoryview(write(SERVER_HELLO))])
    for sent in (ask(0), Cancel(0)):
        with pytest.raises(ProtocolError, match="a frame before its hello"):
            ServerConnection(LIMITS).receive([memoryview(write(sent))])


@pytest.mark.promise(26)
@pytest.mark.parametrize(("sizes", "reason"), [([1] * 4, "4 messages of 4"), ([1000], "1 messages of 1000")])
def test_a_message_without_credit_is_a_violation(sizes: Sequence[int], reason: str) -> None:
    connection = server()
    for number, size in enumerate(sizes):
        connection.receive(views(message(ask(number, None), bytes(size))))
    more = views(message(ask(len(sizes))))
    with pytest.raises(ProtocolError, match=f"another message while {reason} bytes were already waiting"):
        connection.receive(more)
    connection.take(sizes[0])
    connection.receive(more)


def test_decreasing_totals_of_taken_messages_are_a_violation() -> None:
    connection = client(SERVER_HELLO)
    for _ in range(2):
        number, _ = connection.ask([bytes(10)], (), wants_answer=True)
        connection.sent(number, 10)
    connection.receive([memoryview(write(Credit(2, 20)))])
    for messages, nbytes in ((1, 20), (2, 10)):
        with pytest.raises(ProtocolError, match=f"it took {messages} messages with .* bytes, but 2 "):
            connection.receive([memoryview(write(Credit(messages, nbytes)))])
