"""What is open in this process, for whoever watches it, from any thread; and what was, as plain numbers.

Statistics are told only in the thread and the loop where an object lives. So whoever asks from elsewhere
leaves a question, wakes that loop, and waits, for so long at most. While a thread waits it answers the
questions that others have for it: two loops that ask each other would else both wait in vain.
"""

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
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

# That are closed and still counted. Who opens another address each time would else collect them for ever.
_MAX_CLOSED_PLACES = 256


class Watched(Protocol):
    """What can be open."""

    def statistics(self) -> Statistics:
        """Return what is held and what was done; also after closing."""


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
        self._owner = weakref.ref(owner)

    @property
    def is_over(self) -> bool:
        """Say whether it went without being closed: it was freed, or its loop is closed."""
        return self._owner() is None or self.loop.is_closed()

    def look(self) -> None:
        """Note what it says now; in its thread.

        Raises:
            UsageError: another loop runs in this thread.
        """
        owner = self._owner()
        if owner is not None:
            self.last = owner.statistics()


class Report(NamedTuple):
    """What there is in this process.

    Attributes:
        present: what is open says, each with its endpoint.
        counts: what was counted at each place since the process began, by what is open and what was.
        unanswered: how many loops did not answer. What their objects said before is in the report.
    """

    present: list[tuple[str, Statistics]]
    counts: dict[Place, Counts]
    unanswered: int


class _Question:
    """What one thread wants to know of an object that lives in another."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.is_answered = False


class _Books:
    """All that is open in this process."""

    def __init__(self) -> None:
        # Reentrant: the handler of a signal may look while its thread does. Not held while objects are asked.
        self.changed = threading.Condition(threading.RLock())
        self.open: dict[Opened, None] = {}
        self.closed: dict[Place, Counts] = {}  # the latest last
        self.questions: dict[int, list[_Question]] = {}  # for each thread

    def sweep(self) -> None:
        """Strike out what went without being closed; the lock is held."""
        for opened in [opened for opened in self.open if opened.is_over]:
            self.fold(opened)

    def fold(self, opened: Opened) -> None:
        """Keep of an object what it has counted, and no more; the lock is held."""
        if opened not in self.open:
            return
        del self.open[opened]
        if opened.last is None:
            return  # freed before anybody looked
        place = (type(opened.last), opened.endpoint)
        counts = self.closed.pop(place, {})
        _count(opened.last, counts)
        self.closed[place] = counts
        if len(self.closed) > _MAX_CLOSED_PLACES:
            in_use = {opened.endpoint for opened in self.open}  # whose counts would go back
            oldest = next((place for place in self.closed if place[1] not in in_use), place)
            del self.closed[oldest]

    def answer(self) -> None:
        """Answer what others ask this thread."""
        here = threading.get_ident()
        while True:
            with self.changed:
                questions = self.questions.pop(here, [])
            if not questions:
                return
            for question in questions:
                with suppress(UsageError):  # another loop runs here by now
                    question.opened.look()
                    question.is_answered = True
            with self.changed:
                self.changed.notify_all()

    def ask(self, opened: Iterable[Opened], timeout_s: float) -> list[Opened]:
        """Have objects say what is so now, and return those that did not."""
        here, end = threading.get_ident(), time.monotonic() + timeout_s
        silent: list[Opened] = []
        asked: list[_Question] = []
        for one in opened:
            if one.thread == here:
                try:
                    one.look()
                except UsageError:  # another loop runs here, so that one does not
                    silent.append(one)
            elif one.loop.is_running():
                asked.append(_Question(one))
            else:
                silent.append(one)
        try:
            self._put(asked)
            while not all(question.is_answered for question in asked):
                self.answer()
                with self.changed:
                    left = end - time.monotonic()
                    if left <= 0:
                        break
                    if here not in self.questions and not all(question.is_answered for question in asked):
                        self.changed.wait(left)
        finally:
            self._take_back(asked)
        return silent + [question.opened for question in asked if not question.is_answered]

    def _put(self, questions: list[_Question]) -> None:
        with self.changed:
            for question in questions:
                self.questions.setdefault(question.opened.thread, []).append(question)
            self.changed.notify_all()  # it may be waiting for an answer itself
        for loop in {question.opened.loop for question in questions}:
            try:
                loop.call_soon_threadsafe(self.answer)
            except RuntimeError:  # it was closed just now
                for question in questions:
                    question.is_answered |= question.opened.loop is loop

    def _take_back(self, questions: list[_Question]) -> None:
        """Ask no longer."""
        with self.changed:
            for question in questions:
                others = self.questions.get(question.opened.thread, [])
                if question in others:
                    others.remove(question)
                    if not others:
                        del self.questions[question.opened.thread]


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
    opened.look()
    opened.is_closed = True
    # Who waited hears of the end in the next turn, and what that counts is to be counted too.
    opened.loop.call_soon(_strike_out, opened)


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
        counts = {place: dict(counts) for place, counts in books.closed.items()}
    silent = books.ask(present, timeout_s)
    # What was closed in the meantime has left its last word, and is not in the counts of those before.
    said = [(opened, opened.last) for opened in present if opened.last is not None]
    for opened, last in said:
        _count(last, counts.setdefault((type(last), opened.endpoint), {}))
    with books.changed:
        books.sweep()
        still_open = [
            (opened.endpoint, last) for opened, last in said if opened in books.open and not opened.is_closed
        ]
    loops = {opened.loop for opened in silent if not opened.loop.is_closed()}
    return Report(still_open, counts, len(loops))


def _strike_out(opened: Opened) -> None:
    opened.look()
    with _books.changed:
        _books.fold(opened)


def _count(statistics: Statistics, counts: Counts) -> None:
    """Add what an object has counted."""
    for name in COUNTERS[type(statistics)]:
        value = getattr(statistics, name)
        parts = {"": value}
        if isinstance(value, Waits):
            names = [*map(str, value.bounds_s), ""]
            parts = {**dict(zip(names, value.counts, strict=True)), "total_s": value.total_s}
        elif isinstance(value, dict):
            parts = value
        for part, number in parts.items():
            counts[name, part] = counts.get((name, part), 0) + number


def _renew() -> None:
    """Forget what the parent has open: a forked child cannot use it."""
    global _books
    _books = _Books()


os.register_at_fork(after_in_child=_renew)
