"""What is open in this process, for whoever watches it, from any thread; and what was, as plain numbers.

Statistics are told only in the thread and the loop where an object lives. So whoever asks from elsewhere
leaves a question, wakes that loop, and waits, for so long at most. While a thread waits it answers the
questions that others have for it: two loops that ask each other would else both wait in vain.
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

# What only grows. The rest says what is so now, and ends with the object.
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

# Numbers by the name of the counter, and within it by the type of an error, the bound of a wait (the last has
# none), or "total_s".
Counts: TypeAlias = dict[tuple[str, str], float]

# What is the same in all that is counted together.
Place: TypeAlias = tuple[type[Statistics], str]

# That are closed, not in use, and still counted. Who opens another address each time would else collect them
# for ever.
_MAX_CLOSED_PLACES = 256

# For so long at most a loop is waited for that has ended meanwhile. Only a thread that waits wakes up for it.
_SLICE_S = 0.05


class Watched(Protocol):
    """What can be open."""

    def statistics(self) -> Statistics:
        """Return what is held and what was done; also after closing."""


# A later object has a larger number, and a later report.
_numbers = itertools.count(1)


class Opened:
    """An object that is open; does not keep it alive.

    Args:
        owner: the object.
        endpoint: what it is open at, in words that are the same for all that are open there.
        loop: where it lives.
    """

    def __init__(self, owner: Watched, endpoint: str, loop: asyncio.AbstractEventLoop) -> None:
        self.endpoint = endpoint
        self.loop = loop
        self.thread = threading.get_ident()
        self.last: Statistics | None = None
        self.is_closed = False
        self.number = next(_numbers)
        self.is_folded = False  # what it has counted is in the books, and is not to change any more
        self._is_freed = False
        self._owner = weakref.ref(owner, self._free)

    def _free(self, _: object) -> None:
        # In any thread and at any moment, so no more than this.
        self._is_freed = True

    @property
    def is_over(self) -> bool:
        """Say whether it went without being closed: it was freed, or its loop is closed."""
        # Not by a look at the object, which another thread might then free here and now, with the lock held.
        return self._is_freed or self.loop.is_closed()

    @property
    def owner(self) -> Watched | None:
        """The object, if it is there."""
        return self._owner()

    def look(self) -> None:
        """Note what it says now; in its thread.

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
    """What one thread wants to know of the objects in a loop of another."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        self.loop = loop
        self.thread = thread
        self.objects: list[Opened] = []
        self.is_answered = False

    @property
    def is_settled(self) -> bool:
        """Say whether there is nothing to wait for: a loop that has ended answers nothing any more."""
        return self.is_answered or not self.loop.is_running()


class _Books:
    """All that is open in this process."""

    def __init__(self) -> None:
        # Reentrant: the handler of a signal may look while its thread does. Not held while objects are asked.
        self.changed = threading.Condition(threading.RLock())
        self.open: dict[Opened, None] = {}
        # With the number of the object that they began with; the latest last.
        self.closed: dict[Place, tuple[Counts, int]] = {}
        self.questions: dict[int, list[_Question]] = {}  # for each thread
        self._is_folding = False

    def sweep(self) -> None:
        """Strike out what went without being closed; the lock is held."""
        for opened in list(self.open):
            if opened.is_over:
                self.fold(opened)

    def fold(self, opened: Opened) -> None:
        """Keep of an object what it has counted, and no more; the lock is held."""
        # The handler of a signal may come amid this, and look. It leaves such work to whom it interrupted.
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
        if opened.last is None:  # freed before anybody looked
            del self.open[opened]
            return
        place = (type(opened.last), opened.endpoint)
        before, number = self.closed.get(place, ({}, opened.number))
        counts = dict(before)
        _count(opened.last, counts)
        kept = (counts, min(number, opened.number))
        # From here on nothing is called, so that no handler comes between and misses it, or finds it twice.
        if place in self.closed:
            del self.closed[place]
        self.closed[place] = kept
        del self.open[opened]

    def _forget(self) -> None:
        """Forget those that were closed first; never one in use, whose counts would go back."""
        if len(self.closed) <= _MAX_CLOSED_PLACES:
            return
        in_use = {opened.endpoint for opened in list(self.open)}
        unused = [place for place in self.closed if place[1] not in in_use]
        for place in unused[:-_MAX_CLOSED_PLACES]:
            del self.closed[place]

    def answer(self) -> None:
        """Answer what others ask this thread."""
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
        """Have objects say what is so now, and return how many of the loops that run did not."""
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
                        # Not for longer: of a loop that ends with a question in it nobody hears.
                        self.changed.wait(min(left, _SLICE_S))
        finally:
            self._take_back(questions)
        return sum(not question.is_settled for question in questions)

    def _put(self, questions: list[_Question]) -> None:
        with self.changed:
            for question in questions:
                self.questions.setdefault(question.thread, []).append(question)
            self.changed.notify_all()  # it may be waiting for an answer itself
        for question in questions:
            with suppress(RuntimeError):  # it was closed just now
                question.loop.call_soon_threadsafe(self.answer)

    def _take_back(self, questions: list[_Question]) -> None:
        """Ask no longer."""
        with self.changed:
            for question in questions:
                others = self.questions.get(question.thread, [])
                if question in others:
                    others.remove(question)
                    if not others:
                        del self.questions[question.thread]


_books = _Books()


def add(owner: Watched, endpoint: str, loop: asyncio.AbstractEventLoop) -> Opened:
    """Let an object be found; in its thread.

    Args:
        owner: the object.
        endpoint: what it is open at.
        loop: where it lives.
    """
    opened = Opened(owner, endpoint, loop)
    with _books.changed:
        _books.sweep()
        _books.open[opened] = None
    return opened


def remove(opened: Opened) -> None:
    """Let it be found no more, and keep what it has counted; in its loop. May be called again."""
    with suppress(UsageError):  # another loop runs here, since that one is closed
        opened.look()
    opened.is_closed = True
    try:
        # Who waited hears of the end in the next turn, and what that counts is to be counted too.
        opened.loop.call_soon(_strike_out, opened)
    except RuntimeError:  # it is closed, and has no next turn
        with _books.changed:
            _books.fold(opened)


def owners() -> list[Watched]:
    """Return every object that is open; from any thread."""
    with _books.changed:
        present = list(_books.open)
    return [owner for opened in present if (owner := opened.owner) is not None]


def look(timeout_s: float) -> Report:
    """Return what there is in this process; from any thread.

    Waits for the loops of other threads, and does nothing where nobody lives in them.

    Args:
        timeout_s: for how many seconds it waits, for all of them together.
    """
    books = _books
    with books.changed:
        books.sweep()
        present = list(books.open)
    unanswered = books.ask(present, timeout_s)
    # All at once, so that of two reports one is the later one, with all that the earlier one has.
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
    """Forget what the parent has open: a forked child cannot use it."""
    global _books
    _books = _Books()


os.register_at_fork(after_in_child=_renew)
