"""How the two ends of a pipe find each other: through the store of the group, which carries nothing else.

    rank with the lower number                          the other rank
      | entry: its machine, its key         both ways     |
      | <-----------------------------------------------> |
      | entry: the address where it listens               |
      | ------------------------------------------------> |
      | Join                      over the new connection |
      | <-----------------------------------------------> |

An end whose opening fails or is cancelled marks its entry as withdrawn, and the other end tries again with
its next number. If the two ends are incompatible, both detect that, and neither tries again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from msgspec.structs import replace

from aiotensor.errors import ClosedError, PeerLostError, RefusedError
from aiotensor.protocol.connection import mismatch
from aiotensor.protocol.frames import VERSION
from aiotensor.ranks.door import Door
from aiotensor.ranks.entries import Entries, Entry, Name
from aiotensor.ranks.groups import Membership
from aiotensor.ranks.routes import NetworkOptions, connecting, listening
from aiotensor.ranks.session import Session
from aiotensor.ranks.settings import LONG_WAIT_S
from aiotensor.runtime.logs import logger_of

__all__ = ["Meeting"]

logger = logger_of("ranks")

# A store sends no notifications, so it is polled with the delays of `UnixConnector`.
_FIRST_POLL_S = 0.005
_LAST_POLL_S = 0.25


class Meeting:
    """Connect to the other rank; belongs to the running loop.

    Args:
        membership: the membership of this process in the group.
        peer: the other rank.
        entries: the entries of both ranks.
        network: the options of this end for connections between machines.
        new_door: makes the object that admits the connection.
        label: the name of the pipe in the log.
        is_closed: returns whether the pipe was closed in the meantime.
    """

    def __init__(
        self,
        membership: Membership,
        peer: int,
        entries: Entries,
        network: NetworkOptions,
        new_door: Callable[[], Door],
        label: str,
        is_closed: Callable[[], bool],
    ) -> None:
        self._rank = membership.rank
        self._peer = peer
        self._entries = entries
        self._network = network
        self._new_door = new_door
        self._label = label
        self._is_closed = is_closed
        self._loop = asyncio.get_running_loop()
        self._began_at = self._loop.time()
        self._is_logged = False
        self._delay = _FIRST_POLL_S

    async def open(self) -> Session:
        """Wait for the other rank, and return the connection.

        Cancellation leaves no connection. Notifying the other rank through the store then takes at most a
        second.

        Raises:
            PeerLostError: the store cannot be reached, or the other rank has died while it connected.
            RefusedError: the two ranks have different arguments, or different versions of the library.
            ProtocolError: the other rank wrote an invalid entry to the store.
            ClosedError: the pipe was closed in the meantime.
            UsageError: no address is known at which the other rank reaches this one.
            OSError: this process cannot listen, or has no descriptors or threads left.
        """
        while True:
            name, entry = await self._entries.begin(self._network.public_key)
            try:
                session = await self._meet(name, entry)
                if session is not None:
                    return session
            except RefusedError:
                raise  # the other rank finds the reason in this entry, too
            except BaseException:
                await self._entries.withdraw(name)
                raise

    async def _meet(self, name: Name, own: Entry) -> Session | None:
        """Connect through the entries of one pipe; return None if the other rank has withdrawn its entry."""
        listens = self._rank < self._peer
        other = Name(self._peer, name.number)
        entry = await self._entry_of(other, with_address=not listens)
        if entry is None:
            return None
        door = self._new_door()
        try:
            if not listens:
                async with connecting(entry, self._network, door):
                    return await self._admitted(door, other)
            async with listening(own, entry, self._network, door) as address:
                await self._entries.write(name, replace(own, address=address.text, token=address.token))
                session = await self._admitted(door, other)
            if session is not None:
                with suppress(PeerLostError):  # the ranks are connected, and no longer need the store
                    await self._entries.remove(name.number)
            return session
        except BaseException:
            door.abort()
            raise
        finally:
            door.close()

    async def _entry_of(self, name: Name, *, with_address: bool) -> Entry | None:
        """Wait for an entry of the other rank; return None if it was withdrawn."""
        while True:
            entry = await self._entries.read(name)
            if entry is not None:
                if entry.is_withdrawn:
                    return None
                self._check(entry)
                if entry.address or not with_address:
                    self._delay = _FIRST_POLL_S
                    return entry
            await self._pause(asyncio.sleep)

    async def _admitted(self, door: Door, other: Name) -> Session | None:
        """Wait until the other rank has joined; return None if it has withdrawn its entry."""
        while True:
            await self._pause(lambda seconds: asyncio.wait([door.session], timeout=seconds))
            if door.session.done() and door.session.exception() is None:
                return door.session.result()
            entry = await self._entries.read(other)
            if entry is not None and entry.is_withdrawn:
                return None
            if door.session.done():
                return door.session.result()

    async def _pause(self, wait: Callable[[float], Awaitable[object]]) -> None:
        """Wait before the next poll of the store, longer each time."""
        if self._loop.time() - self._began_at >= LONG_WAIT_S and not self._is_logged:
            self._is_logged = True
            logger.warning(
                "%s: rank %s has not opened its end for %g s",
                self._label,
                self._peer,
                LONG_WAIT_S,
                extra={"event": "peer_missing", "pipe": self._label, "rank": self._peer},
            )
        await wait(self._delay)
        self._delay = min(2 * self._delay, _LAST_POLL_S)
        if self._is_closed():
            raise ClosedError("this RankPipe was closed while it was being opened")

    def _check(self, entry: Entry) -> None:
        """Check that both ranks have the same version, and agree on encryption."""
        reason = mismatch(entry.version, VERSION, f"rank {self._peer}", "this rank")
        if reason is None and bool(entry.public_key) != bool(self._network.public_key):
            reason = "only one of the two ranks has encrypt=True: pass the same value at both ranks"
        if reason is not None:
            raise RefusedError(f"connecting to rank {self._peer} failed: {reason}")
