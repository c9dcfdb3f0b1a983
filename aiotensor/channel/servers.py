"""Choose among the servers of a client, and move messages from one to another.

A message goes to the server with the least load: the client's own messages there, and those of other clients
as the server last reported them. Until a message is sent it can move to another server: when its own is lost,
or when it waits for a permit, memory, credit or queue space while another server could take it or has less to
do.
"""

import asyncio
import random
from collections.abc import Mapping
from contextlib import suppress

from aiotensor.channel.connection import Connection
from aiotensor.errors import WouldBlockError
from aiotensor.gates import Waiters, at_most
from aiotensor.sender import TensorSender
from aiotensor.types import Usage

__all__ = ["Servers"]

# The least time between attempts to connect to a server that refused this client, while others serve it.
_AT_MOST_EVERY_S = 1.0

# The weight of a report decreases by this factor with each later report of another server, and is zero below
# a tenth of a message, so that a client that rarely sends does not avoid a once busy server forever. In a
# simulation, the shares of three servers differed by at most 12 % with 1, 4 and 8 clients.
_AGES_BY, _COUNTS_FROM = 0.7, 0.1

# Moved messages count at their new servers only after a few iterations of the event loop.
_BETWEEN_MOVES_S = 0.002


class Servers:
    """Choose among the servers of one client; belongs to the running loop.

    Args:
        senders: the connection to each server, with the sender for its tensors.
        max_wait_s: seconds after which a wait for any server fails; None for no limit.
    """

    def __init__(self, senders: Mapping[Connection, TensorSender | None], max_wait_s: float | None) -> None:
        self._connections = connections = list(senders)
        self._senders = senders
        for connection in connections:
            connection.pipeline.outbox.on_wait = self.rebalance_soon
        self._max_wait_s = max_wait_s
        self._changes = Waiters()
        self._reports = 0
        self._others: dict[Connection, tuple[int, int]] = {}  # messages of others, and the report's number
        # Among equal servers, the least recently chosen one is next. The order differs between clients.
        self._rotation = random.sample(connections, len(connections))
        self._rest: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None
        self._moved_to: list[Connection] = []  # for the moved messages, until they choose a server
        self._is_closed = False

    async def choose(self) -> Connection:
        """Wait until a server is connected, and return the one with the least load.

        Raises:
            RefusedError: all servers have failed permanently, and a new attempt at one failed in this way.
            PeerLostError: the same.
            AccessDeniedError: the same.
            WouldBlockError: no server was connected within `max_wait_s`.
            ClosedError: this client was closed.
        """
        try:
            async with at_most(self._max_wait_s, self._overdue):
                chosen = await self._any()
        except WouldBlockError:
            found = self._least_loaded()  # a server may have connected in this iteration
            if found is None:
                raise
            chosen = found
        self._rotation.remove(chosen)
        self._rotation.append(chosen)
        return chosen

    def changed(self) -> None:
        """Handle a server that was connected or lost."""
        self._changes.wake()
        self.rebalance_soon()

    def reported(self, connection: Connection, others: int) -> None:
        """Record the load of a server: the messages of other clients there."""
        self._reports += 1
        self._others[connection] = others, self._reports
        self.rebalance_soon()

    def rebalance_soon(self) -> None:
        """Move messages in the next iteration of the event loop, when the current ones are sent or wait."""
        if self._soon is None and not self._is_closed:
            self._soon = asyncio.get_running_loop().call_soon(self.rebalance)

    def rebalance(self) -> None:
        """Move waiting messages to a server that has less to do, the latest first."""
        self._soon = None
        if self._rest is not None or self._is_closed:
            return
        waiting = [connection for connection in self._connections if self._movable(connection)]
        free = [connection for connection in self._connections if connection.pipeline.outbox.takes_more]
        free = [connection for connection in free if connection not in waiting] if waiting else []
        if not free:
            return
        busiest, freest = max(waiting, key=self._load_of), min(free, key=self._load_of)
        moves = int(self._load_of(busiest) - self._load_of(freest)) // 2
        sender = self._senders[freest]
        if sender is None or sender._has_permit:  # then a message does not wait there at all
            moves = max(moves, 1)
        moves = min(moves, self._movable(busiest))
        if moves > 0:
            for _ in range(moves):
                busiest.pipeline.outbox.give_up_one()
            self._moved_to = [freest] * moves
            self._rest = asyncio.get_running_loop().call_later(_BETWEEN_MOVES_S, self._rested)

    def _movable(self, connection: Connection) -> int:
        """Count the messages that wait for a server and may be moved."""
        outbox, sender = connection.pipeline.outbox, self._senders[connection]
        tensors = outbox.sending_tensors
        if tensors and sender is not None:
            tensors = sender._waiting_of(tensors)
        return outbox.movable + tensors

    def close(self) -> None:
        """Wake the tasks that wait for a server, and move nothing more."""
        self._is_closed = True
        for handle in (self._rest, self._soon):
            if handle is not None:
                handle.cancel()
        self._changes.wake()

    def _rested(self) -> None:
        self._rest = None
        self._moved_to.clear()
        self.rebalance()

    def _load_of(self, connection: Connection) -> float:
        others, report = self._others.get(connection, (0, 0))
        aged = others * _AGES_BY ** (self._reports - report)
        return connection.in_flight + (aged if aged >= _COUNTS_FROM else 0.0)

    def _least_loaded(self) -> Connection | None:
        if self._moved_to and self._moved_to[-1].is_ready:
            return self._moved_to.pop()
        ready = [connection for connection in self._rotation if connection.is_ready]
        at_once = [connection for connection in ready if connection.pipeline.outbox.takes_more]
        return min(at_once or ready, key=self._load_of, default=None)

    async def _any(self) -> Connection:
        asked: Connection | None = None  # the server that is retried when all have failed
        while True:
            for connection in self._connections:
                connection.try_again(_AT_MOST_EVERY_S)
            chosen = self._least_loaded()
            if chosen is not None:
                return chosen
            hopeless = [connection for connection in self._connections if connection.is_hopeless]
            if len(hopeless) == len(self._connections):
                if asked is not None or self._is_closed:
                    (asked or hopeless[0]).raise_failure()
                asked = min(hopeless, key=lambda one: one.refused_at)
                asked.try_again()
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(_AT_MOST_EVERY_S if hopeless else None):
                    await self._changes.wait()

    def _overdue(self) -> WouldBlockError:
        return WouldBlockError(
            f"none of the {len(self._connections)} servers has been there for {self._max_wait_s:g} s",
            messages=Usage(requested=1),
        )
