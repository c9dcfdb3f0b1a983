"""All frames: the decoding in each direction, and the limits on every field.

Valid and invalid values of each field follow from its type, so these tests cover frames that are added later.
"""

from collections.abc import Callable, Iterator
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect as types

from aiotensor.errors import ProtocolError
from aiotensor.memory.tensors import MAX_INLINE_BYTES
from aiotensor.protocol import frames
from aiotensor.protocol.frames import (
    MAX_DIMENSIONS,
    MAX_FRAMES,
    MAX_HELLO_BYTES,
    MAX_NUMBERS,
    MAX_RECORD_BYTES,
    MAX_ROWS,
    MAX_TEXT,
    MAX_TYPE_NAME,
    Attributes,
    Close,
    Discard,
    Failure,
    Hello,
    Message,
    Put,
    ReceiverReport,
    SenderSummary,
    Taken,
    bounded,
    decode,
    decode_hello,
    encode,
    encode_record,
)
from aiotensor.types import MAX_NUMBER
from tests.frames import LONGEST_TRACE, hello, receiver_statistics
from tests.selection import COMPLETE

# Any value that a later version could add.
unknown_items = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)

# Types


def plain(info: types.Type) -> types.Type:
    """Return a type without its metadata, and without None."""
    match info:
        case types.Metadata():
            return plain(info.type)
        case types.UnionType():
            [only] = [one for one in info.types if not isinstance(one, types.NoneType)]
            return plain(only)
    return info


def may_be_none(info: types.Type) -> bool:
    info = info.type if isinstance(info, types.Metadata) else info
    return isinstance(info, types.UnionType) and info.includes_none


def values(info: types.Type) -> st.SearchStrategy[Any]:
    """Return a strategy for all valid values of a type."""
    found: st.SearchStrategy[Any]
    match plain(info):
        case types.IntType(ge=least, le=most):
            found = st.integers(-(2**63) if least is None else least, 2**63 - 1 if most is None else most)
        case types.StrType(min_length=least, max_length=most):
            found = st.text(min_size=least or 0, max_size=min(most or 20, 20))
        case types.BoolType():
            found = st.booleans()
        case types.BytesType():
            found = st.binary(max_size=20)
        case types.MemoryViewType():
            found = st.binary(max_size=20).map(lambda data: memoryview(data))
        case types.VarTupleType(item_type=item, max_length=most):
            found = st.lists(values(item), max_size=min(most or 5, 5)).map(tuple)
        case types.DictType(key_type=key, value_type=value, max_length=most):
            found = st.dictionaries(values(key), values(value), max_size=min(most or 5, 5))
        case types.StructType(cls=cls, fields=fields):
            found = st.builds(cls, **{field.name: values(field.type) for field in fields})
        case other:
            raise TypeError(f"a field has a type for which this test has no values: {other}")
    return st.none() | found if may_be_none(info) else found


def simplest(info: types.Type) -> Any:
    """Return a valid value as it is encoded."""
    match plain(info):
        case types.IntType(ge=least):
            return least or 0
        case types.StrType(min_length=least):
            return "x" * (least or 0)
        case types.BoolType():
            return False
        case types.BytesType() | types.MemoryViewType():
            return b""
        case types.VarTupleType():
            return []
        case types.DictType():
            return {}
        case types.StructType(fields=fields, array_like=True):
            return [simplest(field.type) for field in fields]
        case types.StructType(fields=fields):
            return {field.name: simplest(field.type) for field in fields}
    raise TypeError(f"a field has a type for which this test has no values: {info}")


def wrong(info: types.Type) -> Iterator[Any]:
    """Yield values beyond each limit of a type, and of other types."""
    if not may_be_none(info):
        yield None
    match plain(info):
        case types.IntType(ge=least, le=most):
            yield from ("0", 1.5, True)
            if least is not None:
                yield least - 1
            if most is not None:
                yield most + 1
        case types.StrType(min_length=least, max_length=most):
            yield from (0, b"x")
            if least:
                yield "x" * (least - 1)
            if most is not None:
                yield "x" * (most + 1)
        case types.BoolType():
            yield from (0, "yes")
        case types.BytesType() | types.MemoryViewType():
            yield from ("text", 0, [])
        case types.VarTupleType(item_type=item, max_length=most):
            yield from (0, "text", *([one] for one in wrong(item)))
            if most is not None:
                yield [simplest(item)] * (most + 1)
        case types.DictType(key_type=key, value_type=value, max_length=most):
            yield from ("text", *({one: simplest(value)} for one in wrong(key) if one is not None))
            yield from ({simplest(key): one} for one in wrong(value))
            if most is not None:
                yield {str(number): simplest(value) for number in range(most + 1)}
        case types.StructType(fields=fields, array_like=True):
            good = [simplest(field.type) for field in fields]
            yield from (0, "text", *([[]] if any(field.required for field in fields) else []))
            for place, field in enumerate(fields):
                yield from ([*good[:place], one, *good[place + 1 :]] for one in wrong(field.type))
        case types.StructType():
            yield from (0, "text", {})
        case other:
            raise TypeError(f"a field has a type for which this test has no values: {other}")


