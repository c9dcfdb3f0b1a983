from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aiotensor.errors import ProtocolError
from aiotensor.protocol.connection import Close
from aiotensor.protocol.frames import (
    FROM_SENDER,
    LEAST_FRAME_BYTES,
    MAX_FRAMES,
    MAX_HELLO_BYTES,
    MAX_NUMBERS,
    MAX_RECORD_BYTES,
    OPENING,
    TO_INSPECTOR,
    TO_SENDER,
    VERSION,
    Attach,
    Discard,
    Discarded,
    End,
    FromSender,
    Hello,
    Inspect,
    Opening,
    Put,
    ReceiverReport,
    Release,
    SenderSummary,
    Taken,
    ToInspector,
    ToSender,
    Welcome,
    decode,
    encode,
)
from aiotensor.types import MAX_NUMBER, ReceiverStatistics
from tests.frames import hello, receiver_statistics, record_of

Frames = list[FromSender] | list[ToSender] | list[ToInspector] | list[Opening]
Decode = Callable[[bytes], Frames]

numbers = st.integers(0, MAX_NUMBER)
pids = st.integers(0, 2**31 - 1)
names = st.text(min_size=1, max_size=64)
versions = st.integers(-(2**63), MAX_NUMBER)
closes = st.builds(Close, st.text(max_size=100), st.booleans(), st.booleans(), st.booleans())

puts = st.builds(
    Put,
    message=numbers,
    tensor=numbers,
    dtype=names,
    shape=st.lists(numbers, max_size=64).map(tuple),
    device=names,
    placement=names,
    payload=st.binary(max_size=300),
    block=st.none() | numbers,
    last=st.booleans(),
    requires_grad=st.booleans(),
    is_parameter=st.booleans(),
)
errors = st.dictionaries(names, numbers, max_size=4)
receiver_fields: dict[str, st.SearchStrategy[Any]] = {
    **{
        field: st.none() | numbers if field.startswith("max_") else numbers
        for field in ReceiverStatistics.__struct_fields__
    },
    "errors": errors,
}
summaries = st.builds(SenderSummary, names, *[numbers] * 9)
many_numbers = st.lists(numbers, max_size=20).map(tuple)
welcomes = st.builds(
    Welcome,
    versions,
    pids,
    st.integers(LEAST_FRAME_BYTES, MAX_NUMBER),
    st.text(max_size=64),
    st.booleans(),
)

openings = st.one_of(
    st.builds(Hello, versions, pids, names, st.integers(1, MAX_NUMBER), numbers, numbers),
    st.builds(Inspect, versions, pids),
)
frames_from_sender = st.one_of(
    st.builds(Attach, numbers, names, st.integers(1, MAX_NUMBER)),
    puts,
    st.builds(End, numbers, numbers),
    st.builds(Discard, numbers),
    closes,
)
frames_to_sender = st.one_of(
    welcomes,
    st.builds(Taken, many_numbers),
    st.builds(Discarded, many_numbers),
    st.builds(Release, many_numbers),
    closes,
)
frames_to_inspector = st.one_of(
    welcomes,
    st.builds(
        ReceiverReport,
        st.builds(ReceiverStatistics, **receiver_fields),
        st.lists(summaries, max_size=4).map(tuple),
        st.booleans(),
    ),
    closes,
)
records_from_sender = st.lists(frames_from_sender, max_size=4)
records_to_sender = st.lists(frames_to_sender, max_size=4)
records_to_inspector = st.lists(frames_to_inspector, max_size=4)
records: st.SearchStrategy[Any] = st.one_of(
    openings.map(lambda frame: [frame]), records_from_sender, records_to_sender, records_to_inspector
)

