"""One end of the connection between two ranks: joining, the order of messages, records, and the end."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiotensor.errors import ProtocolError, RefusedError
from aiotensor.protocol.connection import Close, ConnectionState
from aiotensor.protocol.frames import (
    ARENA,
    MAX_FRAMES,
    MAX_NUMBERS,
    MAX_RECORD_BYTES,
    VERSION,
    Attach,
    Put,
    Release,
    Taken,
    encode_record,
)
from aiotensor.protocol.ranks import FROM_RANK, FromRank, PutNone, RankConnection
from aiotensor.tensors.inline import MAX_INLINE_BYTES
from aiotensor.types import MAX_NUMBER
from tests.frames import hello, put
from tests.protocol.rank_ends import (
    MAX_BYTES,
    in_segment,
    inline,
    join,
    joined,
    new,
    receive,
    sent,
    violation,
    with_data,
)

OPENING, OPEN, CLOSED = ConnectionState


# Joining


def test_the_first_record_is_the_join_alone() -> None:
    connection = RankConnection(join(), "rank 1")
    connection.put(PutNone(0))
    connection.release(0)

    first, second = connection.data_to_send()
    assert FROM_RANK.decode(first) == [join()]
    assert FROM_RANK.decode(second) == [PutNone(0), Release((0,))]


def test_the_connection_is_open_once_the_peer_has_joined_with_the_same_limit() -> None:
    connection = new()
    assert connection.state is OPENING
    assert receive(connection, join()) == [join()]

    assert connection.state is OPEN
    assert connection.peer_pid == 43
    assert sent(connection) == []


@pytest.mark.parametrize("max_bytes", [0, MAX_BYTES - 1, MAX_BYTES + 1, MAX_NUMBER])
def test_a_peer_with_another_limit_is_refused(max_bytes: int) -> None:
    connection = new()
    text = (
        rf"rank 1 \(pid 43\) opened the pipe with max_bytes={max_bytes}, but this rank with {MAX_BYTES}: pass"
    )
    with pytest.raises(RefusedError, match=text) as caught:
        receive(connection, join(max_bytes))

    assert caught.value.pid == 43
    assert connection.state is CLOSED
    assert receive(connection, join()) == []


@pytest.mark.parametrize("max_bytes", [MAX_BYTES, 1])
def test_a_peer_of_another_version_is_refused_whatever_its_limit(max_bytes: int) -> None:
    connection = new()
    text = (
        r"rank 1 \(pid 43\) refused this rank: rank 1 has protocol version "
        f"{VERSION + 1}, and this rank has version {VERSION}:"
    )
    with pytest.raises(RefusedError, match=text) as caught:
        receive(connection, join(max_bytes, VERSION + 1))

    assert caught.value.pid == 43
    assert connection.state is CLOSED
    assert receive(connection, join()) == []


def test_a_second_join_is_a_violation() -> None:
    assert "a second hello" in violation(joined(), join())
    assert "a second hello" in violation(joined(), PutNone(0), join())
    assert "a second hello" in violation(new(), join(), join())
    assert "a second hello" in violation(joined(), join(version=VERSION + 1))


@pytest.mark.parametrize(
    "frame",
    [put(), PutNone(0), Taken(()), Taken((0,)), Release(()), Release((0,)), Attach(0, ARENA, 1)],
    ids=repr,
)
def test_a_frame_before_the_join_is_a_violation(frame: FromRank) -> None:
    assert "before its hello" in violation(new(), frame)
    assert "before its hello" in violation(new(), frame, join())


@pytest.mark.parametrize("frame", [hello(), ["welcome", VERSION, 1], ["discard", 0], ["end", 0, 1]], ids=repr)
def test_a_frame_of_another_role_is_a_violation(frame: object) -> None:
    assert "cannot be decoded" in violation(new(), frame)
    assert "cannot be decoded" in violation(joined(), frame)


@pytest.mark.parametrize("field", [{"pid": -1}, {"pid": 2**31}, {"max_bytes": -1}, {"max_bytes": 2**63}])
def test_a_join_with_impossible_numbers_is_a_violation(field: dict[str, int]) -> None:
    fields = {"version": VERSION, "pid": 1, "max_bytes": MAX_BYTES, **field}
    assert "cannot be decoded" in violation(new(), ["join", *fields.values()])


# The order of messages


def test_the_numbers_of_messages_increase_and_may_have_gaps() -> None:
    connection = joined()
    for number in (0, 1, 5, 6, MAX_NUMBER):
        assert receive(connection, PutNone(number)) == [PutNone(number)]
        connection.taken(number)

    assert connection.state is OPEN


def test_the_first_message_may_have_any_number() -> None:
    assert joined(PutNone(7)).state is OPEN


@pytest.mark.parametrize("make", [PutNone, in_segment, with_data, lambda number: inline(number, 3)])
def test_a_message_with_a_repeated_or_lower_number_is_a_violation(make: Callable[[int], FromRank]) -> None:
    assert "message 3 after 3" in violation(joined(make(3)), make(3))
    assert "message 2 after 3" in violation(joined(make(3)), make(2))
    assert "message 0 after 3" in violation(joined(PutNone(1), make(3)), make(0))


def test_the_number_of_a_message_that_was_taken_is_not_used_again() -> None:
    connection = joined(PutNone(0))
    connection.taken(0)
    assert "message 0 after 0" in violation(connection, PutNone(0))


def test_the_order_of_messages_in_one_record_is_validated_as_well() -> None:
    frames = [PutNone(0), inline(1, 3), Attach(0, ARENA, 1), in_segment(2)]
    assert receive(joined(), *frames) == frames
    assert "message 1 after 2" in violation(joined(), PutNone(0), PutNone(2), PutNone(1))


def test_the_numbers_of_the_two_directions_are_independent() -> None:
    connection = joined(PutNone(0), PutNone(1))
    connection.put(PutNone(0))
    receive(connection, Taken((0,)))
    connection.put(PutNone(5))
    assert receive(connection, PutNone(2)) == [PutNone(2)]


# Records


def test_nothing_is_sent_without_a_command() -> None:
    assert sent(joined(PutNone(0), inline(1, 3))) == []


def test_answers_share_a_record_with_the_messages_before_them() -> None:
    connection = joined(PutNone(0), PutNone(1))
    connection.taken(1)
    connection.put(inline(0, 3))
    connection.release(7)
    connection.put(PutNone(1))
    connection.taken(0)
    connection.release(7)

    [record] = connection.data_to_send()
    assert FROM_RANK.decode(record) == [inline(0, 3), PutNone(1), Taken((1, 0)), Release((7, 7))]
    assert sent(connection) == []


@given(st.lists(st.sampled_from([0, 3, 2048, 6 * 1024, MAX_INLINE_BYTES]), max_size=100), st.integers(0, 300))
def test_records_stay_within_every_limit_and_keep_the_order_of_frames(sizes: list[int], answers: int) -> None:
    connection = joined(max_bytes=1 << 30)
    for start in range(0, answers, MAX_FRAMES):
        receive(connection, *map(PutNone, range(start, min(start + MAX_FRAMES, answers))))
    messages = [inline(number, nbytes) if nbytes else PutNone(number) for number, nbytes in enumerate(sizes)]
    for message in messages:
        connection.put(message)
    for number in range(answers):
        connection.taken(number)
        connection.release(MAX_NUMBER - number)

    records = connection.data_to_send()
    frames = [FROM_RANK.decode(record) for record in records]
    assert all(len(record) <= MAX_RECORD_BYTES for record in records)
    assert all(len(each) <= MAX_FRAMES for each in frames)
    every = [frame for each in frames for frame in each]
    assert every[: len(messages)] == messages
    taken = [number for frame in every if isinstance(frame, Taken) for number in frame.messages]
    blocks = [number for frame in every if isinstance(frame, Release) for number in frame.blocks]
    assert taken == list(range(answers))
    assert blocks == [MAX_NUMBER - number for number in range(answers)]
    assert len(every) - len(messages) == 2 * -(-answers // MAX_NUMBERS)


@given(
    st.lists(st.sampled_from([0, 3, 2048, MAX_INLINE_BYTES]), max_size=2 * MAX_FRAMES),
    st.sampled_from([0, 1, MAX_NUMBERS + 1]),
)
def test_a_message_whose_bytes_the_transport_carries_is_in_the_last_record(
    sizes: list[int], answers: int
) -> None:
    connection = joined(max_bytes=1 << 30)
    receive(connection, *map(PutNone, range(min(answers, 1))))
    messages = [inline(number, nbytes) if nbytes else PutNone(number) for number, nbytes in enumerate(sizes)]
    for message in messages:
        connection.put(message)
    for number in range(answers):
        connection.release(number)
    if answers:
        connection.taken(0)
    last = with_data(len(messages))
    records = connection.put_with_data(last)

    frames = [FROM_RANK.decode(record) for record in records]
    assert [frame for each in frames for frame in each if isinstance(frame, Put | PutNone)] == [
        *messages,
        last,
    ]
    assert last in frames[-1]
    assert all(len(each) <= MAX_FRAMES for each in frames)
    assert sent(connection) == []
    receive(connection, Taken((len(messages),)))


def test_a_record_with_too_many_frames_or_bytes_is_a_violation() -> None:
    receive(joined(max_bytes=1 << 20), *map(PutNone, range(MAX_FRAMES)))
    violation(joined(max_bytes=1 << 20), *map(PutNone, range(MAX_FRAMES + 1)))
    assert f"a record of more than {MAX_RECORD_BYTES} bytes" in violation(
        joined(max_bytes=1 << 20), inline(0, MAX_RECORD_BYTES)
    )


@pytest.mark.parametrize("record", [b"", b"\xff\x00nonsense", encode_record([join()])[:-1], b"\xc0"])
def test_a_record_that_cannot_be_read_is_a_violation(record: bytes) -> None:
    for connection in (new(), joined()):
        with pytest.raises(ProtocolError, match="a frame that cannot be decoded"):
            connection.receive(record)
        assert connection.is_closed


# The end


@pytest.mark.parametrize("make", [new, joined])
def test_either_end_may_close_at_any_time(make: Callable[[], RankConnection]) -> None:
    connection = make()
    assert receive(connection, Close("enough")) == [Close("enough")]
    assert connection.state is CLOSED

    connection = make()
    connection.close(Close("enough"))
    assert connection.state is CLOSED
    assert sent(connection) == [Close("enough")]
    assert receive(connection, PutNone(0)) == []


def test_frames_before_a_close_count_and_later_ones_are_ignored() -> None:
    connection = joined()
    assert receive(connection, PutNone(0), Close(), PutNone(0), join()) == [PutNone(0), Close()]
    assert receive(connection, PutNone(0)) == []
    assert connection.receive(b"nonsense") == []


def test_messages_and_answers_precede_the_last_frame() -> None:
    connection = joined(PutNone(0))
    connection.taken(0)
    connection.release(3)
    connection.put(PutNone(0))
    connection.close(Close())

    assert sent(connection) == [PutNone(0), Taken((0,)), Release((3,)), Close()]


@pytest.mark.parametrize("ended_by", ["this end", "the peer", "a violation", "a loss"])
def test_commands_have_no_effect_on_a_closed_connection(ended_by: str) -> None:
    connection = joined(PutNone(0))
    match ended_by:
        case "this end":
            connection.close(Close())
        case "the peer":
            receive(connection, Close())
        case "a violation":
            violation(connection, PutNone(0))
        case "a loss":
            connection.lost("it died", is_retried=False)
    connection.put(PutNone(0))
    assert connection.put_with_data(with_data(1)) == []
    connection.taken(0)
    connection.taken(0)
    connection.release(7)
    connection.close(Close("again"))

    assert sent(connection) == ([Close()] if ended_by == "this end" else [])
    connection.put(PutNone(1))
    connection.release(8)
    assert sent(connection) == []


def test_a_violation_after_valid_frames_of_a_record_ends_the_connection() -> None:
    assert "message 0 after 1" in violation(joined(), PutNone(0), inline(1, 3), PutNone(0))
    assert "cannot be decoded" in violation(joined(), PutNone(0), ["nonsense"])
