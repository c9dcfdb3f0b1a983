from collections.abc import Callable

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aiotensor.errors import ProtocolError
from aiotensor.protocol.connection import Close
from aiotensor.protocol.exchange import (
    MAX_HEADER_BYTES,
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
    failure,
    read_from_client,
    read_from_server,
    write,
)
from aiotensor.protocol.frames import MAX_DIMENSIONS, MAX_TENSORS
from aiotensor.protocol.parts import BODY_BYTES
from aiotensor.types import TensorHandle
from tests.frames import LONGEST_TRACE

numbers = st.integers(0, 2**63 - 1)
bodies: st.SearchStrategy[memoryview] = st.binary(max_size=100).map(lambda data: memoryview(data))
handles = st.lists(
    st.builds(
        TensorHandle,
        sender=st.text(max_size=40),
        message=numbers,
        tensor=numbers,
        dtype=st.text(max_size=10),
        shape=st.lists(numbers, max_size=4).map(tuple),
        device=st.just("cpu"),
    ),
    max_size=5,
).map(tuple)

counts = st.integers(1, 2**63 - 1)
limits = st.none() | counts

from_clients = st.one_of(
    st.builds(ClientHello, st.integers(0, 99), numbers, st.text(max_size=64), limits, limits),
    st.builds(Ask, numbers, st.none() | bodies, handles, st.booleans(), st.none() | st.just(LONGEST_TRACE)),
    st.builds(Cancel, numbers),
)
from_servers = st.one_of(
    st.builds(ServerHello, st.integers(0, 99), numbers, st.just(""), counts, counts, limits, limits),
    st.builds(Answer, numbers, st.none() | bodies, handles),
    st.builds(Failure, numbers, st.text(max_size=64), st.text(max_size=200)),
    st.builds(Credit, numbers, numbers),
    st.builds(Close, st.text(max_size=200), st.booleans()),
)


@given(header=from_clients)
def test_a_server_decodes_every_header_of_a_client(header: FromClient) -> None:
    assert read_from_client(write(header)) == header


@given(header=from_servers)
def test_a_client_decodes_every_header_of_a_server(header: FromServer) -> None:
    assert read_from_server(write(header)) == header


@pytest.mark.parametrize("read", [read_from_client, read_from_server])
@given(data=st.binary(max_size=60))
@example(data=b"")
@example(data=b"\xc1")
@example(data=b"\x91" * 100_000)
@example(data=b"\x92\xa6cancel\xff")
@example(data=b"\x94\xa7failure\x00\xa1\xff\xa0")
def test_arbitrary_header_bytes_are_decoded_or_raise_protocol_error(
    read: Callable[[bytes], FromClient | FromServer], data: bytes
) -> None:
    try:
        header = read(data)
    except ProtocolError:
        return
    assert read(write(header)) == header


@pytest.mark.parametrize(
    "wrong",
    [
        ["cancel", -1],
        ["cancel", 2**63],
        ["cancel"],
        ["ask", 0],
        ["ask", 0, "text", []],
        ["ask", 0, b"", [{}] * 1025],
        ["ask", 0, b"", [{"sender": "x"}]],
        ["client", VERSION, 1, "x" * 65],
        ["client", VERSION, 1, "", 0],
        ["client", VERSION, 1, "", None, 0],
        ["client", VERSION, 1, "", None, 2**63],
        ["server", VERSION, 1],
        ["unknown", 1],
        {"number": 1},
        5,
        None,
    ],
    ids=str,
)
def test_a_header_out_of_bounds_is_refused(wrong: object) -> None:
    with pytest.raises(ProtocolError, match="a client sent a header that cannot be decoded"):
        read_from_client(msgspec.msgpack.encode(wrong))


@pytest.mark.parametrize("read", [read_from_client, read_from_server])
def test_a_header_beyond_the_size_limit_is_refused(
    read: Callable[[bytes], FromClient | FromServer],
) -> None:
    frame = ["ask", 0, None, [], True, None] if read is read_from_client else ["credit", 0, 0]
    read(msgspec.msgpack.encode([*frame, [1]]))  # a later version may add something
    with pytest.raises(ProtocolError, match=f"more than the limit of {MAX_HEADER_BYTES}"):
        read(msgspec.msgpack.encode([*frame, [1] * MAX_HEADER_BYTES]))


def test_a_later_version_may_add_items_at_the_end() -> None:
    data = msgspec.msgpack.encode(["cancel", 7, "new"])
    assert read_from_client(data) == Cancel(7)


@settings(max_examples=200)
@given(
    type_name=st.text(alphabet=st.characters(), max_size=200),
    text=st.text(alphabet=st.characters(categories=["Cs", "L", "So"]), max_size=200),
    times=st.integers(1, 500),
)
def test_a_failure_survives_encoding_with_any_type_name_and_text(
    type_name: str, text: str, times: int
) -> None:
    made = failure(3, Cause(type_name, text * times))
    read = read_from_server(write(made))
    assert read == made
    assert isinstance(read, Failure)
    assert len(read.text) <= 16 * 1024


def test_the_longest_valid_headers_are_within_the_size_limit() -> None:
    handle = TensorHandle("f" * 32, 2**63 - 1, 1023, "float8_e4m3fnuz", (2**63 - 1,) * MAX_DIMENSIONS, "cpu")
    body = memoryview(bytes(BODY_BYTES - 1))
    number = 2**63 - 1
    for header in (
        Ask(number, body, (handle,) * MAX_TENSORS, trace=LONGEST_TRACE),
        Answer(number, body, (handle,) * MAX_TENSORS, number, number),
        failure(number, Cause("x" * 100, "\U0001f4a5" * 20_000, is_loss=True), number, number),
    ):
        assert len(write(header)) <= MAX_HEADER_BYTES
