"""Nearly valid trace contexts, which tracing adds to a frame."""

from aiotensor.types import MAX_TRACE_FIELDS, MAX_TRACE_NAME, MAX_TRACE_VALUE
from verification.fuzz.choosers import Chooser, happens, one_of
from verification.fuzz.wire import Frame, Scalar

__all__ = ["with_trace"]

_PARENT = f"00-{'a' * 32}-{'b' * 16}-01"


def with_trace(chooser: Chooser, one_in: int, frame: Frame, fields: int) -> Frame:
    """Add a trace context to a frame, in some cases.

    Args:
        chooser: decides.
        one_in: how seldom something is wrong.
        frame: the frame; fields before the trace context that it lacks are None.
        fields: the number of items before the trace context, with the tag.
    """
    if not happens(chooser, 4):
        return frame
    trace: dict[Scalar, Scalar] = {"traceparent": _PARENT}
    if happens(chooser, 2):
        trace["baggage"] = one_of(chooser, ("", "user=1", "x" * MAX_TRACE_VALUE, "=,;"))
    if happens(chooser, one_in):
        trace["traceparent"] = one_of(chooser, ("", "00--", None, 1, "x" * (MAX_TRACE_VALUE + 1)))
    if happens(chooser, one_in):
        trace["x" * (MAX_TRACE_NAME + chooser.number(0, 1))] = ""
    if happens(chooser, one_in):
        count = MAX_TRACE_FIELDS + chooser.number(0, 1)
        trace = {f"field-{number}": "" for number in range(count)}
    return [*frame, *[None] * (fields - len(frame)), trace]
