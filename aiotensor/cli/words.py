"""Numbers and texts as the subcommands write them."""

__all__ = ["brief", "by_engine", "counted", "in_words", "of_limit", "printable", "short"]

_LEAST_WITHOUT_POINT = 99.95  # rounds to 100.0


def in_words(nbytes: int) -> str:
    """Write a number of bytes in the largest unit that leaves a whole number before the point."""
    amount, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while amount >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.0f} {units[0]}" if units[0] == "bytes" else f"{amount:.1f} {units[0]}"


def short(nbytes: float) -> str:
    """Write a number of bytes in few letters: 4.2M is 4.2 MiB, and 420M is 420.0 MiB."""
    amount, unit = in_words(round(nbytes)).split()
    return f"{brief(float(amount)) if '.' in amount else amount}{unit[0].upper()}"


def brief(amount: float) -> str:
    """Write a number with a digit after the point only if it has few digits before it."""
    return f"{amount:.1f}" if amount < _LEAST_WITHOUT_POINT else f"{amount:.0f}"


def counted(count: int, noun: str) -> str:
    """Write a number of things."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def by_engine(connections: int) -> list[str]:
    """Count the connections that use an engine, if any does."""
    return [f"{connections} by NIXL"] if connections else []


def of_limit(value: object, limit: object | None, of: str = " of ") -> str:
    """Write a value and its limit; None is no limit."""
    return f"{value}" if limit is None else f"{value}{of}{limit}"


def printable(text: str) -> str:
    """Replace control characters: a peer may send a text that would control the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
