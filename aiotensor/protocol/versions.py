"""What two sides are told that speak different versions of a protocol."""

__all__ = ["mismatch"]


def mismatch(theirs: int, ours: int) -> str:
    """Return why a peer of another version is refused, and what to do."""
    return (
        f"it speaks version {theirs} of the protocol, this side speaks {ours}: install the same aiotensor on "
        "both sides"
    )
