"""What a check has to say."""

import re
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Status", "in_words", "release_of"]


class Status(StrEnum):
    """How it is."""

    OK = "ok"
    NOTE = "note"  # worth knowing; most things work all the same
    PROBLEM = "problem"  # something that is needed is missing


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: what was looked at; stays the same from version to version.
        status: how it is.
        found: what is there, as a phrase without a full stop.
        advice: what to do, as a sentence without a full stop; None if all is fine.
    """

    check: str
    status: Status
    found: str
    advice: str | None = None


def in_words(nbytes: int) -> str:
    """Write a number of bytes in the largest unit that leaves a whole number before the point."""
    amount, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while amount >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.0f} {units[0]}" if units[0] == "bytes" else f"{amount:.1f} {units[0]}"


def release_of(version: str) -> tuple[int, int]:
    """Read the first two numbers of a version; zeros if there are none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