def unlimited(info: types.Type, name: str = "") -> Iterator[str]:
    """Yield the names of fields whose values have no limit of their own."""
    match plain(info):
        case types.IntType(le=None) | types.StrType(max_length=None):
            yield name
        case types.BytesType() | types.MemoryViewType():
            yield name
        case types.VarTupleType(item_type=item, max_length=most):
            yield from unlimited(item, name)
            if most is None:
                yield name
        case types.DictType(key_type=key, value_type=value, max_length=most):
            yield from (*unlimited(key, name), *unlimited(value, name), *([name] if most is None else []))
        case types.StructType(cls=cls, fields=fields):
            for field in fields:
                yield from unlimited(field.type, f"{cls.__name__}.{field.name}")


# Directions


class Direction:
    """The frames of one kind of record, by their tags; a hello is sent alone."""

    def __init__(self, read: Callable[[bytes], list[Any]], *structs: Any, is_single: bool = False) -> None:
        self.read, self.is_single = read, is_single
        self.structs: dict[object, types.StructType] = {}
        for struct in structs:
            info = types.type_info(struct)
            assert isinstance(info, types.StructType)
            self.structs[info.tag] = info
        frame = st.one_of([values(info) for info in self.structs.values()])
        self.lists = st.lists(frame, min_size=1, max_size=1 if is_single else 4)


# The fields of distributions depend on each other, so that arbitrary `PublisherReport`s are not valid.
FRAMES = [one for one in get_args(frames.Frame) if one is not frames.PublisherReport]
DIRECTIONS = {
    "first record": Direction(lambda data: [decode_hello(data)], Hello, is_single=True),
    "later record": Direction(decode, *FRAMES),
}
ANY_STRUCT = {tag: one for direction in DIRECTIONS.values() for tag, one in direction.structs.items()}
each_direction = pytest.mark.parametrize("direction", DIRECTIONS.values(), ids=DIRECTIONS)
any_direction = st.sampled_from(list(DIRECTIONS.values()))
examples = settings(max_examples=500 if COMPLETE else 60)


@examples
@given(direction=any_direction, unknown=st.lists(unknown_items, max_size=3), data=st.data())
def test_frames_are_decoded_in_order_without_items_that_a_later_version_added(
    direction: Direction, unknown: list[object], data: st.DataObject
) -> None:
    sent = data.draw(direction.lists)
    longer = [[*msgspec.msgpack.decode(msgspec.msgpack.encode(frame)), *unknown] for frame in sent]
    assert direction.read(encode_record(sent)) == direction.read(encode_record(longer)) == sent


@pytest.mark.promise(25)
@each_direction
def test_a_frame_with_one_wrong_or_missing_field_is_refused(direction: Direction) -> None:
    def refuses(items: object) -> None:
        with pytest.raises(ProtocolError):
            direction.read(encode_record([items]))

    for tag, info in direction.structs.items():
        good = [tag, *(simplest(field.type) for field in info.fields)]
        assert direction.read(encode_record([good])), "valid without the change"
        required = sum(field.required for field in info.fields)
        refuses(good[:required]) if required else None
        for place, field in enumerate(info.fields, 1):
            for value in wrong(field.type):
                refuses([*good[:place], value, *good[place + 1 :]])


@pytest.mark.promise(26)
def test_every_field_has_a_limit_unless_the_size_of_its_record_is_its_limit() -> None:
    found = {
        name
        for direction in DIRECTIONS.values()
        for info in direction.structs.values()
        for name in unlimited(info)
    }
    assert found == {"Put.payload", "Message.payload", "Hello.version"}


@each_direction
def test_only_the_frames_of_a_direction_are_decoded(direction: Direction) -> None:
    for tag, info in ANY_STRUCT.items():
        data = encode_record([[tag, *(simplest(field.type) for field in info.fields)]])
        if tag in direction.structs:
            assert [type(frame) for frame in direction.read(data)] == [info.cls]
        else:
            with pytest.raises(ProtocolError, match="cannot be decoded"):
                direction.read(data)


# Arbitrary bytes


def decode_or_refuse(direction: Direction, data: bytes) -> None:
    """Check that bytes are either frames, which encode to the same frames again, or refused."""
    try:
        found = direction.read(data)
    except ProtocolError:
        return
    assert direction.read(encode_record(found)) == found if found else not direction.is_single


