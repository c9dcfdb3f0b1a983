import pytest

from aiotensor.errors import PeerLostError, ProtocolError, RefusedError
from aiotensor.protocol.connection import Close, Connection, ConnectionState, Loss, mismatch

OPENING, OPEN, CLOSED = ConnectionState


def new(state: ConnectionState = OPENING) -> Connection:
    """Return a sender's end, which knows the peer's process unless it is still opening."""
    connection = Connection("sender", "the receiver")
    if state is not OPENING:
        connection.accept_hello(1, 42, 1)
    connection.state = state
    return connection


def test_a_connection_waits_for_the_hello_of_the_peer() -> None:
    connection = new()

    assert connection.state is OPENING
    assert not connection.is_closed
    assert connection.peer_pid is None


def test_a_frame_before_the_hello_is_a_violation() -> None:
    with pytest.raises(ProtocolError, match="a frame before its hello"):
        new(OPENING).check_open()
    new(OPEN).check_open()


def test_a_second_hello_is_a_violation() -> None:
    connection = new()
    connection.accept_hello(1, 42, 1)

    with pytest.raises(ProtocolError, match="a second hello"):
        connection.accept_hello(1, 42, 1)
    assert connection.peer_pid == 42


@pytest.mark.parametrize("version", [0, 2])
def test_a_peer_of_another_version_is_refused_with_both_versions_and_a_remedy(version: int) -> None:
    connection = new()

    text = (
        rf"the receiver \(pid 42\) refused this sender: the receiver has protocol version {version}, and the "
        "sender has version 1: install the same version of aiotensor"
    )
    with pytest.raises(RefusedError, match=text) as caught:
        connection.accept_hello(version, 42, 1)
    assert caught.value.pid == 42
    assert connection.is_closed


def test_only_another_version_is_a_mismatch() -> None:
    assert mismatch(3, 3, "the peer", "this side") is None
    assert mismatch(4, 3, "the peer", "this side") is not None


def test_both_sides_name_the_version_of_each_role() -> None:
    at_sender = Connection("sender", "the receiver").record_hello(5, 42, 4)
    at_receiver = Connection("receiver", "the sender").record_hello(4, 43, 5)

    remedy = "install the same version of aiotensor on both sides"
    assert at_sender == f"the receiver has protocol version 5, and the sender has version 4: {remedy}"
    assert at_receiver == f"the sender has protocol version 4, and the receiver has version 5: {remedy}"


@pytest.mark.parametrize("state", [OPENING, OPEN])
@pytest.mark.parametrize(
    ("close", "error", "is_retried"),
    [
        (Close(), PeerLostError, True),
        (Close("another took its place"), PeerLostError, False),
        (Close("another took its place", retry=True), PeerLostError, True),
        (Close("a limit", is_refusal=True), RefusedError, False),
        (Close("a limit", is_refusal=True, retry=True), RefusedError, False),
    ],
)
def test_the_last_frame_of_the_peer_decides_between_loss_refusal_and_retry(
    close: Close, error: type[Exception], is_retried: bool, state: ConnectionState
) -> None:
    connection = new(state)

    loss = connection.closed(close)
    assert type(loss.error) is error
    assert (close.reason or "it closed the connection") in str(loss.error)
    assert loss.is_retried == is_retried
    assert connection.is_closed


@pytest.mark.parametrize("state", [OPENING, OPEN])
def test_a_violation_ends_the_connection_and_is_not_retried(state: ConnectionState) -> None:
    connection = new(state)

    loss = connection.violated(ProtocolError("nonsense"))
    assert isinstance(loss.error, PeerLostError)
    assert "it broke the protocol: nonsense" in str(loss.error)
    assert not loss.is_retried
    assert connection.is_closed


def test_the_cause_of_a_violation_keeps_no_traceback_alive() -> None:
    with pytest.raises(ProtocolError) as caught:
        new().check_open()

    cause = new().violated(caught.value).error.__cause__
    assert isinstance(cause, ProtocolError)
    assert cause.args == caught.value.args
    assert cause.__traceback__ is None


@pytest.mark.parametrize("state", [OPENING, OPEN])
@pytest.mark.parametrize("is_retried", [False, True])
def test_the_loss_of_the_socket_ends_the_connection(is_retried: bool, state: ConnectionState) -> None:
    connection = new(state)

    loss = connection.lost("its process was killed", is_retried=is_retried)
    assert isinstance(loss.error, PeerLostError)
    assert loss.is_retried == is_retried
    assert connection.is_closed


def test_a_refusal_ends_the_connection_and_is_not_retried() -> None:
    connection = new(OPEN)

    loss = connection.refused("a limit")
    assert isinstance(loss.error, RefusedError)
    assert not loss.is_retried
    assert connection.is_closed


@pytest.mark.parametrize(
    ("state", "name", "pid"), [(OPENING, "the receiver", None), (OPEN, "the receiver (pid 42)", 42)]
)
def test_errors_name_the_process_of_the_peer_once_it_is_known(
    state: ConnectionState, name: str, pid: int | None
) -> None:
    losses: list[tuple[Loss, str]] = [
        (new(state).lost("it closed", is_retried=True), f"the connection to {name} was lost: it closed"),
        (new(state).refused("a limit"), f"{name} refused this sender: a limit"),
    ]

    for loss, text in losses:
        assert str(loss.error) == text
        assert loss.error.pid == pid
