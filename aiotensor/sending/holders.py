"""The holders of a sender's permits and memory, for statistics, for the log and for errors."""

import asyncio
from collections.abc import Callable, Collection

from aiotensor.errors import UnavailableError, WouldBlockError
from aiotensor.runtime.logs import logger_of
from aiotensor.sending.gates import Gate
from aiotensor.sending.memory import Memory
from aiotensor.sending.message import Message
from aiotensor.sending.settings import Settings
from aiotensor.types import Holder, Usage

__all__ = ["Holders"]

logger = logger_of("sender")

_NAMED_HOLDERS = 8
_ALLOCATED = "allocated"


class Holders:
    """Report the holders of permits and memory.

    Args:
        messages: the messages in flight.
        permits: the waits for permits.
        memory: the shared memory of the sender.
        settings: the limits of the sender.
        receiver_pid: returns the process id of the receiver, or None if none has answered.
        label: the address or the name of the endpoint.

    Attributes:
        where: the address of the receiver, for errors, such as ``" at unix:///run/engine.sock"``; "" for a
            queue.
    """

    def __init__(
        self,
        messages: Collection[Message],
        permits: Gate[None],
        memory: Memory,
        settings: Settings,
        receiver_pid: Callable[[], int | None],
        label: str,
    ) -> None:
        self.where = f" at {label}" if "://" in label else ""
        self._messages = messages
        self._permits = permits
        self._memory = memory
        self._settings = settings
        self._receiver_pid = receiver_pid
        self._loop = asyncio.get_running_loop()

    def longest_wait_s(self) -> float:
        """Return the duration of the longest current wait in seconds."""
        now = self._loop.time()
        return max(
            self._permits.longest_wait_s(now),
            self._memory.gate.longest_wait_s(now),
            now - min(self._memory.waiting_since, default=now),
        )

    def list(self) -> list[Holder]:
        """Return the holders of permits and memory, with the longest time first."""
        now = self._loop.time()
        held: dict[Message | None, int] = dict.fromkeys(self._messages, 0)
        allocated_since = now
        for ticket, is_only_allocated in self._memory.holdings():
            holder = ticket.holder if isinstance(ticket.holder, Message) else None
            if is_only_allocated and holder is not None and holder.has_ended:
                holder = None  # it was allocated in the block of a message, but not sent in it
            held[holder] = held.get(holder, 0) + ticket.amount
            if holder is None:
                allocated_since = min(allocated_since, ticket.since)
        holders = [
            Holder(None, _ALLOCATED, nbytes, now - allocated_since)
            if message is None
            else Holder(message.number, message.state.value, nbytes, now - message.permit.since)
            for message, nbytes in held.items()
        ]
        return sorted(holders, key=lambda holder: -holder.seconds)

    def log_wait(self, what: str) -> None:
        """Log a long wait for a resource, with its holders."""
        holders = self.list()
        held_by = "; ".join(
            f"{_name(holder)} ({holder.state}, {holder.bytes} bytes, {holder.seconds:.1f} s)"
            for holder in holders[:_NAMED_HOLDERS]
        )
        if len(holders) > _NAMED_HOLDERS:
            held_by += f"; and {len(holders) - _NAMED_HOLDERS} more"
        pid = self._receiver_pid()
        logger.warning(
            "a send has waited %g s for %s; receiver: %s; held by: %s",
            self._settings.long_wait_s,
            what,
            "none has answered" if pid is None else f"pid {pid}",
            held_by or "no message",
            extra={
                "event": "long_wait",
                "waited_s": self._settings.long_wait_s,
                "waited_for": what,
                "peer_pid": pid,
                "holders": len(holders),
                "held_by": held_by,
            },
        )

    def overdue(self, reason: str, messages: int, nbytes: int) -> WouldBlockError:
        """Return the error of a wait that exceeded `max_wait_s`; the arguments are those of `would_block`."""
        return self.would_block(f"{reason} for {self._settings.max_wait_s:g} s", messages, nbytes)

    def would_block(
        self, reason: str, messages: int, nbytes: int, *, for_receiver: bool = True
    ) -> WouldBlockError:
        """Return the error of a call that would have to wait; an `UnavailableError` without a receiver.

        Args:
            reason: the reason, with which the text of the error begins. Without a receiver, the text also
                contains `where`.
            messages: the number of permits that the call requested.
            nbytes: the bytes of shared memory that the call requested; 0 if it waits for something else.
            for_receiver: whether a receiver could end the wait.
        """
        permits, memory = self._permits.budget, self._memory.gate.budget
        is_available = self._receiver_pid() is not None or not for_receiver
        kind = WouldBlockError if is_available else UnavailableError
        if not is_available and self.where not in reason:
            reason += f", and no receiver has answered{self.where}"
        requested = f"{nbytes} bytes requested, " if nbytes else ""
        return kind(
            f"{reason} ({permits.in_use} of {permits.limit} messages and {memory.in_use} of {memory.limit} "
            f"bytes in use, {requested}{self._memory.largest_free} bytes free in one piece)",
            messages=Usage(permits.limit, permits.in_use, messages),
            bytes=Usage(memory.limit, memory.in_use, nbytes),
        )


def _name(holder: Holder) -> str:
    if holder.state == _ALLOCATED:
        return "memory from allocate()"
    return "a message" if holder.message is None else f"message {holder.message}"
