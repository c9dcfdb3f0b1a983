"""Choose among the servers of a client.

A message is sent to the server with the most free credit, in rotation among equals. Only a server that can
take the message immediately is chosen; otherwise the message waits for the first server that can. So no
message waits for a busy server while another one is free, and no message is sent to two servers.

A permit that is acquired before its tensors exist is reserved without a choice: as many permits remain free,
at any of the servers, as there are reservations. A server is chosen when the first tensor is placed.
"""

import asyncio
import enum
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from aiotensor.channel.remote_server import RemoteServer
from aiotensor.errors import AioTensorError, ClosedError, UnavailableError, WouldBlockError
from aiotensor.runtime import tracing
from aiotensor.runtime.waiting import at_most, within
from aiotensor.sender import SenderCapacity
from aiotensor.types import Usage

__all__ = ["Balancer", "Need"]

# The minimum time between two attempts to connect to a server or a receiver that has refused this client.
_AT_MOST_EVERY_S = 1.0


class Need(enum.Enum):
    """The capacity that a call needs; each of these has a place in the order in which calls are served."""

    RESERVED = "a server with a free permit, for a permit that was reserved"
    TENSORS = "a server with a free permit, besides the reserved ones"
    PERMIT = "a free permit at any server, to be reserved"
    MESSAGE = "a server, for a message without tensors that need a permit"


# The calls of one queue are served in order. Calls for permits share a queue, so that none starves.
_QUEUE = {Need.RESERVED: 0, Need.TENSORS: 1, Need.PERMIT: 1, Need.MESSAGE: 2}


class _Grant(NamedTuple):
    """The result of a wait: a server, or None for a reserved permit."""

    server: RemoteServer | None


class _Wait(NamedTuple):
    """A call that waits."""

    future: "asyncio.Future[_Grant]"
    need: Need


