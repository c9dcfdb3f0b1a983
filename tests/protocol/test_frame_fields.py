from typing import Any

import msgspec
import pytest

from aiotensor.errors import ProtocolError
from aiotensor.protocol.broadcast import TO_SUBSCRIBER
from aiotensor.protocol.connection import Close
from aiotensor.protocol.frames import (
    FROM_SENDER,
    LEAST_FRAME_BYTES,
    MAX_DIMENSIONS,
    MAX_RECORD_BYTES,
    MAX_ROWS,
    OPENING,
    TO_INSPECTOR,
    TO_SENDER,
    VERSION,
    Attach,
    Hello,
    Put,
    ReceiverReport,
    SenderSummary,
    Welcome,
    bounded,
    decode,
    encode,
)
from aiotensor.statistics.counters import ERROR_NAMES
from aiotensor.tensors.inline import MAX_INLINE_BYTES
from aiotensor.types import (
    MAX_BOUNDS,
    MAX_ERROR_NAMES,
    MAX_NUMBER,
    MAX_TRACE_FIELDS,
    MAX_TRACE_NAME,
    MAX_TRACE_VALUE,
    PublisherStatistics,
    ReceiverStatistics,
    SubscriberLag,
)
from tests.frames import LONGEST_TRACE, NO_WAITS, receiver_statistics, record_of

HELLO = ["hello", VERSION, 1, "s", 1, 1]
PUT = ["put", 0, 0, "uint8", [2, 3], "cpu", "inline", b"123456"]


def fields_of(statistics: object) -> dict[str, Any]:
    """Return statistics as the values that their frame contains."""
    fields: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(statistics))
    return fields


# Statistics


def test_a_report_of_the_most_senders_with_any_names_fits_into_a_record() -> None:
    largest: dict[str, Any] = dict.fromkeys(ReceiverStatistics.__struct_fields__, MAX_NUMBER)
    largest["errors"] = dict.fromkeys(ERROR_NAMES, MAX_NUMBER)
    row = SenderSummary("\N{GRINNING FACE}" * 64, *[MAX_NUMBER] * 9)
    report = ReceiverReport(ReceiverStatistics(**largest), (row,) * MAX_ROWS)

    assert len(encode(report)) <= MAX_RECORD_BYTES
    assert decode(TO_INSPECTOR, encode(report)) == [report]


def test_numbers_beyond_the_range_of_frames_are_bounded() -> None:
    unlimited = receiver_statistics(max_senders=None, mapped_bytes=2**63)
    assert bounded(unlimited) == receiver_statistics(max_senders=None, mapped_bytes=MAX_NUMBER)


WRONG_SECONDS = (float("nan"), float("inf"), -0.5, 2.0**64, None)
LAG = SubscriberLag("s", 1, 0, 0.0, 0, 0, 0)


def _waited(**changes: object) -> dict[str, object]:
    """Return three waits as they are encoded, with some fields changed."""
    return {"bounds_s": [0.5], "counts": [1, 2], "total_s": 3.0, **changes}


