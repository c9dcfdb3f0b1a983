from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aiotensor.errors import ProtocolError
from aiotensor.protocol.frames import (
    LEAST_FRAME_BYTES,
    MAX_ERROR_NAMES,
    MAX_FRAMES,
    MAX_HOLDERS,
    MAX_NUMBERS,
    MAX_RECORD_BYTES,
    MAX_ROWS,
    VERSION,
    Account,
    Attach,
    Bye,
    Detach,
    Discard,
    Discarded,
    End,
    Hello,
    Holding,
    Inquire,
    Look,
    Put,
    Release,
    Report,
    SenderRow,
    Taken,
    ToObserver,
    ToReceiver,
    ToSender,
    Welcome,
    decode_to_observer,
    decode_to_receiver,
    decode_to_sender,
    encode,
)
from aiotensor.statistics.counters import ERROR_NAMES
from aiotensor.types import MAX_BOUNDS, ReceiverStatistics, Waits
from tests.frames import ACCOUNT

Frames = list[ToReceiver] | list[ToSender] | list[ToObserver]
Decode = Callable[[bytes], Frames]

LARGEST = 2**63 - 1
numbers = st.integers(0, LARGEST)
names = st.text(min_size=1, max_size=64)
versions = st.integers(-(2**63), LARGEST)
reasons = st.text(max_size=100)

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
seconds = st.floats(0, 2.0**63)
holdings = st.builds(Holding, st.none() | numbers, names, numbers, seconds)
# What a receiver says that holds nothing and has done nothing.
NOTHING: dict[str, object] = {**dict.fromkeys(ReceiverStatistics.__struct_fields__, 0), "errors": {}}

waits = st.lists(seconds, max_size=5, unique=True).flatmap(
    lambda bounds: st.builds(
        Waits,
        st.just(tuple(sorted(bounds))),
        st.tuples(*[numbers] * (len(bounds) + 1)),
        seconds,
    )
)
accounts = st.builds(
    Account,
    *[numbers] * 3,
    seconds,
    *[numbers] * 9,
    *[waits] * 2,
    *[numbers] * 2,
    st.dictionaries(names, numbers, max_size=4),
    st.lists(holdings, max_size=MAX_HOLDERS).map(tuple),
    st.text(max_size=64),
)
frames_to_receiver = st.one_of(
    st.builds(Hello, versions, numbers, names, st.integers(1, LARGEST), numbers, numbers),
    st.builds(Attach, numbers, names, numbers),
    st.builds(Detach, numbers),
    puts,
    st.builds(End, numbers, numbers),
    st.builds(Discard, numbers),
    accounts,
    st.builds(Look, versions, numbers),
    st.builds(Bye, reasons, st.booleans()),
)
many_numbers = st.lists(numbers, max_size=20).map(tuple)
frames_to_sender = st.one_of(
    st.builds(Welcome, versions, numbers, st.integers(LEAST_FRAME_BYTES, LARGEST), st.text(max_size=64)),
    st.builds(Taken, many_numbers),
    st.builds(Discarded, many_numbers),
    st.builds(Release, many_numbers),
    st.just(Inquire()),
    st.builds(Bye, reasons, st.booleans()),
)
rows = st.builds(SenderRow, names, *[numbers] * 7)
limits = st.none() | numbers
statistics = st.builds(
    ReceiverStatistics,
    **{
        **{
            field: limits if field.startswith("max_") else numbers
            for field in ReceiverStatistics.__struct_fields__
        },
        "errors": st.dictionaries(st.text(max_size=9), numbers, max_size=4),
    },
)
frames_to_observer = st.one_of(
    st.builds(Welcome, versions, numbers, st.integers(LEAST_FRAME_BYTES, LARGEST), st.text(max_size=64)),
    st.builds(Report, statistics, st.lists(rows, max_size=4).map(tuple), st.booleans()),
    accounts,
    st.builds(Bye, reasons, st.booleans()),
)
batches_to_receiver = st.lists(frames_to_receiver, max_size=4)
batches_to_sender = st.lists(frames_to_sender, max_size=4)
batches_to_observer = st.lists(frames_to_observer, max_size=4)
batches: st.SearchStrategy[Frames] = st.one_of(batches_to_receiver, batches_to_sender, batches_to_observer)

