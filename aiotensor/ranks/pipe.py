"""A pipe between two ranks; the implementation is in `aiotensor.ranks.session`."""

import ipaddress
import operator
import os
from functools import partial
from typing import Self

import torch

from aiotensor.errors import ClosedError, WouldBlockError
from aiotensor.protocol.frames import VERSION
from aiotensor.protocol.ranks import LEAST_MESSAGE_BYTES, Join
from aiotensor.ranks.door import Door
from aiotensor.ranks.entries import Entries
from aiotensor.ranks.groups import Group, membership_of
from aiotensor.ranks.meeting import Meeting
from aiotensor.ranks.routes import network_options
from aiotensor.ranks.session import Session
from aiotensor.ranks.settings import PipeSettings
from aiotensor.runtime.affinity import LoopAffinity, LoopObject
from aiotensor.runtime.arguments import count, seconds_or_never
from aiotensor.runtime.waiting import at_most
from aiotensor.statistics.counters import ErrorCounter, WaitCounter, new_counts, snapshot
from aiotensor.types import PipeStatistics, Usage

__all__ = ["RankPipe"]


class RankPipe(LoopObject):
    """A pipe to another rank of a torch.distributed group, for tensors in order and in both directions.

    Both ranks open a pipe, each with the rank of the other as `peer`. Open it with ``async with``, once, and
    share it between the tasks of that event loop. Opening waits for the other rank. Two ranks may have
    several pipes, which are matched in the order in which they are opened: the first pipe of one rank is
    connected to the first pipe of the other.

    The group is only used to find the other rank: its store carries the address. The pipe's own connection
    carries the tensors, on one machine through shared memory, and otherwise over TCP. A pipe that has lost
    the other rank does not reconnect; open another one.

    A received tensor is a view of shared memory. It stays valid as long as it or a view of it exists, and
    counts towards `max_bytes` of the other rank until then. A tensor of at most 8 KiB (1 MiB from another
    machine) has its own memory instead, and counts until it is received.

    Args:
        group: a process group, a `DeviceMesh` of one dimension, or a store of torch.distributed.
        peer: the other rank, as a rank of this group.
        rank: the rank of this process; only for a store, which requires it.
        world_size: the number of ranks; only for a store, which requires it.
        max_bytes: the limit on the bytes of messages in flight in each direction, the same at both ranks.
            Each message counts as at least 4096 bytes. The bytes are free again when the other rank has
            received the message and freed its tensor.
        max_wait_s: the limit in seconds on each wait of `send`, `receive` and opening, which waits for the
            other rank to open its end; None for no limit.
        host: the numeric address of the network interface at which another machine reaches this rank; None
            for the one by which this rank reaches the store.
        encrypt: whether to encrypt the connection between machines with fresh CURVE keys; the same at both
            ranks. This connection is always authenticated by a secret in the store. On one machine, neither
            is needed.
        peer_timeout_s: the time in seconds without an answer after which a rank on another machine is lost;
            None means 2 s.

    Raises:
        TypeError: `group` is not a group, `rank` and `world_size` do not match its kind, or an argument has
            the wrong type.
        ValueError: the group has no rank `peer`, or this is the rank of this process; or `host` or a
            limit is invalid.
    """

    def __init__(
        self,
        group: Group,
        peer: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        max_bytes: int = 1 << 30,
        max_wait_s: float | None = None,
        host: str | None = None,
        encrypt: bool = False,
        peer_timeout_s: float | None = None,
    ) -> None:
        self.affinity = LoopAffinity(type(self).__name__)
        self._membership = membership_of(group, rank, world_size)
        self._peer = operator.index(peer)
        if not 0 <= self._peer < self._membership.size:
            raise ValueError(f"there is no rank {peer} in a group of {self._membership.size}")
        if self._peer == self._membership.rank:
            raise ValueError(f"rank {peer} is this rank: a pipe connects two different ranks")
        self._host = None if host is None else str(ipaddress.ip_address(host))
        self._network = network_options(seconds_or_never("peer_timeout_s", peer_timeout_s), encrypt=encrypt)
        self._settings = PipeSettings(
            count("max_bytes", max_bytes, LEAST_MESSAGE_BYTES), seconds_or_never("max_wait_s", max_wait_s)
        )
        self._label = f"pipe of rank {self._membership.rank} to rank {self._peer}"
        self._errors = ErrorCounter()
        self._counts = new_counts(PipeStatistics)
        self._session: Session | None = None  # created by `__aenter__`, since it belongs to a loop

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return self._membership.rank

    @property
    def peer(self) -> int:
        """The other rank."""
        return self._peer

    async def __aenter__(self) -> Self:
        """Wait for the other rank to open its end, at most `max_wait_s`.

        Cancellation leaves no connection, and the other rank waits for the next pipe.

        Raises:
            PeerLostError: the store cannot be reached, or the connection to the other rank was lost before
                both ends had joined. If the other rank dies before it is connected, the wait continues.
            ProtocolError: the entry of the other rank in the store is invalid.
            RefusedError: the other rank has different arguments, or another version of the library.
            WouldBlockError: the other rank has not opened its end within `max_wait_s`.
            UsageError: the other rank is on another machine, and `host` is required.
            ClosedError: this pipe was closed, perhaps while waiting.
            OSError: this process cannot listen, or has no descriptors or threads left.
        """
        self.affinity.enter()
        try:
            async with at_most(self._settings.max_wait_s, self._not_opened):
                session = await self._meeting().open()
        except BaseException as error:
            self.affinity.close()
            self._errors.add(error)
            raise
        if self.affinity.is_closed:
            session.abort()
            raise ClosedError(f"this {type(self).__name__} was closed while it was being opened")
        self._session = session
        self.affinity.settle(self, self._label)
        return self

    async def send(self, tensor: torch.Tensor | None) -> None:
        """Send a tensor or None.

        Returns when the tensor may be changed, which may be before the other rank receives the message.
        Waits until `max_bytes` allows the message, at most `max_wait_s`. Messages arrive in the order of the
        calls, including concurrent ones. Large tensors are copied in a worker thread. If the call is
        cancelled, the message is not sent, and its bytes are free again.

        Args:
            tensor: a tensor on the CPU, of any shape, strides and dtype.

        Raises:
            UnsupportedTensorError: the tensor cannot be sent unchanged.
            TooLargeError: the tensor has more than `max_bytes`.
            WouldBlockError: not enough bytes were free within `max_wait_s`.
            PeerLostError: the other rank died, closed its end or broke the connection.
            ClosedError: this pipe was closed, perhaps while waiting.
            OSError: the machine has no memory left.
        """
        try:
            await self._opened().outgoing.send(tensor)
        except Exception as error:
            self._errors.add(error)
            raise

    def send_nowait(self, tensor: torch.Tensor | None) -> None:
        """Send a tensor or None without waiting; a tensor is copied on the calling thread.

        Other errors are those of `send`.

        Raises:
            WouldBlockError: `max_bytes` does not allow the message now, or earlier calls are waiting.
        """
        with self._errors:
            self._opened().outgoing.send_nowait(tensor)

    async def receive(self, *, copy: bool = False) -> torch.Tensor | None:
        """Return the next message of the other rank, once it has arrived.

        Waits at most `max_wait_s`. If the call is cancelled, the next call returns the message.

        Args:
            copy: whether to return a copy with its own memory, so that the other rank can use the bytes again
                at once; a worker thread copies large tensors.

        Raises:
            PeerLostError: the other rank died, closed its end or broke the connection, and all messages that
                had arrived were received.
            WouldBlockError: no message has arrived within `max_wait_s`.
            ClosedError: this pipe was closed, perhaps while waiting.
            OSError: the machine has no memory or no thread left for the copy. The next call tries again.
        """
        try:
            return await self._opened().incoming.receive(copy=copy)
        except Exception as error:
            self._errors.add(error)
            raise

    async def drain(self) -> None:
        """Wait until the other rank has received all messages that were sent before this call.

        Cancellation has no side effects.

        Raises:
            PeerLostError: the other rank is gone, and some of these messages are lost.
            ClosedError: this pipe was closed.
        """
        with self._errors:
            await self._opened().outgoing.drain()

    def statistics(self) -> PipeStatistics:
        """Return the current usage and the totals since opening; also available after closing."""
        self.affinity.check_place()
        if self._session is not None:
            return self._session.statistics()
        zeros = dict.fromkeys(PipeStatistics.__struct_fields__, 0)
        return snapshot(
            PipeStatistics,
            zeros,
            max_bytes=self._settings.max_bytes,
            send_waits=WaitCounter().waits(),
            errors=self._errors.counts(),
        )

    async def aclose(self) -> None:
        """Close the pipe; the other rank can still receive all earlier messages.

        Waiting calls raise `ClosedError`. Received tensors stay valid; messages that have arrived here and
        were not received are dropped. Waits until the connection has accepted all messages. Cancellation
        skips that wait. Closing again has no effect.
        """
        self.affinity.check_place()
        was_open = self.affinity.close()
        if was_open and self._session is not None:
            with self.affinity.leaving():
                await self._session.close()

    def _details(self) -> list[str]:
        return [f"rank {self._membership.rank} to {self._peer}"]

    def _opened(self) -> Session:
        """Return the open session, after checking that this pipe may be used here."""
        self.affinity.check()
        if self._session is None:
            raise ClosedError(f"this {type(self).__name__} is still being opened")
        return self._session

    def _meeting(self) -> Meeting:
        return Meeting(
            self._membership,
            self._peer,
            Entries(self._membership, self._peer, self._host),
            self._network,
            self._new_door,
            self._label,
            lambda: self.affinity.is_closed,
        )

    def _new_door(self) -> Door:
        join = Join(VERSION, os.getpid(), self._settings.max_bytes)
        # Not a bound method: the listener and the connector may outlive this object if it is not closed.
        new_session = partial(
            Session, settings=self._settings, counts=self._counts, errors=self._errors, label=self._label
        )
        return Door(join, f"rank {self._peer}", new_session)

    def _not_opened(self) -> WouldBlockError:
        return WouldBlockError(
            f"rank {self._peer} has not opened its end within {self._settings.max_wait_s:g} s",
            messages=Usage(requested=1),
        )
