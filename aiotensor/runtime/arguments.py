"""Check the limits and times that constructors and methods receive, and convert them to Python's own numbers.

A caller may pass numbers of numpy, which compare and print like others, but which frames cannot contain.
"""

import numbers
import operator
from typing import Any

from aiotensor.types import MAX_NUMBER


def count(name: str, value: int, least: int = 1) -> int:
    """Return a number of objects or bytes.

    Args:
        name: the name of the argument.
        value: its value.
        least: the least valid number; the greatest one is the largest that fits into a frame.

    Raises:
        TypeError: the value is not an integer.
        ValueError: the number is out of range.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r:.64}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    if number > MAX_NUMBER:
        raise ValueError(f"{name} must be at most {MAX_NUMBER}, got {number}")
    return number


def count_or_none(name: str, value: int | None) -> int | None:
    """Return a positive number of objects or bytes, as `count` does; None means no limit."""
    return None if value is None else count(name, value)


def seconds(name: str, value: float) -> float:
    """Return a number of seconds of at least 0.

    Raises:
        TypeError: the value is not a number.
        ValueError: the number is out of range.
    """
    number = _number(name, value)
    if not 0 <= number < 2**31 / 1000:
        raise ValueError(f"{name} must be at least 0 seconds, and at most {2**31 // 1000}, got {value}")
    return number


def seconds_or_never(name: str, value: float | None) -> float | None:
    """Return a positive number of seconds; None means never. Errors are those of `seconds`."""
    if value is None:
        return None
    number = _number(name, value)
    if not number > 0:
        raise ValueError(f"{name} must be positive, or None, got {value}")
    return number


def grace_period(value: float | None) -> float | None:
    """Return the time in seconds for which calls may wait for a peer; None means no limit.

    Errors are those of `seconds`.
    """
    return None if value is None else seconds("grace_s", value)


def _number(name: str, value: Any) -> float:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number of seconds, got {value!r:.64}")
    return float(value)
