"""Limits on records, the order of frames in them, and the end of a connection, which both ends share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiotensor.errors import ProtocolError
from aiotensor.protocol.connection import Close, ConnectionState
from aiotensor.protocol.frames import (
    FROM_SENDER,
    LEAST_FRAME_BYTES,
    MAX_FRAMES,
    MAX_NUMBERS,
    MAX_RECORD_BYTES,
    TO_SENDER,
    VERSION,
    Discard,
    Discarded,
    Put,
    Release,
    Taken,
    Welcome,
    decode,
    encode,
)
from aiotensor.protocol.receiver import ReceiverConnection
from aiotensor.protocol.sender import SenderConnection
from aiotensor.tensors.inline import MAX_INLINE_BYTES
from tests.frames import frames_of, hello, put


def welcome(max_frame_bytes: int = MAX_RECORD_BYTES) -> Welcome:
    return Welcome(VERSION, 43, max_frame_bytes, "r", is_admitted=True)


def new_sender(max_frame_bytes: int | None = MAX_RECORD_BYTES) -> SenderConnection:
    """Return a sender's end after its hello, admitted unless the limit is None."""
    sender = SenderConnection(hello())
    sender.data_to_send()
    if max_frame_bytes is not None:
        sender.receive(encode(welcome(max_frame_bytes)))
    return sender


def new_receiver(max_frame_bytes: int = MAX_RECORD_BYTES, max_messages: int = 2) -> ReceiverConnection:
    """Return a receiver's end that has admitted the sender."""
    receiver = ReceiverConnection(
        hello(max_concurrent_videos=max_messages), welcome(max_frame_bytes), 1 << 20
    )
    receiver.admit()
    receiver.data_to_send()
    return receiver


def long_put(nbytes: int, message: int = 0) -> Put:
    return put(message=message, shape=(nbytes,), payload=bytes(nbytes), last=True)


def record_of(nbytes: int) -> bytes:
    """Return a record of this size with one frame."""
    overhead = len(encode(long_put(nbytes - 100))) - (nbytes - 100)
    record = encode(long_put(nbytes - overhead))
    assert len(record) == nbytes
    return record


# Records that are sent


def test_nothing_is_sent_without_a_command() -> None:
    assert list(new_sender().data_to_send()) == []
    assert list(new_receiver().data_to_send()) == []


def test_the_frames_of_several_commands_share_a_record_in_their_order() -> None:
    sender = new_sender()
    first, second = put(), put(message=1, last=True)
    sender.put(first)
    sender.put(second)
    sender.discard(0)

    [record] = sender.data_to_send()
    assert decode(FROM_SENDER, record) == [first, second, Discard(0)]
    assert list(sender.data_to_send()) == []


@given(
    limit=st.none() | st.sampled_from([LEAST_FRAME_BYTES, 20_000, MAX_RECORD_BYTES, 2**63 - 1]),
    sizes=st.lists(st.sampled_from([0, 3, 2048, 6 * 1024, MAX_INLINE_BYTES]), max_size=100),
)
def test_records_stay_within_every_limit_and_keep_the_order_of_frames(
    limit: int | None, sizes: list[int]
) -> None:
    sender = new_sender(limit)
    puts = [long_put(nbytes, message) for message, nbytes in enumerate(sizes)]
    for frame in puts:
        sender.put(frame)

    records = sender.data_to_send()
    assert [frame for record in records for frame in decode(FROM_SENDER, record)] == puts
    longest = LEAST_FRAME_BYTES if limit is None else min(limit, MAX_RECORD_BYTES)
    assert all(len(record) <= longest for record in records)


def test_a_record_has_no_more_frames_than_the_peer_accepts() -> None:
    sender = new_sender()
    for message in range(MAX_FRAMES + 1):
        sender.put(put(message=message, shape=(0,), payload=b"", last=True))

    records = sender.data_to_send()
    assert [len(decode(FROM_SENDER, record)) for record in records] == [MAX_FRAMES, 1]


def test_a_full_record_is_reported_until_it_is_written() -> None:
    sender = new_sender(None)
    is_full = []
    for message in range(2):
        sender.put(long_put(MAX_INLINE_BYTES, message))
        is_full.append(sender.has_full_record)
    assert is_full == [False, True]

    assert len(sender.data_to_send()) == 2
    assert not sender.has_full_record


def test_a_full_record_is_written_without_the_frames_that_follow_it() -> None:
    sender = new_sender(None)
    first, second = (long_put(MAX_INLINE_BYTES, message) for message in range(2))
    sender.put(first)
    assert sender.full_records() == []

    sender.put(second)
    [full] = sender.full_records()
    assert decode(FROM_SENDER, full) == [first]
    assert not sender.has_full_record

    third = put(message=2, shape=(0,), payload=b"", last=True)
    sender.put(third)
    [record] = sender.data_to_send()
    assert decode(FROM_SENDER, record) == [second, third]


def test_a_tensor_of_the_largest_inline_size_fits_into_a_record_of_every_receiver() -> None:
    sender = new_sender(None)
    frame = put(
        dtype="float8_e4m3fnuz", shape=(1,) * 64, payload=bytes(MAX_INLINE_BYTES), block=2**63 - 1, last=True
    )
    sender.put(frame)

    [record] = sender.data_to_send()
    assert len(record) <= LEAST_FRAME_BYTES