DECODERS: dict[str, Decode] = {
    "opening": partial(decode, OPENING),
    "from sender": partial(decode, FROM_SENDER),
    "to sender": partial(decode, TO_SENDER),
    "to inspector": partial(decode, TO_INSPECTOR),
}
all_decoders = pytest.mark.parametrize("decode_record", DECODERS.values(), ids=DECODERS)
all_decoders_of_several_frames = pytest.mark.parametrize(
    "decode_record", list(DECODERS.values())[1:], ids=list(DECODERS)[1:]
)


def decode_or_refuse(decode_record: Decode, data: bytes) -> None:
    """Check that bytes are either frames, which encode to the same frames again, or refused."""
    try:
        frames = decode_record(data)
    except ProtocolError:
        return
    assert all(isinstance(frame, Opening | FromSender | ToSender | ToInspector) for frame in frames)
    assert decode_record(encode(*frames)) == frames


# Records


@given(frame=openings)
def test_the_first_record_contains_one_frame(frame: Opening) -> None:
    record = encode(frame)
    assert decode(OPENING, record) == [frame]
    assert len(record) <= MAX_HELLO_BYTES

    for frames in ([], [frame, frame]):
        with pytest.raises(ProtocolError):
            decode(OPENING, encode(*frames))


@given(frames=records_from_sender)
def test_a_receiver_decodes_the_frames_of_a_sender_in_order(frames: list[FromSender]) -> None:
    assert decode(FROM_SENDER, encode(*frames)) == frames


@given(frames=records_to_inspector)
def test_an_inspector_decodes_the_frames_of_a_receiver_in_order(frames: list[ToInspector]) -> None:
    assert decode(TO_INSPECTOR, encode(*frames)) == frames


@given(frames=records_to_sender)
def test_a_sender_decodes_the_frames_of_a_receiver_in_order(frames: list[ToSender]) -> None:
    assert decode(TO_SENDER, encode(*frames)) == frames


@all_decoders_of_several_frames
def test_a_record_may_contain_no_frame(decode_record: Decode) -> None:
    assert decode_record(encode()) == []


def test_a_record_is_decoded_from_part_of_a_buffer() -> None:
    record = b"before" + encode(Taken((1, 2)), Close()) + b"behind"

    assert decode(TO_SENDER, memoryview(record)[6:-6]) == [Taken((1, 2)), Close()]


def test_a_record_with_more_frames_than_the_limit_is_refused() -> None:
    frames = [Discard(0)] * MAX_FRAMES

    assert decode(FROM_SENDER, encode(*frames)) == frames
    with pytest.raises(ProtocolError, match=f"length <= {MAX_FRAMES}"):
        decode(FROM_SENDER, encode(*frames, Discard(0)))
    with pytest.raises(ProtocolError, match=f"length <= {MAX_FRAMES}"):
        decode(TO_SENDER, encode(*[Taken((0,))] * (MAX_FRAMES + 1)))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_frame_that_cannot_be_decoded_makes_its_record_invalid(place: int) -> None:
    frames: list[object] = [["discard", 1], ["discard", 2]]
    frames.insert(place, ["discard", -1])

    with pytest.raises(ProtocolError):
        decode(FROM_SENDER, record_of(*frames))


def test_a_frame_with_more_numbers_than_the_limit_is_refused() -> None:
    frames = [Taken((MAX_NUMBER,) * MAX_NUMBERS)] * MAX_FRAMES

    assert decode(TO_SENDER, encode(*frames)) == frames
    assert len(encode(*frames)) <= MAX_RECORD_BYTES
    with pytest.raises(ProtocolError, match=f"length <= {MAX_NUMBERS}"):
        decode(TO_SENDER, encode(Taken((MAX_NUMBER,) * (MAX_NUMBERS + 1))))


# Arbitrary bytes


