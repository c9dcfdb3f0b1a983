"""Nearly valid conversations with an inspector, and the frames for inspectors of a receiver."""

import msgspec

from aiotensor.protocol.frames import LEAST_FRAME_BYTES, MAX_ROWS, VERSION
from aiotensor.types import PublisherStatistics, ReceiverStatistics
from verification.fuzz.choosers import WILDNESS, Chooser, happens, one_of
from verification.fuzz.steps import Step
from verification.fuzz.wire import Frame, Scalar, boundary, broken_frame, record_of

__all__ = ["INSPECT", "TO_INSPECTOR", "to_inspector"]

TO_INSPECTOR = "inspector"

INSPECT: Frame = ["inspect", VERSION, 1]

_FEW_SENDERS = 20


def to_inspector(chooser: Chooser) -> list[Step]:
    """Generate the frames of a receiver or publisher to an inspector, in records of a few frames."""
    one_in = one_of(chooser, WILDNESS)
    frames = _publisher_report(chooser, one_in) if happens(chooser, 4) else _reports(chooser, one_in)
    if happens(chooser, one_in):
        del frames[chooser.number(0, len(frames) - 1)]
    if happens(chooser, one_in) and frames:
        where = chooser.number(0, len(frames) - 1)
        frames.insert(chooser.number(0, len(frames)), frames[where])
    if happens(chooser, 8):
        retry = happens(chooser, 2)
        close = ["close", one_of(chooser, ("", "no room")), happens(chooser, 2), retry, True]
        frames.insert(chooser.number(0, len(frames)), close)
    steps: list[Step] = []
    while frames:
        count = chooser.number(1, 8)
        some, frames = frames[:count], frames[count:]
        some = [broken_frame(chooser, frame) if happens(chooser, one_in) else frame for frame in some]
        descriptors = ["pipe"] * one_of(chooser, (1, 8, 64)) if happens(chooser, one_in) else []
        record = record_of(chooser, some, 2 * one_in)
        steps.append(Step(record.hex(), tuple(descriptors), after=0 if happens(chooser, 4) else 1))
    return steps


def _publisher_report(chooser: Chooser, one_in: int) -> list[Frame]:
    """Return all frames of a publisher."""
    statistics = _statistics(chooser, PublisherStatistics)
    counts = ("pid", "behind", "behind_s", "held_bytes", "delivered", "dropped")
    lag = {"subscriber": "s", **dict.fromkeys(counts, chooser.number(0, 9))}
    too_many = [MAX_ROWS + 1] if happens(chooser, one_in) else []
    statistics["lags"] = [lag] * one_of(chooser, (1, 0, MAX_ROWS, *too_many))
    frames: list[Frame] = [["welcome", VERSION, 1, LEAST_FRAME_BYTES, "p", happens(chooser, 2)]]
    return [*frames, ["publisher report", statistics]]


def _reports(chooser: Chooser, one_in: int) -> list[Frame]:
    """Return all frames of a receiver, in the valid order."""
    count = one_of(chooser, (2, 0, 1, MAX_ROWS, MAX_ROWS + 1))
    senders = [f"{number:032x}" for number in range(count)]
    frames: list[Frame] = [["welcome", VERSION, 1, LEAST_FRAME_BYTES, "r", happens(chooser, 2)]]
    rows = [[sender, 1, 64, 1 << 20, *[chooser.number(0, 9)] * 6] for sender in senders]
    if happens(chooser, one_in) and rows:
        rows[-1] = broken_frame(chooser, rows[-1])
    at_once = MAX_ROWS + 1 if happens(chooser, one_in) else one_of(chooser, (MAX_ROWS, 1, 100))
    # Reports with one row each are many records: only as many as a receiver with few senders sends.
    at_once = at_once if len(rows) <= _FEW_SENDERS else max(at_once, 100)
    for start in range(0, max(1, len(rows)), at_once):
        is_last = start + at_once >= len(rows)
        statistics = _statistics(chooser, ReceiverStatistics)
        frames.append(["receiver report", statistics, rows[start : start + at_once], is_last])
    return frames


def _statistics(chooser: Chooser, kind: type[ReceiverStatistics | PublisherStatistics]) -> dict[str, Scalar]:
    """Return a map with all fields of statistics, whose numbers are equal."""
    number = boundary(chooser) % 2**63 if happens(chooser, 8) else chooser.number(0, 9)
    waits = {"bounds_s": [0.5, 1], "counts": [number, 1, 0], "total_s": 0.5}
    described = msgspec.inspect.type_info(kind)
    if not isinstance(described, msgspec.inspect.StructType):
        raise TypeError(f"{kind} is no struct")
    fields: dict[str, Scalar] = {}
    for field in described.fields:
        match getattr(field.type, "type", field.type):
            case msgspec.inspect.FloatType():
                fields[field.name] = 0.5
            case msgspec.inspect.StructType():
                fields[field.name] = waits
            case msgspec.inspect.DictType():
                fields[field.name] = {"OSError": number}
            case msgspec.inspect.VarTupleType():
                fields[field.name] = []
            case msgspec.inspect.UnionType():
                fields[field.name] = one_of(chooser, (number, None))
            case _:
                fields[field.name] = number
    return fields
