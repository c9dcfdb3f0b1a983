"""Format numbers and texts for the output of the subcommands."""

__all__ = ["brief", "counted", "in_words", "of_limit", "printable", "short"]

_LEAST_WITHOUT_POINT = 99.95  # rounds to 100.0


def in_words(nbytes: int) -> str:
    """Format a number of bytes in the largest unit of which it contains at least one, such as "1.5 MiB"."""
    amount, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while amount >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.0f} {units[0]}" if units[0] == "bytes" else f"{amount:.1f} {units[0]}"


def short(nbytes: float) -> str:
    """Format a number of bytes in few characters: 4.2M is 4.2 MiB, and 420M is 420.0 MiB."""
    amount, unit = in_words(round(nbytes)).split()
    return f"{brief(float(amount)) if '.' in amount else amount}{unit[0].upper()}"


def brief(amount: float) -> str:
    """Format a number with one decimal if it is less than 100, and without decimals otherwise."""
    return f"{amount:.1f}" if amount < _LEAST_WITHOUT_POINT else f"{amount:.0f}"


def counted(count: int, noun: str) -> str:
    """Format a count with its noun, in the plural unless the count is 1."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def of_limit(value: object, limit: object | None, of: str = " of ") -> str:
    """Format a value and its limit; the value alone if there is no limit (None)."""
    return f"{value}" if limit is None else f"{value}{of}{limit}"


def printable(text: str) -> str:
    """Replace control characters, because a peer may send a text that would control the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
