from collections.abc import Callable

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aiotensor.errors import ProtocolError
from aiotensor.protocol.frames import (
    VERSION,
    Bye,
    Discard,
    Discarded,
    End,
    Hello,
    Put,
    Release,
    Taken,
    ToReceiver,
    ToSender,
    Welcome,
    decode_to_receiver,
    decode_to_sender,
    encode,
)

Decode = Callable[[bytes], ToReceiver | ToSender]

LARGEST = 2**63 - 1
numbers = st.integers(0, LARGEST)
names = st.text(min_size=1, max_size=64)

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
frames_to_receiver = st.one_of(
    st.builds(Hello, st.integers(-(2**63), LARGEST), numbers, st.integers(1, LARGEST), numbers),
    puts,
    st.builds(End, numbers, numbers),
    st.builds(Discard, numbers),
    st.just(Bye()),
)
many_numbers = st.lists(numbers, max_size=20).map(tuple)
frames_to_sender = st.one_of(
    st.builds(Welcome, st.integers(-(2**63), LARGEST), numbers),
    st.builds(Taken, many_numbers),
    st.builds(Discarded, many_numbers),
    st.builds(Release, many_numbers),
    st.just(Bye()),
)

PUT = ["put", 0, 0, "uint8", [2, 3], "cpu", "inline", b"123456"]

both_ways = pytest.mark.parametrize("decode", [decode_to_receiver, decode_to_sender])


def read_or_refuse(decode: Decode, data: bytes) -> None:
    """Anything may come of bytes but another exception, or a frame that is none."""
    try:
        frame = decode(data)
    except ProtocolError:
        return
    assert isinstance(frame, ToReceiver | ToSender)
    assert decode(encode(frame)) == frame


@settings(deadline=None)
@given(frame=frames_to_receiver)
def test_what_a_sender_writes_the_receiver_reads(frame: ToReceiver) -> None:
    assert decode_to_receiver(encode(frame)) == frame


@settings(deadline=None)
@given(frame=frames_to_sender)
def test_what_the_receiver_writes_a_sender_reads(frame: ToSender) -> None:
    assert decode_to_sender(encode(frame)) == frame


def test_a_frame_of_4096_numbers_fits() -> None:
    frame = Taken((LARGEST,) * 4096)

    assert decode_to_sender(encode(frame)) == frame


@both_ways
@settings(deadline=None)
@given(data=st.binary(max_size=100))
@example(b"")
@example(b"\xc1")
@example(msgspec.msgpack.encode(["put", 0, 0]))
@example(b"\x92\xa3bye\xa1\xff")  # text that is no UTF-8, in a field that is ignored
@example(b"\x92\xa7discard\xa1\xff")
@example(b"\x91\xa3\xff\xff\xff")
def test_any_bytes_are_a_frame_or_refused(decode: Decode, data: bytes) -> None:
    read_or_refuse(decode, data)


@both_ways
@settings(deadline=None)
@given(frame=frames_to_receiver | frames_to_sender, data=st.data())
def test_any_part_of_a_frame_is_a_frame_or_refused(
    decode: Decode, frame: ToReceiver | ToSender, data: st.DataObject
) -> None:
    encoded = encode(frame)
    read_or_refuse(decode, encoded[: data.draw(st.integers(0, len(encoded) - 1))])


@both_ways
@settings(deadline=None)
@given(frame=frames_to_receiver | frames_to_sender, data=st.data())
def test_a_frame_with_one_byte_changed_is_a_frame_or_refused(
    decode: Decode, frame: ToReceiver | ToSender, data: st.DataObject
) -> None:
    encoded = bytearray(encode(frame))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    read_or_refuse(decode, bytes(encoded))


@both_ways
@pytest.mark.parametrize("depth", [10, 1_000, 60_000])
def test_a_frame_of_lists_in_lists_is_a_frame_or_refused_at_any_depth(decode: Decode, depth: int) -> None:
    read_or_refuse(decode, b"\x92" + msgspec.msgpack.encode("bye") + b"\x91" * depth + b"\xc0")


