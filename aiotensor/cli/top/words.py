"""What lines and tables write in the same way."""

from typing import NamedTuple

from aiotensor.cli.doctor.finding import in_words
from aiotensor.inspection import Inspection
from aiotensor.types import Holder

__all__ = ["Held", "brief", "counted", "holders_of", "named", "of_limit", "printable", "short"]

_SHOWN_OF_AN_ID = 6
_WITHOUT_POINT = 99.95  # what would be 100.0


class Held(NamedTuple):
    """Who holds something, and in which process."""

    pid: int
    holder: Holder

    @property
    def what(self) -> str:
        """Name what it is that is held."""
        if self.holder.message is None:
            return "no message yet"
        return f"message {self.holder.message}"


def holders_of(inspection: Inspection) -> list[Held]:
    """List the holders of all senders, the longest first."""
    found = [
        Held(sender.pid, holder)
        for sender in inspection.senders
        if sender.statistics is not None
        for holder in sender.statistics.holders
    ]
    return sorted(found, key=lambda held: -held.holder.seconds)


def short(nbytes: float) -> str:
    """Write a number of bytes in few letters: 4.2M is 4.2 MiB, and 420M is 420.0 MiB."""
    amount, unit = in_words(round(nbytes)).split()
    return f"{brief(float(amount)) if '.' in amount else amount}{unit[0].upper()}"


def brief(amount: float) -> str:
    """Write a number with a digit behind the point only if there are few before it."""
    return f"{amount:.1f}" if amount < _WITHOUT_POINT else f"{amount:.0f}"


def counted(count: int, noun: str) -> str:
    """Write a number of things."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def of_limit(value: object, limit: object | None) -> str:
    """Write how much of a limit is used, if there is one."""
    return f"{value}" if limit is None else f"{value} of {limit}"


def named(sender: str) -> str:
    """Shorten the id of a sender."""
    return printable(sender[:_SHOWN_OF_AN_ID])


def printable(text: str) -> str:
    """Replace what would tell a terminal to do something: a peer may say what it likes about itself."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
