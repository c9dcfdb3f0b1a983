"""Choose among the servers of a client.

A message is sent to the server with the least load: the number of this client's messages there, plus the
number of other clients' messages in the latest report of the server. Only a server that can take the message
immediately is chosen; otherwise the message waits for the first server that can. So no message waits for a
busy server while another one is free, and no message is sent to two servers.
"""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress

from aiotensor.channel.remote_server import RemoteServer
from aiotensor.errors import ClosedError, WouldBlockError
from aiotensor.runtime.waiting import at_most
from aiotensor.sending.capacity import SenderCapacity
from aiotensor.types import Usage

__all__ = ["Balancer"]

# The minimum time between two attempts to connect to a server or a receiver that has refused this client.
_AT_MOST_EVERY_S = 1.0

# Each later report of another server multiplies the weight of a report by `_AGES_BY`. A report that counts as
# less than a tenth of a message is ignored: otherwise a server that was busy once might never be chosen
# again. In a simulation, the shares of three servers differed by at most 12 % with 1, 4 and 8 clients.
_AGES_BY, _COUNTS_FROM = 0.7, 0.1


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
        waits = (sender.max_wait_s for sender in senders.values() if sender is not None)
        limits = [limit for limit in (max_wait_s, *waits) if limit is not None]
        self._max_wait_s = {True: min(limits, default=None), False: max_wait_s}  # by `needs_sender`
        self._retry_senders_at = 0.0
        # Waiting calls, by whether their tensors need a permit of the server's sender.
        self._waiting: dict[bool, deque[asyncio.Future[RemoteServer]]] = {True: deque(), False: deque()}
        self._granted = Counter[RemoteServer]()  # the number of calls that have not continued yet
        self._reports = 0
        # The number of messages of other clients at each server, and the number of the last report.
        self._others: dict[RemoteServer, tuple[int, int]] = {}
        # Among servers with the same load, the least recently used one is chosen. The initial order is
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
        return sum(map(len, self._waiting.values()))

    async def choose(self, *, needs_sender: bool) -> RemoteServer:
        """Wait until a server can take a message, and return the one with the least load.

        The caller must begin to send the message, and count it, before its next await. Cancellation grants
        the chosen server to the next call.

        Args:
            needs_sender: whether the message needs a permit of the server's sender.

        Raises:
            RefusedError: no server can be reached, and the server that was tried last has refused this client
                because of a limit or its version.
            PeerLostError: no server can be reached, and the connection that was tried last has failed.
            AccessDeniedError: no server can be reached, and the server that was tried last belongs to another
                user, or does not accept the key.
            WouldBlockError: no server could take the message within `max_wait_s`.
            ClosedError: this client was closed.
        """
        self._try_again()
        chosen = None if self._waiting[needs_sender] else self._pick(needs_sender=needs_sender)
        while chosen is None or chosen.session is None:  # it may have been lost after it was granted
            chosen = await self._wait(needs_sender=needs_sender)
        return chosen

    def changed(self) -> None:
        """Choose again soon, because a server was connected or lost, or can take a message again."""
        if self._soon is None and self.waiting:
            self._soon = asyncio.get_running_loop().call_soon(self._serve)

    capacity_changed = changed  # the capacity of a sender

    def reported(self, server: RemoteServer, others: int) -> None:
        """Record the load of a server: the number of messages of other clients there."""
        self._reports += 1
        self._others[server] = others, self._reports
        self.changed()

    def close(self) -> None:
        """Fail the waiting calls; called after all servers were closed."""
        self._is_closed = True
        self._serve()

    async def _wait(self, *, needs_sender: bool) -> RemoteServer:
        if not self.waiting:
            self._retried = None
        queue, future = self._waiting[needs_sender], asyncio.get_running_loop().create_future()
        queue.append(future)
        self.changed()
        try:
            limit_s = self._max_wait_s[needs_sender]
            async with at_most(limit_s, lambda: self._timed_out(limit_s)):
                chosen: RemoteServer = await future
        except BaseException as error:
            with suppress(ValueError):  # a server was granted in this iteration
                queue.remove(future)
            has_timed_out = isinstance(error, WouldBlockError)
            if not future.done() or future.cancelled() or future.exception() is not None:
                found = self._pick(needs_sender=needs_sender) if has_timed_out else None
                if found is None:  # no server became available in this iteration either
                    raise
                return found
            chosen = future.result()
            if not has_timed_out:
                self._granted[chosen] -= 1
                self.changed()
                raise
        finally:
            del future  # an error that it holds refers to this frame
        self._granted[chosen] -= 1
        return chosen

    def _serve(self) -> None:
        """Grant servers to waiting calls, in the order of the calls."""
        for handle in (self._soon, self._later):
            if handle is not None:
                handle.cancel()
        self._soon = self._later = None
        for needs_sender, queue in self._waiting.items():
            while queue:
                if queue[0].done():  # cancelled in this iteration
                    queue.popleft()
                    continue
                chosen = self._pick(needs_sender=needs_sender)
                if chosen is None:
                    break
                self._granted[chosen] += 1
                queue.popleft().set_result(chosen)
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
            for queue in self._waiting.values():
                for future in queue:
                    if not future.done():
                        future.set_exception(failed.failure or ClosedError("this MessageClient was closed"))
                queue.clear()
        elif any(server.is_hopeless for server in self._servers) or self._failed_senders:
            self._try_again()
            self._later = asyncio.get_running_loop().call_later(_AT_MOST_EVERY_S, self._serve)

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

    def _pick(self, *, needs_sender: bool) -> RemoteServer | None:
        """Return the least loaded server that can take a message immediately; None if there is none."""
        ready = [server for server in self._rotation if server.session is not None]
        if needs_sender:
            working = [one for one in ready if (sender := self._senders[one]) and not sender.has_failed]
            if ready and not working:
                return ready[0]  # its sender raises the error that explains why
            ready = working
        able = [server for server in ready if self._can_take(server, needs_sender=needs_sender)]
        chosen = min(able, key=self._load_of, default=None)
        if chosen is not None:
            self._rotation.remove(chosen)
            self._rotation.append(chosen)
        return chosen

    def _can_take(self, server: RemoteServer, *, needs_sender: bool) -> bool:
        granted, sender = self._granted[server], self._senders[server]
        if server.session is None or server.session.credit <= server.being_sent + granted:
            return False
        return sender is None or not needs_sender or sender.free_permits > granted

    def _load_of(self, server: RemoteServer) -> float:
        others, report = self._others.get(server, (0, 0))
        aged = others * _AGES_BY ** (self._reports - report)
        own = server.in_flight + self._granted[server]
        return own + (aged if aged >= _COUNTS_FROM else 0.0)

    def _timed_out(self, limit_s: float | None) -> WouldBlockError:
        is_connected = any(server.session is not None for server in self._servers)
        why = "has had capacity for this message" if is_connected else "could be reached"
        return WouldBlockError(
            f"none of the {len(self._servers)} servers {why} for {limit_s} s", messages=Usage(requested=1)
        )
