"""The statistics of this process, added up for a limited number of endpoints."""

import os
import threading
import weakref
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
    """

    present: list[tuple[str, Statistics]]
    counts: dict[Group, Counts]
    last: Snapshot
    named: set[str]


class EndpointTotals:
    """Add up snapshots under the names of the first endpoints, which keep them, and the rest as `OTHER`.

    The counts of closed objects are eventually forgotten, and a sum of counts would then decrease. So the
    increments from snapshot to snapshot are added up instead.

    Attributes:
        timeouts: the number of times that an event loop did not answer in time.
    """

    def __init__(self) -> None:
        self.renew()
        _all.add(self)

    def renew(self) -> None:
        """Forget all snapshots: a forked child has none of the objects of its parent."""
        # Reentrant: a signal handler that scrapes may interrupt a scrape in its thread.
        self._lock = threading.RLock()
        self._totals = Totals([], {}, Snapshot([], {}, {}, 0, 0), set())
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
        last, named = self._totals.last, set(self._totals.named)
        in_use = (endpoint for endpoint, _ in snapshot.present)
        closed = (endpoint for _, endpoint in reversed(snapshot.counts))  # the latest first
        for endpoint in (*in_use, *closed):
            if len(named) < max_endpoints:
                named.add(endpoint)
        counts = {group: dict(total) for group, total in self._totals.counts.items()}
        for group, counted in snapshot.counts.items():
            before = last.counts.get(group, {})
            if before and snapshot.begun[group] > last.begun[group]:
                before = {}  # the registry has forgotten these counts
            exported = (group[0], group[1] if group[1] in named else OTHER)
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
        return Totals(present, counts, snapshot, named)


_all: weakref.WeakSet[EndpointTotals] = weakref.WeakSet()


def _renew() -> None:
    for totals in _all:
        totals.renew()


os.register_at_fork(after_in_child=_renew)
