"""The statistics of this process, added up for a limited number of endpoints."""

import os
import threading
import weakref
from collections import deque
from typing import NamedTuple

from aiotensor.statistics.registry import Counts, Group, Snapshot
from aiotensor.types import Statistics

__all__ = ["MAX_ENDPOINTS", "OTHER", "EndpointTotals", "Totals"]

MAX_ENDPOINTS = 100

# The name under which all further endpoints are exported together. No address or queue has this name.
OTHER = "other"


class Totals(NamedTuple):
    """The totals of all snapshots so far; replaced but never modified, since other threads may read them.

    Attributes:
        present: the exported name of the endpoint and the statistics of each open object.
        counts: the counts of each kind of object under each exported name; they never decrease.
        last: the last snapshot.
        named: the endpoints that are exported under their own names.
        others: the endpoints with open objects that are exported as `OTHER`.
    """

    present: list[tuple[str, Statistics]]
    counts: dict[Group, Counts]
    last: Snapshot
    named: set[str]
    others: set[str]


class EndpointTotals:
    """Add up snapshots under the names of a limited number of endpoints, and the rest as `OTHER`.

    The first endpoints get the names. An endpoint keeps its name, or `OTHER`, while objects are open at it.
    If no name is left for a new endpoint with open objects, it replaces the endpoint that has been closed for
    the longest time.

    The counts of closed objects are eventually forgotten, and a sum of counts would then decrease. So the
    increments from snapshot to snapshot are added up instead, each under the name that its endpoint has in
    the later snapshot.

    Args:
        keeps_names: whether endpoints keep their names forever, because series cannot be removed.

    Attributes:
        timeouts: the number of times that an event loop did not answer in time.
    """

    def __init__(self, *, keeps_names: bool = False) -> None:
        self._keeps_names = keeps_names
        self.renew()
        _all.add(self)

    def renew(self) -> None:
        """Forget all snapshots: a forked child has none of the objects of its parent."""
        # Reentrant: a signal handler that scrapes may interrupt a scrape in its thread.
        self._lock = threading.RLock()
        self._totals = Totals([], {}, Snapshot([], {}, {}, 0, 0), set(), set())
        self.timeouts = 0

    def take(self, snapshot: Snapshot, max_endpoints: int) -> Totals:
        """Add a snapshot and return the totals. Can be called from any thread.

        If another thread has added a later snapshot in the meantime, the totals include that one instead.

        Args:
            snapshot: a snapshot of this process.
            max_endpoints: the maximum number of endpoints with names of their own, at least 1.
        """
        with self._lock:
            self.timeouts += snapshot.unanswered
            if snapshot.number > self._totals.last.number:
                self._totals = self._next(snapshot, max_endpoints)
            return self._totals

    def _next(self, snapshot: Snapshot, max_endpoints: int) -> Totals:
        named, others = self._names(snapshot, max_endpoints)
        last = self._totals.last
        counts = {
            (kind, name): dict(total)
            for (kind, name), total in self._totals.counts.items()
            if name in named or name == OTHER
        }
        for group, counted in snapshot.counts.items():
            kind, endpoint = group
            before = last.counts.get(group, {})
            if before and snapshot.begun[group] > last.begun[group]:
                before = {}  # the registry has forgotten these counts
            exported = (kind, endpoint if endpoint in named else OTHER)
            if counted == before and exported in counts:
                continue
            total = counts.setdefault(exported, {})
            for key, number in counted.items():
                # Seconds that were added up in another order may be less, because of rounding errors.
                total[key] = total.get(key, 0) + max(0, number - before.get(key, 0))
        present = [
            (endpoint if endpoint in named else OTHER, statistics)
            for endpoint, statistics in snapshot.present
        ]
        return Totals(present, counts, snapshot, named, others)

    def _names(self, snapshot: Snapshot, max_endpoints: int) -> tuple[set[str], set[str]]:
        """Return the endpoints that have names, and those with open objects that have none."""
        before = self._totals
        known = {endpoint for _, endpoint in before.last.counts}
        counted = dict.fromkeys(endpoint for _, endpoint in snapshot.counts)
        in_use = dict.fromkeys(endpoint for endpoint, _ in snapshot.present)
        if self._keeps_names:
            named = set(before.named)
            replaceable = deque[str]()
        else:
            named = {endpoint for endpoint in before.named if endpoint in counted}
            replaceable = deque(
                endpoint for endpoint in counted if endpoint in named and endpoint not in in_use
            )
        others = {endpoint for endpoint in before.others if endpoint in in_use}
        # The remaining names go to endpoints that were closed before their first snapshot, the latest first.
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


def _renew() -> None:
    for totals in _all:
        totals.renew()


os.register_at_fork(after_in_child=_renew)