class Balancer:
    """Choose among the servers of one client; belongs to the running loop.

    Args:
        senders: the servers, each with the capacity of the sender for its tensors, if there is one.
        max_wait_s: the time in seconds after which a wait for a server fails; None for no limit.
    """

    def __init__(
        self, senders: Mapping[RemoteServer, SenderCapacity | None], max_wait_s: float | None
    ) -> None:
        self._servers = list(senders)
        self._senders = senders
        self._max_wait_s = max_wait_s
        waits = (sender.max_wait_s for sender in senders.values() if sender is not None)
        limits = [limit for limit in (max_wait_s, *waits) if limit is not None]
        self._max_wait_of_permits_s = min(limits, default=None)
        self._retry_senders_at = 0.0
        self._queues: tuple[deque[_Wait], ...] = deque(), deque(), deque()
        self._reserved = 0  # the number of reserved permits
        self._granted = Counter[RemoteServer]()  # the number of calls that have not continued yet
        # Among servers with the same free credit, the least recently used one is chosen. The initial order is
        # random, so that it differs between clients.
        self._rotation = random.sample(self._servers, len(self._servers))
        # The server that is tried again, because no server has accepted this client.
        self._retried: RemoteServer | None = None
        self._soon: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None
        self._is_closed = False
        for sender in senders.values():
            if sender is not None:
                sender.listen(self)

    @property
    def waiting(self) -> int:
        """The number of calls that wait for a server."""
        return sum(map(len, self._queues))

    async def choose(self, need: Need) -> RemoteServer:
        """Wait until a server can take a message, and return the one with the most free credit.

        The caller must begin to send the message, and count it, before its next await. Cancellation grants
        the chosen server to the next call.

        Args:
            need: the required capacity. `RESERVED` requires that the caller has reserved a permit; it calls
                `cancel_reservation` once it has acquired a permit of the server's sender.

        Raises:
            RefusedError: no server can be reached, and the server that was tried last has refused this client
                because of a limit or its version.
            PeerLostError: no server can be reached, and the connection that was tried last has failed.
            AccessDeniedError: no server can be reached, and the server that was tried last belongs to another
                user, or does not accept the key.
            WouldBlockError: no server could take the message within `max_wait_s`. It is an `UnavailableError`
                if no server is connected; that is raised at once after the grace period.
            ClosedError: this client was closed.
        """
        self._try_again()
        self._check_outages()
        while True:
            grant = None if self._queues[_QUEUE[need]] else self._try(need)
            if grant is None:
                grant = await self._wait(need)
            if grant.server is not None and grant.server.session is not None:
                return grant.server
            # It was lost after it was granted.

    async def reserve(self) -> RemoteServer | None:
        """Wait until a permit is free at any server, reserve it, and return None.

        If no sender can send any more, the call returns a connected server instead: its sender raises the
        error that explains why. Errors are those of `choose`. Cancellation releases the permit.
        """
        self._try_again()
        self._check_outages()
        grant = None if self._queues[_QUEUE[Need.PERMIT]] else self._try(Need.PERMIT)
        if grant is None:
            grant = await self._wait(Need.PERMIT)
        elif grant.server is None:
            self._reserved += 1
        return grant.server

    def cancel_reservation(self) -> None:
        """Release a reserved permit."""
        self._reserved -= 1
        self.changed()

    def changed(self) -> None:
        """Choose again soon, because a server was connected or lost, or can take a message again."""
        if self._soon is None and self.waiting:
            self._soon = asyncio.get_running_loop().call_soon(self._serve)

    capacity_changed = changed  # the capacity of a sender

    def close(self) -> None:
        """Fail the waiting calls; called after all servers were closed."""
        self._is_closed = True
        self._serve()

    async def _wait(self, need: Need) -> _Grant:
        """Wait until the required capacity is available, and return the grant."""
        if not self.waiting:
            self._retried = None
        queue = self._queues[_QUEUE[need]]
        wait = _Wait(asyncio.get_running_loop().create_future(), need)
        queue.append(wait)
        self.changed()
        try:
            limit_s = self._max_wait_s if need is Need.MESSAGE else self._max_wait_of_permits_s
            limit = at_most(limit_s, lambda: self._timed_out(limit_s))
            step: tracing.Step = "wait for a server" if need is Need.MESSAGE else "wait for a permit"
            grant = await tracing.step(step, within(limit, wait.future))
        except BaseException as error:
            with suppress(ValueError):  # it was granted in this iteration
                queue.remove(wait)
            late = self._late_grant(wait, has_timed_out=isinstance(error, WouldBlockError))
            if late is None:
                raise
            grant = late
        finally:
            del wait  # an error that its future holds refers to this frame
        if grant.server is not None:
            self._granted[grant.server] -= 1
        return grant

    def _late_grant(self, wait: _Wait, *, has_timed_out: bool) -> _Grant | None:
        """Return a grant that a call got in the iteration in which it timed out, or gets now.

        The grant of a cancelled call is returned to the others.
        """
        future = wait.future
        if future.done() and not future.cancelled() and future.exception() is None:
            if has_timed_out:
                return future.result()
            self._count(future.result(), -1)
            self.changed()
            return None
        grant = self._try(wait.need) if has_timed_out else None
        if grant is not None:
            self._count(grant, 1)
        return grant

    def _count(self, grant: _Grant, change: int) -> None:
        """Count a grant until its call uses it, with 1, or return an unused grant, with -1."""
        if grant.server is None:
            self._reserved += change
        else:
            self._granted[grant.server] += change

    def _serve(self) -> None:
        """Grant capacity to the waiting calls, in their order."""
        for handle in (self._soon, self._later):
            if handle is not None:
                handle.cancel()
        self._soon = self._later = None
        for queue in self._queues:
            while queue:
                if queue[0].future.done():  # cancelled in this iteration
                    queue.popleft()
                    continue
                grant = self._try(queue[0].need)
                if grant is None:
                    break
                self._count(grant, 1)
                queue.popleft().future.set_result(grant)
        if self.waiting:
            self._find_servers()

    def _find_servers(self) -> None:
        """Retry servers that have refused this client; if all have, retry one before failing the calls."""
        if any(server.session is not None for server in self._servers):
            self._retried = None
        if all(server.is_hopeless for server in self._servers):
            if self._retried is None and not self._is_closed:
                self._retried = min(self._servers, key=lambda one: one.refused_at)
                self._retried.try_again()
                return
            failed = self._servers[0] if self._retried is None else self._retried
            self._fail_all(lambda: failed.failure or ClosedError("this MessageClient was closed"))
        elif self._are_unavailable:
            self._fail_all(self._unavailable)
        elif any(server.is_hopeless for server in self._servers) or self._failed_senders:
            self._try_again()
            self._later = asyncio.get_running_loop().call_later(_AT_MOST_EVERY_S, self._serve)

    def _fail_all(self, make_error: Callable[[], AioTensorError]) -> None:
        for queue in self._queues:
            for wait in queue:
                if not wait.future.done():
                    wait.future.set_exception(make_error())
            queue.clear()

    @property
    def _are_unavailable(self) -> bool:
        """Whether all servers have been unavailable for longer than the grace period."""
        return all(server.outage.is_too_long for server in self._servers)

    def _check_outages(self) -> None:
        # A server that has refused this client is unavailable as well, but its error is more precise.
        if self._are_unavailable and not all(server.is_hopeless for server in self._servers):
            raise self._unavailable()

    def _try_again(self) -> None:
        for server in self._servers:
            server.try_again(_AT_MOST_EVERY_S)
        now = asyncio.get_running_loop().time()
        if now >= self._retry_senders_at and (failed := self._failed_senders):
            self._retry_senders_at = now + _AT_MOST_EVERY_S
            for sender in failed:
                sender.connect_now()

    @property
    def _failed_senders(self) -> list[SenderCapacity]:
        return [sender for sender in self._senders.values() if sender is not None and sender.has_failed]

    def _try(self, need: Need) -> _Grant | None:
        """Return what a call needs, if it is available now: a server, or a permit."""
        ready = [server for server in self._rotation if server.session is not None]
        if need is not Need.MESSAGE:
            working = [one for one in ready if (sender := self._senders[one]) and not sender.has_failed]
            if ready and not working:
                return _Grant(ready[0])  # its sender raises the error that explains why
            ready = working
            if need is not Need.RESERVED and sum(map(self._free_permits, ready)) <= self._reserved:
                return None
            if need is Need.PERMIT:
                return _Grant(None)
            ready = [server for server in ready if self._free_permits(server)]
        chosen = max(ready, key=self._free_credit, default=None)
        if chosen is None or self._free_credit(chosen) <= 0:
            return None
        self._rotation.remove(chosen)
        self._rotation.append(chosen)
        return _Grant(chosen)

    def _free_credit(self, server: RemoteServer) -> int:
        session = server.session
        return 0 if session is None else session.credit - server.being_sent - self._granted[server]

    def _free_permits(self, server: RemoteServer) -> int:
        sender = self._senders[server]
        return 0 if sender is None else max(0, sender.free_permits - self._granted[server])

    def _unavailable(self) -> UnavailableError:
        return UnavailableError(
            f"none of the {len(self._servers)} servers has been reached for the grace period",
            messages=Usage(requested=1),
        )

    def _timed_out(self, limit_s: float | None) -> WouldBlockError:
        is_connected = any(server.session is not None for server in self._servers)
        why = "has had capacity for this message" if is_connected else "could be reached"
        return (WouldBlockError if is_connected else UnavailableError)(
            f"none of the {len(self._servers)} servers {why} for {limit_s} s", messages=Usage(requested=1)
        )
