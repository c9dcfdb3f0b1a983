"""File descriptors that this process was given."""

import os
from collections.abc import Iterable

__all__ = ["close_all"]


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors that nobody wants."""
    for descriptor in descriptors:
        os.close(descriptor)
