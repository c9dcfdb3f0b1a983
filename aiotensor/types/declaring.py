"""How statistics are declared: the fields of a class, their help texts and their metrics."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec

from aiotensor.types.values import Number, Seconds

__all__ = [
    "MAX_BOUNDS",
    "MAX_ERROR_NAMES",
    "MAX_HOLDERS",
    "Errors",
    "Export",
    "Holder",
    "Waits",
    "counter",
    "gauge",
]

# Limits for values that come from another process: the bounds of a `Waits`, the types of errors, and holders.
# A sender names far fewer holders to an inspector, but users may store the statistics of any sender.
MAX_BOUNDS = 64
MAX_ERROR_NAMES = 32
MAX_HOLDERS = 1024

Errors: TypeAlias = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Number],
    msgspec.Meta(max_length=MAX_ERROR_NAMES),
]


class Holder(msgspec.Struct, frozen=True):
    """A message or tensor that holds a permit or memory of a sender.

    Attributes:
        message: the number of the message, as in its handles; None for memory from `allocate` that was
            not sent, and for a message without a sent tensor.
        state: the state of the message, in words.
        bytes: bytes of shared memory that it holds.
        seconds: the time that it has held them.
    """

    message: Number | None
    state: Annotated[str, msgspec.Meta(max_length=64)]
    bytes: Number
    seconds: Seconds


class Waits(msgspec.Struct, frozen=True):
    """The durations of all ended waits, including cancelled and failed ones.

    Attributes:
        bounds_s: seconds, increasing; each wait is counted at the first bound that it did not exceed.
        counts: the number of waits for each bound, and at the end the number that exceeded all bounds.
        total_s: the total seconds of all waits.

    Raises:
        ValueError: the bounds do not increase, or there is not exactly one more count than bounds.
    """

    bounds_s: Annotated[tuple[Seconds, ...], msgspec.Meta(max_length=MAX_BOUNDS)]
    counts: Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_BOUNDS + 1)]
    total_s: Seconds

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.bounds_s) + 1:
            raise ValueError(
                f"waits are counted for each bound and beyond the last: {len(self.bounds_s)} bounds have one "
                f"count more, got {len(self.counts)}"
            )
        if any(bound >= following for bound, following in pairwise(self.bounds_s)):
            raise ValueError(f"the bounds of waits grow, got {self.bounds_s}")


class Export(NamedTuple):
    """How a field of statistics is exported; made by `counter` and `gauge`.

    Attributes:
        kind: a ``"counter"`` only grows and outlasts its object; a ``"gauge"`` is a current value.
        metric: the name of the metric after the name of the role, for example after ``aiotensor_sender_``;
            "" for the name of the field.
        labels: the labels that distinguish fields with the same metric, and their values.
        is_largest: at each endpoint the largest value of all objects is exported, not the sum.
    """

    kind: Literal["counter", "gauge"]
    metric: str
    labels: tuple[tuple[str, str], ...] = ()
    is_largest: bool = False


def counter(text: str, *, metric: str = "", labels: Mapping[str, str] | None = None) -> msgspec.Meta:
    """Declare a field that only grows: a number, the durations of waits, or errors by type.

    The statistics frame, the Prometheus metrics, the counts of closed objects and the tables of
    docs/metrics.md derive from the declaration.

    Args:
        text: the help text, one or more sentences.
        metric: the name of the metric; see `Export`.
        labels: the same.
    """
    export = Export("counter", metric, tuple((labels or {}).items()))
    return msgspec.Meta(description=text, extra={"export": export})


def gauge(text: str, *, metric: str = "", largest: bool = False) -> msgspec.Meta:
    """Declare a field with a current value; arguments as for `counter`, and `largest` as in `Export`."""
    return msgspec.Meta(description=text, extra={"export": Export("gauge", metric, is_largest=largest)})
