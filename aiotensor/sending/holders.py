"""Who holds a sender's permits and memory: for statistics, for the log, and for errors."""

import asyncio
from collections.abc import Callable, Collection
from typing import NamedTuple

from aiotensor.errors import WouldBlockError
from aiotensor.runtime.logs import logger_of
from aiotensor.sending.gates import Gate
from aiotensor.sending.memory import Memory
from aiotensor.sending.message import Message
from aiotensor.types import Holder, Usage, Waits

__all__ = ["Holders", "MemoryUsage", "WaitLimits"]

logger = logger_of("sender")

_NAMED_HOLDERS = 8
_ALLOCATED = "allocated"


class WaitLimits(NamedTuple):
    """After how many seconds a wait is logged, and after how many it ends; None for never."""

    long_wait_s: float | None
    max_wait_s: float | None


class MemoryUsage(NamedTuple):
    """What a sender has in use of shared memory, and who."""

    in_use: int
    peak: int
    warm: int
    largest_free: int
    waiting: int
    longest_wait_s: float
    holders: list[Holder]
    waits: Waits
    tensors_copied: int
    bytes_copied: int


class Holders:
    """Tell who holds what; it changes nothing.

    Args:
        messages: those in flight.
        permits: what they hold one each of.
        memory: what some of them hold bytes of.
        patience: how long somebody may wait.
        receiver_pid: says who would have to take them.
    """

    def __init__(
        self,
        messages: Collection[Message],
        permits: Gate[None],
        memory: Memory,
        patience: WaitLimits,
        receiver_pid: Callable[[], int | None],
    ) -> None:
        self._messages = messages
        self._permits = permits
        self._memory = memory
        self._patience = patience
        self._receiver_pid = receiver_pid
        self._loop = asyncio.get_running_loop()

    def usage(self) -> MemoryUsage:
        """Count what is in use."""
        budget, now = self._memory.gate.budget, self._loop.time()
        copies = self._memory.waiting_since
        longest = max(
            self._permits.longest_wait_s(now),
            self._memory.gate.longest_wait_s(now),
            now - min(copies, default=now),
        )
        return MemoryUsage(
            budget.in_use,
            budget.peak,
            self._memory.warm_bytes,
            self._memory.largest_free,
            budget.waiting + len(copies),
            longest,
            self.holders(),
            self._memory.gate.waited.waits(),
            self._memory.tensors_copied,
            self._memory.bytes_copied,
        )

    def holders(self) -> list[Holder]:
        """List who holds permits and memory, the longest first."""
        now = self._loop.time()
        held: dict[Message | None, int] = dict.fromkeys(self._messages, 0)
        allocated_since = now
        for ticket, is_only_allocated in self._memory.holdings():
            holder = ticket.holder if isinstance(ticket.holder, Message) else None
            if is_only_allocated and holder is not None and holder.has_ended:
                holder = None  # it was allocated in the block of a message, and not sent in it
            held[holder] = held.get(holder, 0) + ticket.amount
            if holder is None:
                allocated_since = min(allocated_since, ticket.since)
        holders = [
            Holder(None, _ALLOCATED, nbytes, now - allocated_since)
            if message is None
            else Holder(message.number, message.state.value, nbytes, now - message.since)
            for message, nbytes in held.items()
        ]
        return sorted(holders, key=lambda holder: -holder.seconds)

    def log_wait(self, what: str) -> None:
        """Log that somebody has waited for long, and for whom."""
        holders = self.holders()
        held_by = "; ".join(
            f"{_name(holder)} ({holder.state}, {holder.bytes} bytes, {holder.seconds:.1f} s)"
            for holder in holders[:_NAMED_HOLDERS]
        )
        if len(holders) > _NAMED_HOLDERS:
            held_by += f"; and {len(holders) - _NAMED_HOLDERS} more"
        pid = self._receiver_pid()
        logger.warning(
            "a send has waited %g s for %s; receiver: %s; held by: %s",
            self._patience.long_wait_s,
            what,
            "none has answered" if pid is None else f"pid {pid}",
            held_by or "nobody",
            extra={
                "event": "long_wait",
                "waited_s": self._patience.long_wait_s,
                "waited_for": what,
                "peer_pid": pid,
                "holders": len(holders),
                "held_by": held_by,
            },
        )

    def overdue(self, reason: str, messages: int, nbytes: int) -> WouldBlockError:
        """Make the error of a wait that lasted for too long; arguments are those of `would_block`."""
        return self.would_block(f"{reason} for {self._patience.max_wait_s:g} s", messages, nbytes)

    def would_block(self, reason: str, messages: int, nbytes: int) -> WouldBlockError:
        """Make the error of a call that would have to wait.

        Args:
            reason: for what.
            messages: how many permits it asked for.
            nbytes: how much shared memory it asked for.
        """
        permits, memory = self._permits.budget, self._memory.gate.budget
        return WouldBlockError(
            f"{reason} ({permits.in_use} of {permits.limit} messages and {memory.in_use} of {memory.limit} "
            f"bytes in use, {nbytes} bytes requested, {self._memory.largest_free} bytes free in one piece)",
            messages=Usage(permits.limit, permits.in_use, messages),
            bytes=Usage(memory.limit, memory.in_use, nbytes),
        )


def _name(holder: Holder) -> str:
    if holder.state == _ALLOCATED:
        return "memory from allocate()"
    return "a message" if holder.message is None else f"message {holder.message}"