HELLO = ["hello", VERSION, 1, "s", 1, 1]

PUT = ["put", 0, 0, "uint8", [2, 3], "cpu", "inline", b"123456"]

all_ways = pytest.mark.parametrize("decode", [decode_to_receiver, decode_to_sender, decode_to_observer])


def read_or_refuse(decode: Decode, data: bytes) -> None:
    """Anything may come of bytes but another exception, or frames that are none."""
    try:
        frames = decode(data)
    except ProtocolError:
        return
    assert all(isinstance(frame, ToReceiver | ToSender | ToObserver) for frame in frames)
    assert decode(encode(*frames)) == frames


def record_of(*frames: object) -> bytes:
    """Make a record of what may be no frames."""
    return msgspec.msgpack.encode(frames)


@settings(deadline=None)
@given(frames=batches_to_receiver)
def test_what_a_sender_writes_the_receiver_reads_in_that_order(frames: list[ToReceiver]) -> None:
    assert decode_to_receiver(encode(*frames)) == frames


@settings(deadline=None)
@given(frames=batches_to_observer)
def test_what_the_receiver_writes_whoever_looks_reads_in_that_order(frames: list[ToObserver]) -> None:
    assert decode_to_observer(encode(*frames)) == frames


@settings(deadline=None)
@given(frames=batches_to_sender)
def test_what_the_receiver_writes_a_sender_reads_in_that_order(frames: list[ToSender]) -> None:
    assert decode_to_sender(encode(*frames)) == frames


@all_ways
def test_a_record_may_hold_no_frame(decode: Decode) -> None:
    assert decode(encode()) == []


def test_a_record_is_read_where_it_lies() -> None:
    record = b"before" + encode(Taken((1, 2)), Bye()) + b"behind"

    assert decode_to_sender(memoryview(record)[6:-6]) == [Taken((1, 2)), Bye()]


def test_a_record_with_more_frames_than_one_may_have_is_refused() -> None:
    frames = [Discard(0)] * MAX_FRAMES

    assert decode_to_receiver(encode(*frames)) == frames
    with pytest.raises(ProtocolError, match=f"length <= {MAX_FRAMES}"):
        decode_to_receiver(encode(*frames, Discard(0)))
    with pytest.raises(ProtocolError, match=f"length <= {MAX_FRAMES}"):
        decode_to_sender(encode(*[Taken((0,))] * (MAX_FRAMES + 1)))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_frame_that_cannot_be_read_spoils_its_record(place: int) -> None:
    frames: list[object] = [["discard", 1], ["discard", 2]]
    frames.insert(place, ["discard", -1])

    with pytest.raises(ProtocolError):
        decode_to_receiver(record_of(*frames))


def test_a_frame_with_more_numbers_than_one_may_have_is_refused() -> None:
    frames = [Taken((LARGEST,) * MAX_NUMBERS)] * MAX_FRAMES

    assert decode_to_sender(encode(*frames)) == frames
    assert len(encode(*frames)) <= MAX_RECORD_BYTES
    with pytest.raises(ProtocolError, match=f"length <= {MAX_NUMBERS}"):
        decode_to_sender(encode(Taken((LARGEST,) * (MAX_NUMBERS + 1))))


@all_ways
@settings(deadline=None)
@given(data=st.binary(max_size=100))
@example(b"")
@example(b"\xc1")
@example(b"\xc0")
@example(record_of(["put", 0, 0]))
@example(b"\x91\x93\xa3bye\xa0\xa1\xff")  # text that is no UTF-8, in a field that is ignored
@example(b"\x91\x92\xa3bye\xa1\xff")
@example(b"\x91\x92\xa7discard\xa1\xff")
@example(b"\x91\x91\xa3\xff\xff\xff")
def test_any_bytes_are_frames_or_refused(decode: Decode, data: bytes) -> None:
    read_or_refuse(decode, data)


@all_ways
@settings(deadline=None)
@given(frames=batches, data=st.data())
def test_any_part_of_a_record_is_frames_or_refused(
    decode: Decode, frames: Frames, data: st.DataObject
) -> None:
    encoded = encode(*frames)
    read_or_refuse(decode, encoded[: data.draw(st.integers(0, len(encoded) - 1))])


