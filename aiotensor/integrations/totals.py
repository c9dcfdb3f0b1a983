"""Statistics of this process, added up under a limited number of endpoints."""

import operator
import os
import threading
import weakref
from collections import deque
from typing import NamedTuple

from aiotensor.statistics.registry import Counts, Place, Report, Statistics

__all__ = ["MAX_ENDPOINTS", "OTHER", "EndpointTotals", "Totals", "checked_max_endpoints"]

MAX_ENDPOINTS = 100

# The endpoint of the rest. No address has this name, and neither has a queue.
OTHER = "other"


class Totals(NamedTuple):
    """Statistics under the endpoints that are exported. The values never change.

    Attributes:
        present: the exported endpoint and the statistics of each open object.
        counts: the counts of each kind of object at each exported endpoint; they never decrease.
        timeouts: the number of times that an event loop did not answer in time; None before any report.
    """

    present: list[tuple[str, Statistics]]
    counts: dict[Place, Counts]
    timeouts: int | None


class _State(NamedTuple):
    """The result of all reports so far; replaced and never changed, since other threads may be reading it."""

    last: Report
    named: set[str]
    others: set[str]  # endpoints with open objects that have no name
    totals: Totals


class EndpointTotals:
    """Add up reports under the names of a limited number of endpoints, and the rest as `OTHER`.

    The first endpoints get the names. An endpoint keeps its name, or `OTHER`, while objects are open at it.
    If no name is left for a new endpoint with open objects, it replaces the endpoint that has been closed for
    the longest time.

    The counts of closed objects are forgotten at some time, and a sum of counts would then decrease. So the
    increments from report to report are added up instead, each under the name that its endpoint has in the
    later report.

    Args:
        keeps_names: keep a name forever, because its series cannot be removed.
    """

    def __init__(self, *, keeps_names: bool = False) -> None:
        self._keeps_names = keeps_names
        self.renew()
        _all.add(self)

    def renew(self) -> None:
        """Forget all reports: a forked child has none of the objects of its parent."""
        # Reentrant: a signal handler that scrapes may interrupt a scrape in its thread.
        self._lock = threading.RLock()
        self._state = _State(Report([], {}, {}, 0, 0), set(), set(), Totals([], {}, 0))
        self.timeouts = 0

    def take(self, report: Report, max_endpoints: int) -> Totals:
        """Add a report and return the totals, from any thread.

        If another thread has taken a later report in the meantime, the totals are those of the later report.

        Args:
            report: a report of this process.
            max_endpoints: the number of endpoints with names, at least 1.
        """
        with self._lock:
            self.timeouts += report.unanswered
            if report.number > self._state.last.number:
                self._state = self._next(report, max_endpoints)
            return self._state.totals._replace(timeouts=self.timeouts)

    def _next(self, report: Report, max_endpoints: int) -> _State:
        named, others = self._names(report, max_endpoints)
        last, _, _, totals = self._state
        counts = {
            (kind, name): dict(total)
            for (kind, name), total in totals.counts.items()
            if name in named or name == OTHER
        }
        for place, told in report.counts.items():
            kind, endpoint = place
            before = last.counts.get(place, {})
            if before and report.begun[place] > last.begun[place]:
                before = {}  # these counts were forgotten
            exported = (kind, endpoint if endpoint in named else OTHER)
            if told == before and exported in counts:
                continue
            total = counts.setdefault(exported, {})
            for key, number in told.items():
                # Seconds that are added up in another order may be less by a rounding error.
                total[key] = total.get(key, 0) + max(0, number - before.get(key, 0))
        present = [
            (endpoint if endpoint in named else OTHER, statistics) for endpoint, statistics in report.present
        ]
        return _State(report, named, others, Totals(present, counts, None))

    def _names(self, report: Report, max_endpoints: int) -> tuple[set[str], set[str]]:
        """Return the endpoints that have names, and those with open objects that have none."""
        last, named_before, others_before, _ = self._state
        known = {endpoint for _, endpoint in last.counts}
        counted = dict.fromkeys(endpoint for _, endpoint in report.counts)
        in_use = dict.fromkeys(endpoint for endpoint, _ in report.present)
        if self._keeps_names:
            named = set(named_before)
            replaceable = deque[str]()
        else:
            named = {endpoint for endpoint in named_before if endpoint in counted}
            replaceable = deque(
                endpoint for endpoint in counted if endpoint in named and endpoint not in in_use
            )
        others = {endpoint for endpoint in others_before if endpoint in in_use}
        # The remaining names go to endpoints that were closed before their first report, the latest first.
        closed = (endpoint for endpoint in reversed(counted) if endpoint not in known)
        for endpoint in (*in_use, *closed):
            if endpoint in named or endpoint in others:
                continue
            if len(named) >= max_endpoints and replaceable and endpoint in in_use:
                named.remove(replaceable.popleft())
            if len(named) < max_endpoints:
                named.add(endpoint)
            elif endpoint in in_use:
                others.add(endpoint)
        return named, others


_all: weakref.WeakSet[EndpointTotals] = weakref.WeakSet()


def checked_max_endpoints(value: int) -> int:
    """Return a limit of endpoints.

    Raises:
        TypeError: it is no integer.
        ValueError: it is less than 1.
    """
    number = operator.index(value)
    if number < 1:
        raise ValueError(f"max_endpoints must be at least 1, got {value}")
    return number


def _renew() -> None:
    for totals in _all:
        totals.renew()


os.register_at_fork(after_in_child=_renew)
