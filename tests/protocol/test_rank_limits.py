"""One end of the connection between two ranks: the limits of the other end, and its answers."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiotensor.errors import ProtocolError
from aiotensor.protocol.blocks import ADDRESSES_PER_BYTE
from aiotensor.protocol.frames import ARENA, INLINE, OUT_OF_BAND, Attach, Taken
from aiotensor.protocol.ranks import FROM_RANK, LEAST_MESSAGE_BYTES, FromRank, PutNone, counted
from aiotensor.protocol.segments import LARGEST_PAGE_BYTES, MAX_SEGMENTS
from tests.frames import put
from tests.protocol.rank_ends import (
    MAX_BYTES,
    in_segment,
    inline,
    joined,
    receive,
    sent,
    violation,
    with_data,
)

LEAST, TWICE = LEAST_MESSAGE_BYTES, 2 * LEAST_MESSAGE_BYTES
LARGEST_SEGMENT = ADDRESSES_PER_BYTE * (MAX_BYTES + LARGEST_PAGE_BYTES)


# The limit on bytes


def test_a_message_counts_as_its_bytes_with_a_minimum() -> None:
    assert [counted(nbytes) for nbytes in (0, 1, LEAST - 1, LEAST, LEAST + 1)] == [LEAST] * 4 + [LEAST + 1]


@pytest.mark.parametrize("make", [PutNone, in_segment, with_data, lambda number: inline(number, 3)])
def test_small_messages_beyond_the_limit_are_a_violation(make: Callable[[int], FromRank]) -> None:
    connection = joined(*(make(number) for number in range(4)))
    assert f"more than its limit of {MAX_BYTES} bytes" in violation(connection, make(4))


def test_the_limit_may_be_reached_exactly() -> None:
    connection = joined(inline(0, TWICE), inline(1, LEAST + 1), max_bytes=MAX_BYTES + 1)
    receive(connection, PutNone(2))
    violation(connection, PutNone(3))

    violation(joined(inline(0, TWICE), inline(1, LEAST + 1)), PutNone(2))


def test_a_message_larger_than_the_limit_is_a_violation() -> None:
    assert "more than its limit" in violation(joined(), inline(0, MAX_BYTES + 1))
    assert receive(joined(), inline(0, MAX_BYTES)) == [inline(0, MAX_BYTES)]


def test_the_payload_of_a_tensor_in_a_segment_is_not_counted_as_its_bytes() -> None:
    long = put(placement=ARENA, payload=bytes(TWICE), block=0, last=True)
    connection = joined(long)
    for number in (1, 2, 3):
        receive(connection, PutNone(number))
    violation(connection, PutNone(4))


def test_a_message_that_was_taken_makes_room_for_as_many_bytes() -> None:
    connection = joined(inline(0, TWICE), PutNone(1), PutNone(2))
    connection.taken(1)
    receive(connection, PutNone(3))
    connection.taken(0)
    receive(connection, inline(4, TWICE))
    violation(connection, PutNone(5))


def test_messages_may_be_taken_in_any_order() -> None:
    connection = joined(*(PutNone(number) for number in range(4)))
    for number in (2, 0, 3, 1):
        connection.taken(number)

    assert sent(connection) == [Taken((2, 0, 3, 1))]
    assert receive(connection, inline(4, MAX_BYTES)) == [inline(4, MAX_BYTES)]


def test_a_message_is_taken_once() -> None:
    connection = joined(PutNone(0))
    connection.taken(0)
    for unknown in (0, 1):
        with pytest.raises(KeyError):
            connection.taken(unknown)


def test_bytes_carried_by_the_transport_replace_the_minimum_count() -> None:
    connection = joined(with_data(0), with_data(1))
    connection.count_data(0, TWICE)
    connection.count_data(1, 1)
    receive(connection, PutNone(2))
    violation(connection, PutNone(3))


def test_carried_bytes_beyond_the_limit_are_a_violation() -> None:
    connection = joined(PutNone(0), with_data(1))
    with pytest.raises(ProtocolError, match=f"more than its limit of {MAX_BYTES} bytes"):
        connection.count_data(1, 3 * LEAST + 1)
    connection.count_data(1, 3 * LEAST)


def test_carried_bytes_are_free_again_when_the_message_was_taken() -> None:
    connection = joined(with_data(0))
    connection.count_data(0, MAX_BYTES)
    connection.taken(0)
    receive(connection, with_data(1))
    connection.count_data(1, MAX_BYTES)
    violation(connection, PutNone(2))


@given(st.lists(st.tuples(st.integers(0, 9000), st.booleans(), st.integers(0, 3)), max_size=30))
def test_messages_are_accepted_exactly_within_the_limit(steps: list[tuple[int, bool, int]]) -> None:
    connection = joined()
    untaken: dict[int, int] = {}
    for number, (nbytes, is_data, takes) in enumerate(steps):
        for taken in list(untaken)[:takes]:
            connection.taken(taken)
            del untaken[taken]
        try:
            receive(connection, with_data(number) if is_data else inline(number, nbytes))
            if is_data:
                connection.count_data(number, nbytes)
        except ProtocolError:
            assert sum(untaken.values()) + counted(nbytes) > MAX_BYTES
            return
        untaken[number] = counted(nbytes)
        assert sum(untaken.values()) <= MAX_BYTES


# Answers of the peer


def test_the_peer_takes_messages_of_this_end_in_any_order() -> None:
    connection = joined()
    for number in (0, 3, 4):
        connection.put(PutNone(number))

    assert receive(connection, Taken((4, 0))) == [Taken((4, 0))]
    assert receive(connection, Taken(()), Taken((3,))) == [Taken(()), Taken((3,))]


@pytest.mark.parametrize(
    ("frames", "unknown"),
    [
        ([Taken((1,))], 1),
        ([Taken((0, 0))], 0),
        ([Taken((0,)), Taken((0,))], 0),
        ([Taken((0, 7))], 7),
        ([PutNone(5), Taken((5,))], 5),
    ],
)
def test_an_answer_to_an_unknown_message_is_a_violation(frames: list[FromRank], unknown: int) -> None:
    connection = joined()
    connection.put(PutNone(0))
    assert f"it took message {unknown}, which was not sent or was already taken" in violation(
        connection, *frames
    )


# Segments


def test_segments_are_attached_within_every_limit() -> None:
    connection = joined()
    for number in range(MAX_SEGMENTS):
        receive(connection, Attach(number, ARENA, LARGEST_SEGMENT if number else 1))
    assert f"more than {MAX_SEGMENTS} segments" in violation(connection, Attach(MAX_SEGMENTS, ARENA, 1))


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([Attach(0, INLINE, 1)], "memory for the unknown placement 'inline'"),
        ([Attach(0, OUT_OF_BAND, 1)], "memory for the unknown placement 'out of band'"),
        ([Attach(3, ARENA, 1), Attach(3, ARENA, 1)], "attached segment 3 twice"),
        ([Attach(0, ARENA, LARGEST_SEGMENT + 1)], f"attached {LARGEST_SEGMENT + 1} bytes, more than"),
        ([["attach", 0, ARENA, 0]], "cannot be decoded"),
    ],
)
def test_a_segment_beyond_a_limit_is_a_violation(frames: list[object], reason: str) -> None:
    assert reason in violation(joined(), *frames)


def test_a_segment_is_attached_by_a_record_of_its_own() -> None:
    connection = joined()
    connection.put(PutNone(0))
    assert FROM_RANK.decode(connection.attach(2, ARENA, 4096)) == [Attach(2, ARENA, 4096)]
    assert sent(connection) == [PutNone(0)]