@both_ways
def test_a_frame_with_something_behind_it_is_refused(decode: Decode) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(Bye()) + encode(Bye()))


@pytest.mark.parametrize(
    "frame", [Hello(VERSION, 1, 1, 1), Discard(0), End(0, 1)], ids=lambda frame: type(frame).__name__
)
def test_a_sender_refuses_what_only_senders_say(frame: ToReceiver) -> None:
    with pytest.raises(ProtocolError, match="receiver sent a frame that cannot be read"):
        decode_to_sender(encode(frame))


@pytest.mark.parametrize(
    "frame",
    [Welcome(VERSION, 1), Taken((0,)), Discarded((0,)), Release((0,))],
    ids=lambda frame: type(frame).__name__,
)
def test_a_receiver_refuses_what_only_receivers_say(frame: ToSender) -> None:
    with pytest.raises(ProtocolError, match="sender sent a frame that cannot be read"):
        decode_to_receiver(encode(frame))


@pytest.mark.parametrize(
    "items",
    [
        ["hello", VERSION, -1, 1, 1],
        ["hello", VERSION, 1, 0, 1],
        ["hello", VERSION, 1, 1, -1],
        ["hello", VERSION, 1, 1, 2**63],
        ["hello", "1", 1, 1, 1],
        ["end", -1, 1],
        ["end", 0, -1],
        ["end", 2**63, 1],
        ["end", 0, 1.5],
        ["end", 0],
        ["discard", -1],
        ["discard", None],
        ["discard", True],
        ["discard"],
        ["discarded", [0]],
        [],
        {"type": "bye"},
        "bye",
        None,
    ],
    ids=repr,
)
def test_a_number_out_of_bounds_or_a_wrong_type_is_refused(items: object) -> None:
    with pytest.raises(ProtocolError):
        decode_to_receiver(msgspec.msgpack.encode(items))


def test_a_put_without_its_optional_fields_has_their_defaults() -> None:
    frame = decode_to_receiver(msgspec.msgpack.encode(PUT))

    assert frame == Put(0, 0, "uint8", (2, 3), "cpu", "inline", b"123456", None, False, False, False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (1, -1),
        (1, 2**63),
        (2, -1),
        (2, 2**63),
        (3, ""),
        (3, "x" * 65),
        (3, b"uint8"),
        (4, [-1]),
        (4, [2**63]),
        (4, [1] * 65),
        (4, 3),
        (5, ""),
        (5, "x" * 65),
        (6, ""),
        (6, "x" * 65),
        (7, "text"),
        (7, None),
        (8, -1),
        (8, 2**63),
        (9, None),
        (10, 1),
        (11, "yes"),
    ],
    ids=str,
)
def test_a_put_with_one_wrong_field_is_refused(field: int, value: object) -> None:
    items: list[object] = [*PUT, None, False, False, False]
    decode_to_receiver(msgspec.msgpack.encode(items))  # which is right as it is

    items[field] = value
    with pytest.raises(ProtocolError):
        decode_to_receiver(msgspec.msgpack.encode(items))


@pytest.mark.parametrize("tag", ["taken", "discarded", "release"])
@pytest.mark.parametrize(
    "value", [[-1], [2**63], [0] * 4097, 0, None, ["0"]], ids=lambda value: str(value)[:9]
)
def test_numbers_out_of_bounds_and_too_many_are_refused(tag: str, value: object) -> None:
    decode_to_sender(msgspec.msgpack.encode([tag, [0, 1]]))

    with pytest.raises(ProtocolError):
        decode_to_sender(msgspec.msgpack.encode([tag, value]))


unknown_items = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@both_ways
@settings(deadline=None)
@given(unknown=st.lists(unknown_items, min_size=1, max_size=3), data=st.data())
def test_fields_that_a_later_version_added_are_ignored(
    decode: Decode, unknown: list[object], data: st.DataObject
) -> None:
    frame = data.draw(frames_to_receiver if decode is decode_to_receiver else frames_to_sender)
    items = [*msgspec.msgpack.decode(encode(frame)), *unknown]

    assert decode(msgspec.msgpack.encode(items)) == frame
