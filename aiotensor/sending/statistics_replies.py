"""The account that a sender gives of what it holds, when somebody looks at its receiver."""

import asyncio
from collections.abc import Callable

from aiotensor.protocol.frames import MAX_HOLDERS, Account, Holding
from aiotensor.transports.base import SenderLink
from aiotensor.types import SenderStatistics

__all__ = ["Accountant", "account_of"]


def account_of(statistics: SenderStatistics) -> Account:
    """Tell what a sender holds and has done, with those who have held something for longest."""
    return Account(
        in_flight=statistics.in_flight,
        peak_in_flight=statistics.peak_in_flight,
        waiting=statistics.waiting,
        longest_wait_s=statistics.longest_wait_s,
        bytes_in_use=statistics.bytes_in_use,
        peak_bytes_in_use=statistics.peak_bytes_in_use,
        warm_bytes=statistics.warm_bytes,
        largest_free_bytes=statistics.largest_free_bytes,
        messages_sent=statistics.messages_sent,
        messages_discarded=statistics.messages_discarded,
        tensors_sent=statistics.tensors_sent,
        bytes_sent=statistics.bytes_sent,
        receivers_lost=statistics.receivers_lost,
        permit_waits=statistics.permit_waits,
        memory_waits=statistics.memory_waits,
        tensors_copied=statistics.tensors_copied,
        bytes_copied=statistics.bytes_copied,
        errors=statistics.errors,
        holders=tuple(
            Holding(holder.message, holder.state, holder.bytes, holder.seconds)
            for holder in statistics.holders[:MAX_HOLDERS]
        ),
    )


class Accountant:
    """Give an account when the receiver asks for one, as soon as the link has room.

    However often it asks until then, it gets one: a receiver that asks and does not read makes nothing grow.

    Args:
        link: says when there is room.
        tell: called with the account.
        statistics: says what there is to tell; None if the sender is gone.
    """

    def __init__(
        self,
        link: SenderLink,
        tell: Callable[[Account], None],
        statistics: Callable[[], SenderStatistics | None],
    ) -> None:
        self._link = link
        self._tell = tell
        self._statistics = statistics
        self._telling: asyncio.Task[None] | None = None
        self._is_stopped = False

    def ask(self) -> None:
        """Note that the receiver wants an account."""
        if self._is_stopped:
            return
        if self._telling is None or self._telling.done() or self._telling.cancelling():
            telling = self._tell_when_there_is_room()
            self._telling = asyncio.get_running_loop().create_task(telling, name="aiotensor-account")

    def forget(self) -> None:
        """Note that whoever asked is gone."""
        if self._telling is not None:
            self._telling.cancel()

    def stop(self) -> None:
        """Give no account any more."""
        self._is_stopped = True
        self.forget()

    async def settle(self) -> None:
        """Wait until nothing goes on here, after `stop`."""
        if self._telling is not None:
            await asyncio.wait([self._telling])

    async def _tell_when_there_is_room(self) -> None:
        await asyncio.sleep(0)  # what was asked in one turn has one answer
        while not self._link.is_ready:
            await self._link.ready()
        statistics = self._statistics()
        if statistics is not None:
            self._tell(account_of(statistics))