@all_ways
@settings(deadline=None)
@given(frames=batches, data=st.data())
def test_a_record_with_one_byte_changed_is_frames_or_refused(
    decode: Decode, frames: Frames, data: st.DataObject
) -> None:
    encoded = bytearray(encode(*frames))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    read_or_refuse(decode, bytes(encoded))


@all_ways
@pytest.mark.parametrize("depth", [10, 1_000, 60_000])
def test_a_frame_of_lists_in_lists_is_a_frame_or_refused_at_any_depth(decode: Decode, depth: int) -> None:
    read_or_refuse(decode, b"\x91\x93" + msgspec.msgpack.encode("bye") + b"\xa0" + b"\x91" * depth + b"\xc0")


@all_ways
def test_a_frame_with_something_behind_it_is_refused(decode: Decode) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(Bye()) + encode(Bye()))


@pytest.mark.parametrize(
    "frame",
    [
        Hello(VERSION, 1, "s", 1, 1),
        Attach(0, "arena", 1),
        Detach(0),
        Discard(0),
        End(0, 1),
        ACCOUNT,
        Look(VERSION, 1),
    ],
    ids=lambda frame: type(frame).__name__,
)
def test_a_sender_refuses_what_only_senders_say(frame: ToReceiver) -> None:
    with pytest.raises(ProtocolError, match="receiver sent a frame that cannot be read"):
        decode_to_sender(encode(frame))


@pytest.mark.parametrize(
    "frame",
    [Welcome(VERSION, 1), Taken((0,)), Discarded((0,)), Release((0,)), Inquire()],
    ids=lambda frame: type(frame).__name__,
)
def test_a_receiver_refuses_what_only_receivers_say(frame: ToSender) -> None:
    with pytest.raises(ProtocolError, match="sender sent a frame that cannot be read"):
        decode_to_receiver(encode(frame))


@pytest.mark.parametrize(
    "frame",
    [Taken((0,)), Discarded((0,)), Release((0,)), Inquire(), Discard(0), Look(VERSION, 1)],
    ids=lambda frame: type(frame).__name__,
)
def test_whoever_looks_refuses_what_senders_and_receivers_say_to_each_other(
    frame: ToSender | ToReceiver,
) -> None:
    with pytest.raises(ProtocolError, match="receiver sent a frame that cannot be read"):
        decode_to_observer(encode(frame))


def test_a_report_of_as_many_senders_as_it_may_have_fits_a_record_whatever_they_are_called() -> None:
    largest: dict[str, Any] = dict.fromkeys(ReceiverStatistics.__struct_fields__, LARGEST)
    largest["errors"] = dict.fromkeys(ERROR_NAMES, LARGEST)
    row = SenderRow("\N{GRINNING FACE}" * 64, *[LARGEST] * 7)
    report = Report(ReceiverStatistics(**largest), (row,) * MAX_ROWS)

    assert len(encode(report)) <= MAX_RECORD_BYTES
    assert decode_to_observer(encode(report)) == [report]


def test_the_longest_account_fits_the_shortest_record_that_every_receiver_takes() -> None:
    holding = Holding(LARGEST, "\N{GRINNING FACE}" * 64, LARGEST, 2.0**63)
    largest = dict.fromkeys(Account.__struct_fields__, LARGEST)
    bounds = tuple(2.0**63 - 2048 * (MAX_BOUNDS - number) for number in range(MAX_BOUNDS))
    longest_waits = Waits(bounds, (LARGEST,) * (MAX_BOUNDS + 1), 2.0**63)
    names = [f"{number:02}" + "\N{GRINNING FACE}" * 62 for number in range(MAX_ERROR_NAMES)]
    longest: dict[str, Any] = {
        "longest_wait_s": 2.0**63,
        "permit_waits": longest_waits,
        "memory_waits": longest_waits,
        "errors": dict.fromkeys(names, LARGEST),
        "holders": (holding,) * MAX_HOLDERS,
        "sender": "x" * 64,
    }
    account = Account(**{**largest, **longest})

    assert len(encode(account)) <= LEAST_FRAME_BYTES
    assert decode_to_receiver(encode(account)) == [account]


WRONG_SECONDS = (float("nan"), float("inf"), -0.5, 2.0**64, None)


