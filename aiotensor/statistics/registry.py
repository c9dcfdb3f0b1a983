"""The registry of all open objects of this process, and the counts of closed ones; for any thread.

Statistics can only be read in the thread and the event loop of their object. So a report from another thread
leaves a question, wakes that loop, and waits for a limited time. A waiting thread answers the questions of
other threads: otherwise two loops that ask each other would both wait for the whole time.
"""

import asyncio
import itertools
import os
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeAlias

from aiotensor.errors import UsageError
from aiotensor.types import ClientStatistics, ReceiverStatistics, SenderStatistics, ServerStatistics, Waits

__all__ = [
    "COUNTERS",
    "Counts",
    "Opened",
    "Place",
    "Report",
    "Statistics",
    "Watched",
    "add",
    "look",
    "owners",
    "remove",
]

Statistics: TypeAlias = SenderStatistics | ReceiverStatistics | ClientStatistics | ServerStatistics

# Fields that only grow. The other fields describe the current state, and end with the object.
COUNTERS: dict[type[Statistics], tuple[str, ...]] = {
    SenderStatistics: (
        "messages_sent",
        "messages_discarded",
        "tensors_sent",
        "bytes_sent",
        "receivers_lost",
        "permit_waits",
        "memory_waits",
        "tensors_copied",
        "bytes_copied",
        "errors",
    ),
    ReceiverStatistics: (
        "senders_lost",
        "senders_refused",
        "tensors_taken",
        "bytes_taken",
        "messages_discarded",
        "tensors_copied",
        "bytes_copied",
        "errors",
    ),
    ClientStatistics: ("messages_sent", "answers", "failures", "cancelled", "servers_lost", "errors"),
    ServerStatistics: (
        "messages_received",
        "answers",
        "failures",
        "cancelled",
        "clients_lost",
        "clients_refused",
    ),
}

# A key is the name of a counter with "", the type of an error, the bound of a wait ("" for the last one), or
# "total_s".
Counts: TypeAlias = dict[tuple[str, str], float]

# The kind and the endpoint of objects, whose counts are added up.
Place: TypeAlias = tuple[type[Statistics], str]

# The number of remembered places without open objects: a program may open a new address each time.
_MAX_CLOSED_PLACES = 256

# A waiting thread looks this often whether a loop has ended without an answer. Other threads never wake up.
_SLICE_S = 0.05


class Watched(Protocol):
    """An object that can be open."""

    def statistics(self) -> Statistics:
        """Return current values and counts; also after closing."""


# A later object has a larger number, and a later report.
_numbers = itertools.count(1)


class Opened:
    """An entry for an open object, which does not keep the object alive.

    Args:
        owner: the object.
        endpoint: the address or name that all objects at one endpoint have in common.
        loop: the event loop of the object.
    """

    def __init__(self, owner: Watched, endpoint: str, loop: asyncio.AbstractEventLoop) -> None:
        self.endpoint = endpoint
        self.loop = loop
        self.thread = threading.get_ident()
        self.last: Statistics | None = None
        self.is_closed = False
        self.number = next(_numbers)
        self.is_folded = False  # its counts are in `_Books.closed`, and must not change any more
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
    def owner(self) -> Watched | None:
        """The object; None after it was freed."""
        return self._owner()

    def look(self) -> None:
        """Read the statistics of the object, in its thread.

        Raises:
            UsageError: another loop runs in this thread.
        """
        owner = self._owner()
        if owner is None:
            return
        said = owner.statistics()
        with _books.changed:
            if not self.is_folded:
                self.last = said


class Report(NamedTuple):
    """The statistics of this process at one moment.

    Attributes:
        present: the endpoint and the statistics of each open object.
        counts: the counts of each place since the process began, of open and of closed objects; the places
            with closed objects come first, in the order of closing.
        begun: a number for each place, which is larger after the counts of the place were forgotten.
        unanswered: the number of running loops that did not answer; the report has the previous statistics of
            their objects.
        number: a later report has a larger number, and no smaller counts unless these were forgotten.
    """

    present: list[tuple[str, Statistics]]
    counts: dict[Place, Counts]
    begun: dict[Place, int]
    unanswered: int
    number: int


