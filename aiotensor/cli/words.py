"""Format sizes, and texts that may come from a peer."""


def in_words(nbytes: int) -> str:
    """Format a number of bytes in the largest unit of which it contains at least one, such as "1.5 MiB"."""
    amount, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while amount >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.0f} {units[0]}" if units[0] == "bytes" else f"{amount:.1f} {units[0]}"


def short(nbytes: float) -> str:
    """Format a number of bytes in few characters: 4.2M is 4.2 MiB."""
    amount, unit = in_words(round(nbytes)).split()
    return f"{amount}{unit[0].upper()}"


def printable(text: str) -> str:
    """Replace control characters, because a peer may send a text that would control the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
