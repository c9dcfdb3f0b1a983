"""The registry of all open objects of this process, and the counts of closed ones; usable from any thread.

Statistics can only be read in the thread and the event loop of their object. A thread that collects the
statistics of other threads therefore schedules a call in each of their loops, and waits for a limited time.
Two loops that collect at the same time do not wait for each other: each has read its own statistics before.
"""

import asyncio
import math
import os
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeAlias

from aiotensor.errors import UsageError
from aiotensor.statistics.counters import counters
from aiotensor.types import Statistics, Waits

# The kind and the endpoint of objects whose counts are added up.
Group: TypeAlias = tuple[type[Statistics], str]

# The maximum number of remembered groups without open objects. A program may open any number of addresses.
_MAX_CLOSED_GROUPS = 100

# How often a waiting thread checks whether a loop has ended without an answer. Other threads do not poll.
_CHECK_INTERVAL_S = 0.05

# The counts by the name of a counter and a part of it: "" for a plain number, the type of an error, the bound
# of a wait ("" for waits beyond the last bound), or "total_us" for the duration of all waits. All numbers are
# integers: a sum of floats may decrease when an object closes, since it is added in another order then.
Counts: TypeAlias = dict[tuple[str, str], int]


class Snapshot(NamedTuple):
    """The statistics of this process at one moment.

    Attributes:
        present: the endpoint and the statistics of each open object.
        counts: the counts of each group since the process began, of open and of closed objects.
        timeouts: how often a running loop has not answered in time since the process began; the snapshot
            contains the previous statistics of the objects of such a loop.
    """

    present: list[tuple[str, Statistics]]
    counts: dict[Group, Counts]
    timeouts: int


class HasStatistics(Protocol):
    """An object that can be registered."""

    def statistics(self) -> Statistics:
        """Return the current values and counts; also available after closing."""


class Entry:
    """An entry for an open object of this thread, which does not keep the object alive.

    Args:
        owner: the object.
        endpoint: the address or name that all objects at one endpoint have in common.
        loop: the event loop of the object.
    """

    def __init__(self, owner: HasStatistics, endpoint: str, loop: asyncio.AbstractEventLoop) -> None:
        self.endpoint = endpoint
        self.loop = loop
        self.thread = threading.get_ident()
        self.last: Statistics | None = None  # the statistics that were read last
        self.read_at = 0.0  # when the loop has read them, or infinity while it waits in `collect`
        self.is_closed = False
        self.is_removed = False  # `last` is part of the sum of closed objects, and must not change any more
        self.owner = weakref.ref(owner, self._free)
        self._is_freed = False

    def _free(self, _: object) -> None:
        # The garbage collector calls this in any thread and at any moment, so it must not take a lock.
        self._is_freed = True

    @property
    def is_over(self) -> bool:
        """Whether the object ended without being closed: it was freed, or its loop is closed."""
        # A reference to the object could become the last one, and free the object here, with the lock held.
        return self._is_freed or self.loop.is_closed()


class _Registry:
    """The entries of open objects, and the counts of closed ones."""

    def __init__(self) -> None:
        self.changed = threading.Condition()  # its lock is not held while statistics are read
        self.entries: dict[Entry, None] = {}
        self.closed: dict[Group, Counts] = {}  # the group closed last is at the end
        self.timeouts = 0

    def sweep(self) -> None:
        """Remove objects that ended without being closed. The caller holds the lock."""
        for entry in list(self.entries):
            if entry.is_over:
                self.remove(entry)

    def remove(self, entry: Entry) -> None:
        """Remove an object and keep its counts. The caller holds the lock."""
        if entry not in self.entries:
            return
        del self.entries[entry]
        entry.is_removed = True
        if entry.last is None:
            return  # freed before its statistics were read
        group = (type(entry.last), entry.endpoint)
        self.closed[group] = counts = self.closed.pop(group, {})
        _add_counts(counts, entry.last)
        if len(self.closed) > _MAX_CLOSED_GROUPS:
            # Forget the groups that were closed first, except groups in use, whose counts would decrease.
            in_use = {one.endpoint for one in self.entries}
            unused = [group for group in self.closed if group[1] not in in_use]
            for group in unused[:-_MAX_CLOSED_GROUPS]:
                del self.closed[group]

    def read(self, entry: Entry) -> None:
        """Read the statistics of an object, in its thread.

        Raises:
            UsageError: another loop runs in this thread.
        """
        owner = entry.owner()
        if owner is None:
            return
        statistics = owner.statistics()
        with self.changed:
            if not entry.is_removed:
                entry.last = statistics

    def read_here(self, entries: Iterable[Entry], is_waiting: bool = False) -> None:
        """Read the statistics of objects of this thread, and notify the threads that wait for them."""
        for entry in entries:
            with suppress(UsageError):  # another loop runs in this thread, instead of the object's
                self.read(entry)
        with self.changed:
            for entry in entries:
                entry.read_at = math.inf if is_waiting else time.monotonic()
            self.changed.notify_all()

    def read_all(self, entries: Iterable[Entry], timeout_s: float) -> None:
        """Read the statistics of objects, in the loops of their threads."""
        here, begin = threading.get_ident(), time.monotonic()
        mine = [entry for entry in entries if entry.thread == here]
        elsewhere: dict[asyncio.AbstractEventLoop, list[Entry]] = {}
        for entry in entries:
            if entry.thread != here and entry.loop.is_running():
                elsewhere.setdefault(entry.loop, []).append(entry)
        try:
            self.read_here(mine, is_waiting=True)
            for loop, theirs in elsewhere.items():
                with suppress(RuntimeError):  # the loop was closed in the meantime
                    loop.call_soon_threadsafe(self.read_here, theirs)
            with self.changed:
                while silent := [
                    loop
                    for loop, theirs in elsewhere.items()
                    if loop.is_running() and all(entry.read_at < begin for entry in theirs)
                ]:
                    left = begin + timeout_s - time.monotonic()
                    if left <= 0:
                        self.timeouts += len(silent)
                        return
                    # Check at intervals: a loop that ends without an answer notifies no thread.
                    self.changed.wait(min(left, _CHECK_INTERVAL_S))
        finally:
            for entry in mine:
                entry.read_at = time.monotonic()