def _waited(**changes: object) -> dict[str, object]:
    """Tell of three waits, or of something that differs from that in what is given."""
    return {"bounds_s": [0.5], "counts": [1, 2], "total_s": 3.0, **changes}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, -1) for field in (*range(1, 14), 16, 17)),
        *((field, 2**63) for field in (1, 13, 16)),
        (4, float("nan")),
        (4, float("inf")),
        (4, None),
        (14, None),
        (15, _waited(bounds_s=[float(n) for n in range(MAX_BOUNDS + 1)], counts=[0] * (MAX_BOUNDS + 2))),
        (15, {"bounds_s": [], "counts": [0]}),
        *((14, _waited(counts=counts)) for counts in ([], [1], [1, 2, 3], [1, -2], [1, 2**63], [1, None])),
        *((15, _waited(bounds_s=[wrong])) for wrong in WRONG_SECONDS),
        *((15, _waited(total_s=wrong)) for wrong in WRONG_SECONDS),
        *((15, _waited(bounds_s=bounds, counts=[0] * 3)) for bounds in ([1.0, 0.5], [1.0, 1.0])),
        (18, {"": 1}),
        (18, {"x" * 65: 1}),
        (18, {"OSError": -1}),
        (18, {f"E{number}": 1 for number in range(MAX_ERROR_NAMES + 1)}),
        (18, None),
        (19, [[0, "open", 0, 0.0]] * (MAX_HOLDERS + 1)),
        (19, [[-1, "open", 0, 0.0]]),
        (19, [[0, "", 0, 0.0]]),
        (19, [[0, "x" * 65, 0, 0.0]]),
        (19, [[0, "open", -1, 0.0]]),
        (19, [[0, "open", 0, -0.5]]),
        (19, [[0, "open", 0]]),
        (19, None),
        (20, "x" * 65),
        (20, None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_account_with_one_wrong_field_is_refused(field: int, value: object) -> None:
    items: list[object] = ["account", *[0] * 13, _waited(), _waited(), 0, 0, {"OSError": 1}]
    items += [[[None, "allocated", 1, 0.5]], "s"]
    decode_to_receiver(record_of(items))  # which is right as it is

    items[field] = value
    with pytest.raises(ProtocolError):
        decode_to_receiver(record_of(items))


@pytest.mark.parametrize(
    "items",
    [
        ["report", {}, []],
        ["report", None, []],
        ["report", NOTHING, [["s", *[0] * 7]] * (MAX_ROWS + 1)],
        ["report", NOTHING, [["", *[0] * 7]]],
        ["report", NOTHING, [["s", -1, *[0] * 6]]],
        ["report", dict.fromkeys(NOTHING, "0"), []],
        ["report", NOTHING, [], None],
        *(["report", {**NOTHING, field: -1}, []] for field in NOTHING),
        *(
            ["report", {**NOTHING, field: 2**63}, []]
            for field in ("senders", "unclaimed_bytes", "bytes_taken")
        ),
        ["report", {**NOTHING, "errors": {"OSError": -1}}, []],
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_report_with_something_wrong_in_it_is_refused(items: object) -> None:
    with pytest.raises(ProtocolError):
        decode_to_observer(record_of(items))


@pytest.mark.parametrize(
    "items",
    [
        ["hello", VERSION, -1, "s", 1, 1],
        ["hello", VERSION, 1, "", 1, 1],
        ["hello", VERSION, 1, "x" * 65, 1, 1],
        ["hello", VERSION, 1, b"s", 1, 1],
        ["hello", VERSION, 1, "s", 0, 1],
        ["hello", VERSION, 1, "s", 2**63, 1],
        ["hello", VERSION, 1, "s", 1, -1],
        ["hello", VERSION, 1, "s", 1, 2**63],
        ["hello", VERSION, 1, "s", 1, 1, -1],
        ["hello", VERSION, 1, "s", 1, 1, 2**63],
        ["hello", VERSION, 1, "s", 1, 1, None],
        ["hello", "1", 1, "s", 1, 1],
        ["hello", VERSION, 1, "s", 1],
        ["attach", -1, "arena", 1],
        ["attach", 2**63, "arena", 1],
        ["attach", 0, "", 1],
        ["attach", 0, "x" * 65, 1],
        ["attach", 0, "arena", -1],
        ["attach", 0, "arena", 2**63],
        ["attach", 0, "arena"],
        ["detach", -1],
        ["detach", 2**63],
        ["detach"],
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
        ["look", VERSION],
        ["look", VERSION, -1],
        ["look", "1", 1],
        ["account"],
        ["bye", "x" * 1025],
        ["bye", 0],
        ["bye", None],
        [],
        {"type": "bye"},
        "bye",
        None,
    ],
    ids=repr,
)
def test_a_number_out_of_bounds_or_a_wrong_type_is_refused(items: object) -> None:
    with pytest.raises(ProtocolError):
        decode_to_receiver(record_of(items))


@all_ways
@pytest.mark.parametrize("record", [["bye", ""], {}, {"type": "bye"}, "bye", None, 0], ids=repr)
def test_a_record_that_is_no_list_of_frames_is_refused(decode: Decode, record: object) -> None:
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode(record))


@pytest.mark.parametrize(
    "items",
    [
        ["welcome", VERSION, -1],
        ["welcome", VERSION, 1, LEAST_FRAME_BYTES - 1],
        ["welcome", VERSION, 1, 0],
        ["welcome", VERSION, 1, -1],
        ["welcome", VERSION, 1, None],
        ["welcome", "1", 1],
        ["welcome", VERSION],
        ["bye", "x" * 1025],
        ["bye", 0],
    ],
    ids=repr,
)
def test_a_sender_refuses_numbers_out_of_bounds_too(items: object) -> None:
    with pytest.raises(ProtocolError):
        decode_to_sender(record_of(items))


def test_what_may_be_left_out_has_a_default() -> None:
    assert decode_to_receiver(record_of(HELLO)) == [Hello(VERSION, 1, "s", 1, 1, 0)]
    assert decode_to_sender(record_of(["welcome", VERSION, 1])) == [Welcome(VERSION, 1, LEAST_FRAME_BYTES)]
    assert decode_to_sender(record_of(["bye"])) == [Bye("")]
    assert decode_to_receiver(record_of(["bye"])) == [Bye("")]


def test_the_longest_reason_is_read() -> None:
    assert decode_to_sender(encode(Bye("x" * 1024))) == [Bye("x" * 1024)]


def test_a_put_without_its_optional_fields_has_their_defaults() -> None:
    [frame] = decode_to_receiver(record_of(PUT))

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
    decode_to_receiver(record_of(items))  # which is right as it is

    items[field] = value
    with pytest.raises(ProtocolError):
        decode_to_receiver(record_of(items))


@pytest.mark.parametrize("tag", ["taken", "discarded", "release"])
@pytest.mark.parametrize(
    "value", [[-1], [2**63], [0] * 4097, 0, None, ["0"]], ids=lambda value: str(value)[:9]
)
def test_numbers_out_of_bounds_and_too_many_are_refused(tag: str, value: object) -> None:
    decode_to_sender(record_of([tag, [0, 1]]))

    with pytest.raises(ProtocolError):
        decode_to_sender(record_of([tag, value]))


unknown_items = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(unknown=st.lists(unknown_items, min_size=1, max_size=3), frame=frames_to_receiver)
def test_fields_that_a_later_sender_added_are_ignored(unknown: list[object], frame: ToReceiver) -> None:
    items = [*msgspec.msgpack.decode(encode(frame))[0], *unknown]

    assert decode_to_receiver(record_of(items, ["bye"])) == [frame, Bye()]


@settings(deadline=None)
@given(unknown=st.lists(unknown_items, min_size=1, max_size=3), frame=frames_to_observer)
def test_fields_that_a_later_receiver_tells_those_who_look_are_ignored(
    unknown: list[object], frame: ToObserver
) -> None:
    items = [*msgspec.msgpack.decode(encode(frame))[0], *unknown]

    assert decode_to_observer(record_of(items, ["bye"])) == [frame, Bye()]


@settings(deadline=None)
@given(unknown=st.lists(unknown_items, min_size=1, max_size=3), frame=frames_to_sender)
def test_fields_that_a_later_receiver_added_are_ignored(unknown: list[object], frame: ToSender) -> None:
    items = [*msgspec.msgpack.decode(encode(frame))[0], *unknown]

    assert decode_to_sender(record_of(items, ["bye"])) == [frame, Bye()]
