"""Entries of the registry for open objects."""

import asyncio
import threading
import weakref
from typing import Protocol

from aiotensor.types import Statistics

__all__ = ["Entry", "HasStatistics"]


class HasStatistics(Protocol):
    """An object that the registry can hold."""

    def statistics(self) -> Statistics:
        """Return the current values and counts; works after closing too."""


class Entry:
    """An entry for an open object of this thread, which does not keep the object alive.

    Args:
        owner: the object.
        endpoint: the address or name that all objects at one endpoint have in common.
        loop: the event loop of the object.
        number: larger than the numbers of earlier entries.
    """

    def __init__(
        self, owner: HasStatistics, endpoint: str, loop: asyncio.AbstractEventLoop, number: int
    ) -> None:
        self.endpoint = endpoint
        self.loop = loop
        self.number = number
        self.thread = threading.get_ident()
        self.last: Statistics | None = None  # the statistics that were read last
        self.is_closed = False
        self.is_removed = False  # `last` is part of the sum of closed objects, and must not change any more
        self._is_freed = False
        self._owner = weakref.ref(owner, self._free)

    def _free(self, _: object) -> None:
        # The garbage collector calls this in any thread and at any moment, so it must not take a lock.
        self._is_freed = True

    @property
    def is_over(self) -> bool:
        """Whether the object ended without being closed: it was freed, or its loop is closed."""
        # A reference to the object could become the last one, and free the object here, with the lock held.
        return self._is_freed or self.loop.is_closed()

    @property
    def owner(self) -> HasStatistics | None:
        """The object; None after it was freed."""
        return self._owner()