class _Question:
    """A request of one thread for the statistics of the objects in a loop of another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        self.loop = loop
        self.thread = thread
        self.objects: list[Opened] = []
        self.is_answered = False

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to wait for: the loop has answered, or has ended and cannot answer."""
        return self.is_answered or not self.loop.is_running()


class _Books:
    """The open objects of this process, and the counts of closed ones."""

    def __init__(self) -> None:
        # Reentrant: a signal handler may make a report during a report. Not held while statistics are read.
        self.changed = threading.Condition(threading.RLock())
        self.open: dict[Opened, None] = {}
        # The counts, and the number of the first object in them; the place closed last is at the end.
        self.closed: dict[Place, tuple[Counts, int]] = {}
        self.questions: dict[int, list[_Question]] = {}  # for each thread
        self._is_folding = False

    def sweep(self) -> None:
        """Remove objects that ended without being closed; the lock is held."""
        for opened in list(self.open):
            if opened.is_over:
                self.fold(opened)

    def fold(self, opened: Opened) -> None:
        """Remove an object and keep its counts; the lock is held."""
        # A signal handler may make a report during this, and leaves the folding to the interrupted call.
        if self._is_folding:
            return
        self._is_folding = True
        try:
            if opened in self.open:
                self._fold(opened)
                self._forget()
        finally:
            self._is_folding = False

    def _fold(self, opened: Opened) -> None:
        opened.is_folded = True
        if opened.last is None:  # freed before its statistics were read
            del self.open[opened]
            return
        place = (type(opened.last), opened.endpoint)
        before, number = self.closed.get(place, ({}, opened.number))
        counts = dict(before)
        _count(opened.last, counts)
        kept = (counts, min(number, opened.number))
        # From here on nothing is called: a signal handler in between could miss the object or find it twice.
        if place in self.closed:
            del self.closed[place]
        self.closed[place] = kept
        del self.open[opened]

    def _forget(self) -> None:
        """Forget the places that were closed first, but not places in use, whose counts would decrease."""
        if len(self.closed) <= _MAX_CLOSED_PLACES:
            return
        in_use = {opened.endpoint for opened in list(self.open)}
        unused = [place for place in self.closed if place[1] not in in_use]
        for place in unused[:-_MAX_CLOSED_PLACES]:
            del self.closed[place]

    def answer(self) -> None:
        """Answer the questions of other threads to this thread."""
        here = threading.get_ident()
        while True:
            with self.changed:
                questions = self.questions.pop(here, [])
            if not questions:
                return
            for question in questions:
                for opened in question.objects:
                    with suppress(UsageError):  # another loop runs here by now
                        opened.look()
                question.is_answered = True
            with self.changed:
                self.changed.notify_all()

    def ask(self, present: Iterable[Opened], timeout_s: float) -> int:
        """Read the statistics of objects, and return the number of running loops that did not answer."""
        here, end = threading.get_ident(), time.monotonic() + timeout_s
        asked: dict[tuple[asyncio.AbstractEventLoop, int], _Question] = {}
        for opened in present:
            if opened.thread == here:
                with suppress(UsageError):  # another loop runs here, so that one does not
                    opened.look()
            elif opened.loop.is_running():
                key = (opened.loop, opened.thread)
                asked.setdefault(key, _Question(*key)).objects.append(opened)
        questions = list(asked.values())
        try:
            self._put(questions)
            while not all(question.is_settled for question in questions):
                self.answer()
                with self.changed:
                    left = end - time.monotonic()
                    if left <= 0:
                        break
                    if here not in self.questions and not all(question.is_settled for question in questions):
                        # Not for longer: a loop that ends with a pending question notifies no thread.
                        self.changed.wait(min(left, _SLICE_S))
        finally:
            self._take_back(questions)
        return sum(not question.is_settled for question in questions)

    def _put(self, questions: list[_Question]) -> None:
        with self.changed:
            for question in questions:
                self.questions.setdefault(question.thread, []).append(question)
            self.changed.notify_all()  # that thread may be waiting for an answer itself
        for question in questions:
            with suppress(RuntimeError):  # the loop was closed in the meantime
                question.loop.call_soon_threadsafe(self.answer)

    def _take_back(self, questions: list[_Question]) -> None:
        """Withdraw questions that are not answered yet."""
        with self.changed:
            for question in questions:
                others = self.questions.get(question.thread, [])
                if question in others:
                    others.remove(question)
                    if not others:
                        del self.questions[question.thread]