def _lag(**changes: object) -> dict[str, object]:
    return {**fields_of(LAG), **changes}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("published", wrong) for wrong in (-1, 2**63, None)),
        *(("longest_wait_s", wrong) for wrong in WRONG_SECONDS),
        ("memory_waits", None),
        (
            "memory_waits",
            _waited(bounds_s=[float(n) for n in range(MAX_BOUNDS + 1)], counts=[0] * (MAX_BOUNDS + 2)),
        ),
        *(
            ("memory_waits", _waited(counts=counts))
            for counts in ([], [1], [1, 2, 3], [1, -2], [1, 2**63], [1, None])
        ),
        *(("memory_waits", _waited(bounds_s=[wrong])) for wrong in WRONG_SECONDS),
        *(("memory_waits", _waited(total_s=wrong)) for wrong in WRONG_SECONDS),
        *(("memory_waits", _waited(bounds_s=bounds, counts=[0] * 3)) for bounds in ([1.0, 0.5], [1.0, 1.0])),
        ("errors", {"x" * 65: 1}),
        ("errors", {"OSError": -1}),
        ("errors", {f"E{number}": 1 for number in range(MAX_ERROR_NAMES + 1)}),
        ("errors", None),
        ("lags", [_lag(subscriber="x" * 65)]),
        ("lags", [_lag(behind=-1)]),
        ("lags", [_lag(behind_s=-0.5)]),
        ("lags", [{"subscriber": "s"}]),
        ("lags", None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_publisher_report_with_one_wrong_field_is_refused(field: str, value: object) -> None:
    waits = dict.fromkeys(("subscriber_waits", "memory_waits"), NO_WAITS)
    changed = {"errors": {"OSError": 1}, "lags": (LAG,), **waits}
    statistics = {**dict.fromkeys(PublisherStatistics.__struct_fields__, 0), **changed}
    fields = fields_of(PublisherStatistics(**statistics))  # type: ignore[arg-type]
    decode(TO_INSPECTOR, record_of(["publisher report", fields]))  # valid without the change

    fields[field] = value
    with pytest.raises(ProtocolError):
        decode(TO_INSPECTOR, record_of(["publisher report", fields]))


NOTHING = fields_of(receiver_statistics())


@pytest.mark.parametrize(
    "items",
    [
        ["receiver report", {}, []],
        ["receiver report", None, []],
        ["receiver report", NOTHING, [["s", *[0] * 9]] * (MAX_ROWS + 1)],
        ["receiver report", NOTHING, [["", *[0] * 9]]],
        ["receiver report", NOTHING, [["s", -1, *[0] * 8]]],
        ["receiver report", dict.fromkeys(NOTHING, "0"), []],
        ["receiver report", NOTHING, [], None],
        *(["receiver report", {**NOTHING, field: -1}, []] for field in NOTHING),
        *(
            ["receiver report", {**NOTHING, field: 2**63}, []]
            for field in ("senders", "unclaimed_bytes", "bytes_taken")
        ),
        ["receiver report", {**NOTHING, "errors": {"OSError": -1}}, []],
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_report_with_one_wrong_field_is_refused(items: object) -> None:
    decode(
        TO_INSPECTOR, record_of(["receiver report", NOTHING, [["s", *[0] * 9]], True])
    )  # this one is valid

    with pytest.raises(ProtocolError):
        decode(TO_INSPECTOR, record_of(items))


# Fields of the other frames


@pytest.mark.parametrize(
    "items",
    [
        ["hello", VERSION, -1, "s", 1, 1],
        ["hello", VERSION, 2**31, "s", 1, 1],  # no process has this id
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
        ["inspect", VERSION],
        ["inspect", VERSION, -1],
        ["inspect", VERSION, 2**31],
        ["subscribe", VERSION, 2**31, "s"],
        ["inspect", "1", 1],
    ],
    ids=repr,
)
def test_a_first_frame_with_a_wrong_field_is_refused(items: object) -> None:
    with pytest.raises(ProtocolError):
        decode(OPENING, record_of(items))


@pytest.mark.parametrize(
    "items",
    [
        ["attach", -1, "arena", 1],
        ["attach", 2**63, "arena", 1],
        ["attach", 0, "", 1],
        ["attach", 0, "x" * 65, 1],
        ["attach", 0, "arena", -1],
        ["attach", 0, "arena", 2**63],
        ["attach", 0, "arena"],
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
        ["detach", 0],
        ["close", "x" * 1025],
        ["close", 0],
        ["close", None],
        ["close", "", 1],
        ["close", "", False, None],
        ["close", "", False, False, 1],
        [],
        {"type": "close"},
        "close",
        None,
    ],
    ids=repr,
)
def test_a_number_out_of_bounds_or_a_wrong_type_is_refused(items: object) -> None:
    with pytest.raises(ProtocolError):
        decode(FROM_SENDER, record_of(items))


@pytest.mark.parametrize(
    "items",
    [
        ["welcome", VERSION, -1],
        ["welcome", VERSION, 2**31],
        ["welcome", VERSION, 1, LEAST_FRAME_BYTES - 1],
        ["welcome", VERSION, 1, 0],
        ["welcome", VERSION, 1, -1],
        ["welcome", VERSION, 1, None],
        ["welcome", VERSION, 1, LEAST_FRAME_BYTES, "x" * 65],
        ["welcome", VERSION, 1, LEAST_FRAME_BYTES, "r", 1],
        ["welcome", "1", 1],
        ["welcome", VERSION],
        ["close", "x" * 1025],
        ["close", 0],
    ],
    ids=repr,
)
@pytest.mark.parametrize("decoder", [TO_SENDER, TO_INSPECTOR], ids=["to sender", "to inspector"])
def test_frames_of_a_receiver_with_a_wrong_field_are_refused(decoder: Any, items: object) -> None:
    with pytest.raises(ProtocolError):
        decode(decoder, record_of(items))


def test_optional_fields_have_defaults() -> None:
    assert decode(OPENING, record_of(HELLO)) == [Hello(VERSION, 1, "s", 1, 1, first_message=0)]
    assert decode(TO_SENDER, record_of(["welcome", VERSION, 1])) == [
        Welcome(VERSION, 1, LEAST_FRAME_BYTES, receiver="", is_admitted=False)
    ]
    close = Close(reason="", is_refusal=False, retry=False, uses_memory=True)
    assert decode(TO_SENDER, record_of(["close"])) == [close]
    assert decode(FROM_SENDER, record_of(["close"])) == [close]


def test_the_longest_reason_is_decoded() -> None:
    assert decode(TO_SENDER, encode(Close("x" * 1024))) == [Close("x" * 1024)]


def test_a_put_without_its_optional_fields_has_their_defaults() -> None:
    [frame] = decode(FROM_SENDER, record_of(PUT))

    assert frame == Put(0, 0, "uint8", (2, 3), "cpu", "inline", b"123456", None, False, False, False, None)


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
        (12, "00-trace"),
        (12, {"traceparent": None}),
        (12, {"x" * (MAX_TRACE_NAME + 1): ""}),
        (12, {"traceparent": "x" * (MAX_TRACE_VALUE + 1)}),
        (12, {str(number): "" for number in range(MAX_TRACE_FIELDS + 1)}),
    ],
    ids=str,
)
def test_a_put_with_one_wrong_field_is_refused(field: int, value: object) -> None:
    items: list[object] = [*PUT, None, False, False, False, LONGEST_TRACE]
    decode(FROM_SENDER, record_of(items))  # valid without the change

    items[field] = value
    with pytest.raises(ProtocolError):
        decode(FROM_SENDER, record_of(items))


def test_a_put_with_the_longest_fields_fits_into_a_record_of_every_receiver() -> None:
    name = "\N{GRINNING FACE}" * 64
    shape = (MAX_NUMBER,) * MAX_DIMENSIONS
    put = Put(
        *(MAX_NUMBER, MAX_NUMBER, name, shape, name, name, bytes(MAX_INLINE_BYTES), MAX_NUMBER),
        trace=LONGEST_TRACE,
    )

    assert len(encode(put)) <= LEAST_FRAME_BYTES
    assert decode(FROM_SENDER, encode(put)) == [put]


@pytest.mark.parametrize("tag", ["taken", "discarded", "release"])
@pytest.mark.parametrize(
    "value", [[-1], [2**63], [0] * 4097, 0, None, ["0"]], ids=lambda value: str(value)[:9]
)
def test_numbers_out_of_bounds_and_too_many_are_refused(tag: str, value: object) -> None:
    decode(TO_SENDER, record_of([tag, [0, 1]]))

    with pytest.raises(ProtocolError):
        decode(TO_SENDER, record_of([tag, value]))


# Segments


@pytest.mark.parametrize("decoder", [FROM_SENDER, TO_SUBSCRIBER], ids=["of a sender", "of a publisher"])
def test_a_segment_without_bytes_is_invalid(decoder: "msgspec.msgpack.Decoder[Any]") -> None:
    assert decode(decoder, encode(Attach(0, "arena", 1))) == [Attach(0, "arena", 1)]
    with pytest.raises(ProtocolError, match="Expected `int` >= 1"):
        decode(decoder, encode(Attach(0, "arena", 0)))