@examples
@given(direction=any_direction, source=any_direction, data=st.data())
def test_truncated_altered_and_arbitrary_records_are_decoded_or_refused(
    direction: Direction, source: Direction, data: st.DataObject
) -> None:
    record = bytearray(encode_record(data.draw(source.lists)))
    place = data.draw(st.integers(0, len(record) - 1))
    decode_or_refuse(direction, bytes(record[:place]))
    record[place] = data.draw(st.integers(0, 255))
    decode_or_refuse(direction, bytes(record))
    decode_or_refuse(direction, data.draw(st.binary(max_size=100)))


@each_direction
def test_records_with_an_invalid_structure_are_refused(direction: Direction) -> None:
    close = msgspec.msgpack.encode("close")
    for depth in (10, 1_000, 60_000):
        decode_or_refuse(direction, b"\x91\x96" + close + b"\xa0\xc2\xc2\xc2" + b"\x91" * depth + b"\xc0")
    decode_or_refuse(direction, b"\x91\x96" + close + b"\xa0\xc2\xc2\xc2\xa1\xff")  # text that is not UTF-8
    structures: list[object] = [{}, {"type": "close"}, "close", None, 0, [["nonsense"]], [[]]]
    for structure in structures:
        with pytest.raises(ProtocolError):
            direction.read(msgspec.msgpack.encode(structure))
    [valid, *_] = [
        encode_record([[tag, *(simplest(field.type) for field in info.fields)]])
        for tag, info in direction.structs.items()
    ]
    direction.read(valid)
    for data in (b"", b"\xc1", b"\x91\x91\xa3\xff\xff\xff", valid[:-1], valid + valid):
        with pytest.raises(ProtocolError, match="cannot be decoded"):
            direction.read(data)


# Sizes


def test_the_first_record_is_short_and_contains_one_hello() -> None:
    name = "\N{GRINNING FACE}" * 64
    longest = hello(pid=2**31 - 1, role=name, id=name, publisher=name, next=MAX_NUMBER, first=MAX_NUMBER)
    assert decode_hello(encode(longest)) == longest
    padded = [*msgspec.msgpack.decode(msgspec.msgpack.encode(longest)), bytes(MAX_HELLO_BYTES)]
    for record in (encode(), encode(longest, longest), encode(Close()), encode_record([padded])):
        with pytest.raises(ProtocolError):
            decode_hello(record)


def test_a_record_has_at_most_max_frames_with_max_numbers_each() -> None:
    puts, answers = [Discard(0)] * MAX_FRAMES, [Taken((MAX_NUMBER,) * MAX_NUMBERS)] * MAX_FRAMES
    for sent in (puts, answers):
        assert len(encode(*sent)) <= MAX_RECORD_BYTES
        assert decode(encode(*sent)) == sent
    with pytest.raises(ProtocolError, match=f"length <= {MAX_FRAMES}"):
        decode(encode(*[Close()] * (MAX_FRAMES + 1)))


def test_the_longest_frame_of_each_kind_fits_into_a_record() -> None:
    name = "\N{GRINNING FACE}" * 64
    put = Put(
        *(MAX_NUMBER, MAX_NUMBER, name, (MAX_NUMBER,) * MAX_DIMENSIONS, name, name),
        *(bytes(MAX_INLINE_BYTES), MAX_NUMBER),
        attributes=Attributes(order=(MAX_NUMBER,) * MAX_DIMENSIONS),
        trace=LONGEST_TRACE,
    )
    row = SenderSummary(name, *[MAX_NUMBER] * (len(SenderSummary.__struct_fields__) - 1))
    report = ReceiverReport(receiver_statistics(leases=MAX_NUMBER), (row,) * MAX_ROWS)
    message = Message(
        *(MAX_NUMBER, name, bytes(MAX_INLINE_BYTES), MAX_NUMBER, MAX_NUMBER, LONGEST_TRACE),
        answers=MAX_NUMBER,
    )
    failure = Failure(MAX_NUMBER, name[:1] * MAX_TYPE_NAME, name[:1] * MAX_TEXT)
    for frame in (put, report, message, failure):
        assert len(encode(frame)) <= MAX_RECORD_BYTES
        assert decode(encode(frame)) == [frame]


def test_numbers_of_statistics_that_no_frame_can_contain_are_clamped() -> None:
    seen = receiver_statistics(leases=3, max_mapped_bytes=2**70, max_senders=None)
    assert bounded(seen) == receiver_statistics(leases=3, max_mapped_bytes=MAX_NUMBER, max_senders=None)
    with pytest.raises(OverflowError):
        encode(ReceiverReport(seen, ()))