@all_decoders
@given(data=st.binary(max_size=100))
@example(b"")
@example(b"\xc1")
@example(b"\xc0")
@example(record_of(["put", 0, 0]))
@example(b"\x91\x96\xa5close\xa0\xc2\xc2\xc2\xa1\xff")  # text that is not UTF-8, in a field that is ignored
@example(b"\x91\x92\xa5close\xa1\xff")
@example(b"\x91\x92\xa7discard\xa1\xff")
@example(b"\x91\x91\xa3\xff\xff\xff")
def test_arbitrary_bytes_are_decoded_as_frames_or_refused(decode_record: Decode, data: bytes) -> None:
    decode_or_refuse(decode_record, data)


@all_decoders
@given(frames=records, data=st.data())
def test_truncated_records_are_decoded_or_refused(
    decode_record: Decode, frames: Frames, data: st.DataObject
) -> None:
    encoded = encode(*frames)
    decode_or_refuse(decode_record, encoded[: data.draw(st.integers(0, len(encoded) - 1))])


@all_decoders
@given(frames=records, data=st.data())
def test_corrupted_records_are_decoded_or_refused(
    decode_record: Decode, frames: Frames, data: st.DataObject
) -> None:
    encoded = bytearray(encode(*frames))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    decode_or_refuse(decode_record, bytes(encoded))


@all_decoders
@pytest.mark.parametrize("depth", [10, 1_000, 60_000])
def test_deeply_nested_lists_are_decoded_or_refused(decode_record: Decode, depth: int) -> None:
    start = b"\x91\x96" + msgspec.msgpack.encode("close") + b"\xa0\xc2\xc2\xc2"
    decode_or_refuse(decode_record, start + b"\x91" * depth + b"\xc0")


@all_decoders
def test_bytes_after_a_record_are_refused(decode_record: Decode) -> None:
    with pytest.raises(ProtocolError):
        decode_record(encode(Close()) + encode(Close()))


@all_decoders
@pytest.mark.parametrize("record", [["close", ""], {}, {"type": "close"}, "close", None, 0], ids=repr)
def test_a_record_that_is_no_list_of_frames_is_refused(decode_record: Decode, record: object) -> None:
    with pytest.raises(ProtocolError):
        decode_record(msgspec.msgpack.encode(record))


# Directions

SAMPLES: dict[type, Any] = {
    Hello: hello(),
    Inspect: Inspect(VERSION, 1),
    Attach: Attach(0, "arena", 1),
    Put: Put(0, 0, "uint8", (3,), "cpu", "inline", b"abc"),
    End: End(0, 1),
    Discard: Discard(0),
    Welcome: Welcome(VERSION, 1),
    Taken: Taken((0,)),
    Discarded: Discarded((0,)),
    Release: Release((0,)),
    ReceiverReport: ReceiverReport(receiver_statistics(), ()),
    Close: Close(),
}
DIRECTIONS: dict[str, set[type]] = {
    "opening": {Hello, Inspect},
    "from sender": {Attach, Put, End, Discard, Close},
    "to sender": {Welcome, Taken, Discarded, Release, Close},
    "to inspector": {Welcome, ReceiverReport, Close},
}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", SAMPLES, ids=lambda kind: kind.__name__)
def test_each_frame_is_decoded_in_its_directions_only(direction: str, kind: type) -> None:
    record = encode(SAMPLES[kind])
    if kind in DIRECTIONS[direction]:
        assert DECODERS[direction](record) == [SAMPLES[kind]]
        return
    with pytest.raises(ProtocolError, match="it sent a frame that cannot be decoded"):
        DECODERS[direction](record)


# Later versions

unknown_items = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(unknown=st.lists(unknown_items, min_size=1, max_size=3), data=st.data())
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_fields_that_a_later_version_added_are_ignored(
    direction: str, unknown: list[object], data: st.DataObject
) -> None:
    frame = data.draw(
        {
            "opening": openings,
            "from sender": frames_from_sender,
            "to sender": frames_to_sender,
            "to inspector": frames_to_inspector,
        }[direction]
    )
    items = [*msgspec.msgpack.decode(encode(frame))[0], *unknown]

    assert DECODERS[direction](record_of(items)) == [frame]
