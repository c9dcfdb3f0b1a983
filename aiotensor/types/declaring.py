"""The means to declare statistics: fields with their help texts and metrics."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec

from aiotensor.types.values import Number, Seconds

__all__ = [
    "Errors",
    "Export",
    "Holder",
    "Waits",
    "counter",
    "gauge",
]

# Limits on values that come from another process: the bounds of a `Waits`, and the types of errors.
_MAX_BOUNDS = 64
_MAX_ERROR_NAMES = 32

Errors: TypeAlias = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Number],
    msgspec.Meta(max_length=_MAX_ERROR_NAMES),
]


class Holder(msgspec.Struct, frozen=True):
    """A message or tensor that holds a permit or memory of a sender or of a message client.

    Attributes:
        message: the number of the message, as in the handles of a sender; None for memory from `allocate`
            that was not sent, and for a message of which nothing was sent.
        state: the state of the message, in words.
        bytes: the bytes of shared memory that it holds.
        seconds: the time in seconds for which it has held the permit or the memory.
    """

    message: Number | None
    state: str
    bytes: Number
    seconds: Seconds


class Waits(msgspec.Struct, frozen=True):
    """The durations of all ended waits, including cancelled and failed ones.

    Attributes:
        bounds_s: upper bounds in seconds, in increasing order; each wait is counted at the first bound that
            it did not exceed.
        counts: the number of waits for each bound, followed by the number that exceeded all bounds.
        total_s: the total duration of all waits in seconds.

    Raises:
        ValueError: the bounds do not increase, or there is not exactly one more count than bounds.
    """

    bounds_s: Annotated[tuple[Seconds, ...], msgspec.Meta(max_length=_MAX_BOUNDS)]
    counts: Annotated[tuple[Number, ...], msgspec.Meta(max_length=_MAX_BOUNDS + 1)]
    total_s: Seconds

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.bounds_s) + 1:
            raise ValueError(
                f"there must be one count for each bound and one beyond the last bound: {len(self.bounds_s)} "
                f"bounds need one count more, got {len(self.counts)}"
            )
        if any(bound >= following for bound, following in pairwise(self.bounds_s)):
            raise ValueError(f"the bounds of waits must increase, got {self.bounds_s}")


class Export(NamedTuple):
    """How a field of statistics is exported as a metric; created by `counter` and `gauge`.

    Attributes:
        kind: ``"counter"`` for a value that only grows, and is kept after its object has closed; ``"gauge"``
            for a current value.
        metric: the name of the metric without its prefix, such as ``aiotensor_sender_``; "" for the name of
            the field.
        labels: the names and values of the labels that distinguish fields with the same metric.
        is_largest: whether the largest value of all objects at an endpoint is exported, instead of the sum.
    """

    kind: Literal["counter", "gauge"]
    metric: str
    labels: tuple[tuple[str, str], ...] = ()
    is_largest: bool = False


def counter(text: str, *, metric: str = "", labels: Mapping[str, str] | None = None) -> msgspec.Meta:
    """Declare a field that only grows: a number, the durations of waits, or errors by type.

    The statistics frame, the Prometheus metrics and the counts of closed objects are derived from the
    declaration.

    Args:
        text: the help text, one or more sentences.
        metric: the name of the metric; see `Export`.
        labels: the labels of the metric; see `Export`.
    """
    export = Export("counter", metric, tuple((labels or {}).items()))
    return msgspec.Meta(description=text, extra={"export": export})


def gauge(text: str, *, metric: str = "", largest: bool = False) -> msgspec.Meta:
    """Declare a field with a current value.

    Args:
        text: the help text, one or more sentences.
        metric: the name of the metric; see `Export`.
        largest: whether the largest value is exported, instead of the sum; see `Export.is_largest`.
    """
    return msgspec.Meta(description=text, extra={"export": Export("gauge", metric, is_largest=largest)})