@pytest.mark.parametrize("count", [0, 1, MAX_NUMBERS, MAX_NUMBERS + 1, 100 * MAX_NUMBERS])
def test_answers_are_split_into_frames_and_records_within_every_limit(count: int) -> None:
    receiver = new_receiver(max_messages=2**63 - 1)
    largest = 2**63 - 1
    for number in range(count):
        receiver.release(largest - number)

    records = receiver.data_to_send()
    assert all(len(record) <= MAX_RECORD_BYTES for record in records)
    frames = [frame for record in records for frame in decode(TO_SENDER, record)]
    blocks = [block for frame in frames if isinstance(frame, Release) for block in frame.blocks]
    assert blocks == [largest - number for number in range(count)]
    assert len(frames) == -(-count // MAX_NUMBERS)


def test_answers_follow_the_frames_of_earlier_commands_and_are_sent_once() -> None:
    receiver = new_receiver()
    receiver.receive(encode(put(last=True), put(message=1)))
    receiver.release(7)
    receiver.discard(1)
    receiver.taken(0)

    [record] = receiver.data_to_send()
    assert decode(TO_SENDER, record) == [Taken((0,)), Discarded((1,)), Release((7,))]
    assert list(receiver.data_to_send()) == []


# Records that are received


def test_a_record_may_be_as_long_as_this_side_accepts_and_not_longer() -> None:
    assert len(new_receiver(LEAST_FRAME_BYTES).receive(record_of(LEAST_FRAME_BYTES))) == 1

    for limit in (LEAST_FRAME_BYTES, MAX_RECORD_BYTES):
        receiver = new_receiver(limit)
        with pytest.raises(ProtocolError, match=f"a record of more than {limit} bytes"):
            receiver.receive(record_of(limit + 1))
        assert receiver.is_closed


def test_a_sender_accepts_records_of_the_longest_size_only() -> None:
    sender = new_sender()

    with pytest.raises(ProtocolError, match=f"a record of more than {MAX_RECORD_BYTES} bytes"):
        sender.receive(bytes(MAX_RECORD_BYTES + 1))


@pytest.mark.parametrize("record", [b"", b"\xff\x00nonsense", encode(put())[:-1], encode(Taken((0,)))])
def test_a_record_that_cannot_be_read_is_a_violation(record: bytes) -> None:
    receiver = new_receiver()

    with pytest.raises(ProtocolError, match="a frame that cannot be decoded"):
        receiver.receive(record)
    assert receiver.is_closed


def test_a_second_hello_is_a_violation() -> None:
    receiver = new_receiver()

    with pytest.raises(ProtocolError, match="a frame that cannot be decoded"):
        receiver.receive(encode(hello()))


def test_a_record_without_frames_has_no_effect() -> None:
    assert new_receiver().receive(encode()) == []


def test_a_record_is_received_from_part_of_a_buffer() -> None:
    record = b"before" + encode(put(), Discard(0)) + b"behind"

    assert new_receiver().receive(memoryview(record)[6:-6]) == [put(), Discard(0)]


# The end


def test_frames_up_to_the_last_one_count_and_later_ones_are_ignored() -> None:
    receiver, sender = new_receiver(), new_sender()

    assert receiver.receive(encode(put(), Close(), put(message=9))) == [put(), Close()]
    assert receiver.state is ConnectionState.CLOSED
    assert receiver.receive(encode(put(message=9))) == []
    assert receiver.receive(b"nonsense") == []

    assert sender.receive(encode(Release((0,)), Close(), Taken((99,)))) == [Release((0,)), Close()]
    assert sender.state is ConnectionState.CLOSED
    assert sender.receive(encode(Taken((99,)))) == []
    assert sender.receive(b"nonsense") == []


def test_nothing_is_sent_by_a_sender_after_its_last_frame() -> None:
    sender = new_sender()
    sender.put(put())
    sender.close(Close(uses_memory=False))
    sender.end(0)
    sender.put(put(message=1))
    sender.discard(0)
    sender.close(Close(uses_memory=True))

    assert frames_of(sender) == [put(), Close(uses_memory=False)]
    sender.put(put(message=2))
    assert frames_of(sender) == []
    assert sender.receive(encode(Taken((0,)))) == []


def test_nothing_is_sent_by_a_receiver_after_its_last_frame() -> None:
    receiver = new_receiver()
    receiver.receive(encode(put(last=True), put(message=1, last=True)))
    receiver.taken(0)
    receiver.release(7)
    receiver.close(Close())
    receiver.taken(1)
    receiver.release(8)
    receiver.refuse("too late")

    [record] = receiver.data_to_send()
    assert decode(TO_SENDER, record) == [Taken((0,)), Release((7,)), Close()]
    receiver.release(9)
    assert list(receiver.data_to_send()) == []
    assert receiver.receive(encode(put(message=9))) == []


def test_nothing_is_sent_or_received_after_a_violation() -> None:
    receiver = new_receiver()
    with pytest.raises(ProtocolError):
        receiver.receive(encode(put(), put()))
    receiver.discard(0)
    receiver.release(0)

    assert receiver.is_closed
    assert list(receiver.data_to_send()) == []
    assert receiver.receive(encode(put(message=1))) == []