_registry = _Registry()


def add(owner: HasStatistics, endpoint: str, loop: asyncio.AbstractEventLoop) -> Entry:
    """Register an open object, in its thread; the arguments are those of `Entry`."""
    entry = Entry(owner, endpoint, loop)
    with _registry.changed:
        _registry.sweep()
        _registry.entries[entry] = None
    return entry


def remove(entry: Entry) -> None:
    """Unregister an object and keep its counts. Must be called in its thread; may be called again."""
    with suppress(UsageError):  # the loop of the object is closed, and another one runs in this thread
        _registry.read(entry)
    entry.is_closed = True
    try:
        # Calls that wait for the object end in the next iteration, and are counted too.
        entry.loop.call_soon(_remove_now, entry)
    except RuntimeError:  # the loop is closed, and has no next iteration
        with _registry.changed:
            _registry.remove(entry)


def _remove_now(entry: Entry) -> None:
    _registry.read(entry)
    with _registry.changed:
        _registry.remove(entry)


def owners() -> list[HasStatistics]:
    """Return all open objects. Can be called from any thread."""
    with _registry.changed:
        present = list(_registry.entries)
    return [owner for entry in present if (owner := entry.owner()) is not None]


def collect(timeout_s: float) -> Snapshot:
    """Return the statistics of this process. Can be called from any thread.

    Waits for the loops of other threads that have objects.

    Args:
        timeout_s: the time limit in seconds, for all loops together.
    """
    registry = _registry
    with registry.changed:
        registry.sweep()
        present = list(registry.entries)
    registry.read_all(present, timeout_s)
    # Everything is read under one lock, so that the later of two snapshots has all counts of the earlier one.
    with registry.changed:
        registry.sweep()
        known = [(entry, entry.last) for entry in registry.entries if entry.last is not None]
        counts = {group: dict(counts) for group, counts in registry.closed.items()}
        timeouts = registry.timeouts
    for entry, last in known:
        _add_counts(counts.setdefault((type(last), entry.endpoint), {}), last)
    still_open = [(entry.endpoint, last) for entry, last in known if not entry.is_closed]
    return Snapshot(still_open, counts, timeouts)


def _renew() -> None:
    """Forget the objects of the parent: a forked child cannot use them."""
    global _registry
    _registry = _Registry()


os.register_at_fork(after_in_child=_renew)


def _add_counts(counts: Counts, statistics: Statistics) -> None:
    """Add the counters of an object to a sum."""
    for name in counters(type(statistics)):
        value = getattr(statistics, name)
        parts: Iterable[tuple[str, int]] = (("", value),)
        if isinstance(value, Waits):
            names = _parts_of_waits(value.bounds_s)
            parts = zip(names, (*value.counts, round(value.total_s * 1e6)), strict=True)
        elif isinstance(value, dict):
            parts = value.items()
        for part, number in parts:
            key = (name, part)
            counts[key] = counts.get(key, 0) + number


@lru_cache(maxsize=8)  # all objects of a process count waits by the same bounds
def _parts_of_waits(bounds_s: tuple[float, ...]) -> tuple[str, ...]:
    return (*map(str, bounds_s), "", "total_us")
