"""The statistics of a publisher, the log of its long waits, and its errors, with the slowest subscribers."""

import asyncio

from aiotensor.broadcast.settings import PublisherSettings
from aiotensor.broadcast.subscribers import Subscribers
from aiotensor.errors import WouldBlockError
from aiotensor.runtime.logs import logger_of
from aiotensor.sending.gates import Gate
from aiotensor.sending.memory import Memory
from aiotensor.statistics.counters import ErrorCounter, snapshot
from aiotensor.types import PublisherStatistics, Usage

__all__ = ["Reports"]

logger = logger_of("publisher")

_NAMED_SUBSCRIBERS = 8


class Reports:
    """Report the usage of a publisher; belongs to the running loop.

    Args:
        settings: the limits of the publisher.
        counts: its counters.
        errors: counts the errors of its calls.
        turns: the gate of the calls that publish.
        memory: its shared memory.
        subscribers: its subscribers.
    """

    def __init__(
        self,
        settings: PublisherSettings,
        counts: dict[str, int],
        errors: ErrorCounter,
        turns: Gate[None],
        memory: Memory,
        subscribers: Subscribers,
    ) -> None:
        self._settings = settings
        self._counts = counts
        self._errors = errors
        self._turns = turns
        self._memory = memory
        self._subscribers = subscribers
        self._loop = asyncio.get_running_loop()

    def statistics(self) -> PublisherStatistics:
        """Return the current usage of the publisher, and its totals since opening."""
        settings, subscribers, memory = self._settings, self._subscribers, self._memory
        lags, budget = subscribers.lags(), memory.gate.budget
        now = self._loop.time()
        since = memory.waiting_since
        return snapshot(
            PublisherStatistics,
            self._counts,
            subscribers=len(lags),
            max_subscribers=settings.max_subscribers,
            lags=tuple(lags),
            max_behind=settings.max_behind,
            behind=lags[0].behind if lags else 0,
            waiting=self._turns.budget.waiting + budget.waiting + len(since),
            longest_wait_s=max(
                self._turns.longest_wait_s(now),
                memory.gate.longest_wait_s(now),
                now - min(since, default=now),
            ),
            history=subscribers.kept,
            arena_bytes=settings.max_bytes,
            bytes_in_use=budget.in_use,
            peak_bytes_in_use=budget.peak,
            warm_bytes=memory.warm_bytes,
            largest_free_bytes=memory.largest_free,
            dropped=self._counts["dropped"] + sum(lag.dropped for lag in lags),
            deliveries=self._counts["deliveries"] + sum(lag.delivered for lag in lags),
            subscriber_waits=self._turns.waited.waits(),
            memory_waits=memory.gate.waited.waits(),
            errors=self._errors.counts(),
        )

    def log_wait(self, what: str) -> None:
        """Log a long wait, with the subscribers that cause it."""
        held_by = self._slowest()
        logger.warning(
            "publishing has waited %g s for %s; %s",
            self._settings.long_wait_s,
            what,
            held_by,
            extra={
                "event": "long_wait",
                "waited_s": self._settings.long_wait_s,
                "waited_for": what,
                "subscribers": len(self._subscribers.connected),
                "held_by": held_by,
            },
        )

    def _slowest(self) -> str:
        """Describe the slowest subscribers."""
        lags = [lag for lag in self._subscribers.lags() if lag.behind or lag.held_bytes]
        if not lags:
            return "no subscriber is behind or uses memory"
        described = [
            f"subscriber {lag.subscriber} (pid {lag.pid}) is {lag.behind} of {self._settings.max_behind} "
            f"publications behind, for {lag.behind_s:.1f} s, and uses {lag.held_bytes} bytes"
            for lag in lags[:_NAMED_SUBSCRIBERS]
        ]
        if len(lags) > _NAMED_SUBSCRIBERS:
            described.append(f"and {len(lags) - _NAMED_SUBSCRIBERS} more")
        return "; ".join(described)

    def overdue(self, reason: str, nbytes: int) -> WouldBlockError:
        """Return the error for a wait that exceeded `max_wait_s`; arguments are those of `would_block`."""
        return self.would_block(f"{reason} for {self._settings.max_wait_s:g} s", nbytes)

    def would_block(self, reason: str, nbytes: int) -> WouldBlockError:
        """Return the error for a call that would have to wait, with the bytes that it requested."""
        lags, memory = self._subscribers.lags(), self._memory.gate.budget
        behind = lags[0].behind if lags else 0
        requested = f"{nbytes} bytes requested, " if nbytes else ""
        return WouldBlockError(
            f"{reason} ({self._slowest()}; {memory.in_use} of {memory.limit} bytes in use, {requested}"
            f"{self._memory.largest_free} bytes free in one piece)",
            messages=Usage(self._settings.max_behind, behind, 1),
            bytes=Usage(memory.limit, memory.in_use, nbytes),
        )

    def too_few(self, count: int) -> WouldBlockError:
        """Return the error for a wait in which fewer than `count` subscribers have connected."""
        connected = len(self._subscribers.connected)
        return WouldBlockError(
            f"{connected} of {count} subscribers have connected within {self._settings.max_wait_s:g} s",
            messages=Usage(count, connected, count - connected),
        )