_books = _Books()


def add(owner: Watched, endpoint: str, loop: asyncio.AbstractEventLoop) -> Opened:
    """Register an open object, in its thread.

    Args:
        owner: the object.
        endpoint: the address or name that all objects at one endpoint have in common.
        loop: the event loop of the object.
    """
    opened = Opened(owner, endpoint, loop)
    with _books.changed:
        _books.sweep()
        _books.open[opened] = None
    return opened


def remove(opened: Opened) -> None:
    """Unregister an object and keep its counts, in its loop. Can be called again."""
    with suppress(UsageError):  # another loop runs here, since that one is closed
        opened.look()
    opened.is_closed = True
    try:
        # Calls that wait for the object end in the next iteration, and are counted too.
        opened.loop.call_soon(_strike_out, opened)
    except RuntimeError:  # the loop is closed, and has no next iteration
        with _books.changed:
            _books.fold(opened)


def owners() -> list[Watched]:
    """Return every open object, from any thread."""
    with _books.changed:
        present = list(_books.open)
    return [owner for opened in present if (owner := opened.owner) is not None]


def look(timeout_s: float) -> Report:
    """Return a report of this process, from any thread; wait for loops of other threads with open objects.

    Args:
        timeout_s: seconds to wait, for all loops together.
    """
    books = _books
    with books.changed:
        books.sweep()
        present = list(books.open)
    unanswered = books.ask(present, timeout_s)
    # Everything under one lock, so that the later one of two reports has all counts of the earlier one.
    with books.changed:
        books.sweep()
        number = next(_numbers)
        present = list(books.open)
        closed = dict(books.closed)
        said = [(opened, opened.last) for opened in present if opened.last is not None]
    counts = {place: dict(counts) for place, (counts, _) in closed.items()}
    begun = {place: first for place, (_, first) in closed.items()}
    for opened, last in said:
        place = (type(last), opened.endpoint)
        _count(last, counts.setdefault(place, {}))
        begun[place] = min(begun.get(place, opened.number), opened.number)
    still_open = [(opened.endpoint, last) for opened, last in said if not opened.is_closed]
    return Report(still_open, counts, begun, unanswered, number)


def _strike_out(opened: Opened) -> None:
    opened.look()
    with _books.changed:
        _books.fold(opened)


def _count(statistics: Statistics, counts: Counts) -> None:
    """Add the counts of an object."""
    for name in COUNTERS[type(statistics)]:
        value = getattr(statistics, name)
        parts: Iterable[tuple[str, float]] = (("", value),)
        if isinstance(value, Waits):
            parts = zip(_parts_of_waits(value.bounds_s), (*value.counts, value.total_s), strict=True)
        elif isinstance(value, dict):
            parts = value.items()
        for part, number in parts:
            key = (name, part)
            counts[key] = counts.get(key, 0) + number


@lru_cache(maxsize=8)  # all tallies of a process have the same bounds
def _parts_of_waits(bounds_s: tuple[float, ...]) -> tuple[str, ...]:
    return (*map(str, bounds_s), "", "total_s")


def _renew() -> None:
    """Forget the objects of the parent: a forked child cannot use them."""
    global _books
    _books = _Books()


os.register_at_fork(after_in_child=_renew)
