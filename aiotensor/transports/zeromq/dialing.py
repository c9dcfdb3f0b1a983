"""Where a client connects to its server, and when it tries again.

A server has one address, or several: ``localhost`` and a name can have more than one. They are tried in turn,
with a new socket for each attempt:

    attempt --fails--> next address ... last address --fails, after 5 to 250 ms--> first address

Names are resolved in threads (`resolving.py`) when the attempts begin, and again each second while they fail:
a server may have moved to another address. Known addresses are tried while a lookup is running.
"""

import asyncio
import errno
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import zmq

from aiotensor.runtime.descriptors import Descriptor, copy_of
from aiotensor.runtime.logs import logger_of
from aiotensor.transports.zeromq.addresses import Address, Target
from aiotensor.transports.zeromq.resolving import look_up

__all__ = ["DIALING_OPTIONS", "Dialer"]

logger = logger_of("transports")

# As long and as often as at `unix://`.
_FIRST_RETRY_S = 0.005
_LAST_RETRY_S = 0.25

_CONNECT_S = 1.0  # the kernel tries for two minutes, and after a few of its tries waits 15 s between them
_HANDSHAKE_S = 2.0  # less than the server waits: this side can tell its own timeout from refused keys
_HANDSHAKES = 3  # that the server ends before it counts: one may be that of a server just killed

_CLOSE_WAIT = 8  # the state of TCP in which the peer has closed, and nothing else has happened

_LOOKUP_EVERY_S = 1.0
_LOOKUP_SLOW_S = 2.0  # after which a name server is said not to answer
# For one server at a time. Each asks only every 5 s: several of them find out sooner that a name server
# answers again.
_LOOKUPS = 4

DIALING_OPTIONS: Mapping[int, int] = {
    zmq.CONNECT_TIMEOUT: int(_CONNECT_S * 1000),
    zmq.HANDSHAKE_IVL: int(_HANDSHAKE_S * 1000),
    # Never: a socket that ZeroMQ reconnects sends its queued messages to the next server. Without an interval
    # ZeroMQ would discard messages that have arrived, and would not report failed attempts.
    zmq.RECONNECT_IVL: 2**31 - 1,
}


class Dialer:
    """Choose the addresses of a server, and the times to try them; belongs to the running loop.

    Args:
        address: of the server.
        dial: called to connect to a target. If that fails, the owner calls `again`.
    """

    def __init__(self, address: Address, dial: Callable[[Target], None]) -> None:
        self.is_active = False  # until a server is reached, or `end`
        self.reason = ""  # why the name cannot be resolved, if it is that
        self._loop = asyncio.get_running_loop()
        self._address = address
        self._dial = dial
        self._known: Sequence[Target] = address.targets
        self._left: list[Target] = []  # to be tried before the next delay
        self._tried = Target("")
        self._delay = _FIRST_RETRY_S
        self._timer: asyncio.TimerHandle | None = None
        self._lookups: dict[asyncio.Future[Sequence[Target]], float] = {}  # and when they began
        self._looked_up_at: float | None = None
        self._is_reported = False
        self._connection = Descriptor(-1)  # a copy, until the handshake has ended
        self._ended_handshakes: Counter[Target] = Counter()  # in a row, by the server at each address

    def begin(self) -> None:
        """Try the first address at once."""
        self.end()
        self.reason = ""
        self._ended_handshakes.clear()
        self.is_active = True
        self._delay = _FIRST_RETRY_S
        self._begin_round()

    def again(self) -> None:
        """Try the next address soon; the first one again after a delay."""
        self.is_active = True
        self._cancel_timer()
        self._connection.close()
        if self._left:
            self._timer = self._loop.call_later(0, self._next)
        else:
            self._timer = self._loop.call_later(self._delay, self._begin_round)
            self._delay = min(2 * self._delay, _LAST_RETRY_S)

    def connected(self, descriptor: int) -> None:
        """Handle a new connection with this descriptor, whose handshake has yet to succeed."""
        try:
            # ZeroMQ may have closed it by now, and the number be that of another connection: then one more
            # handshake is needed to tell how it ends.
            self._connection = Descriptor(os.dup(descriptor))
        except OSError:  # ZeroMQ has closed it, or there are no descriptors left
            self._connection = Descriptor(-1)

    def refused(self, error: int) -> bool:
        """Return whether a server has ended so many handshakes in a row that it must have other keys.

        A server that is overloaded resets the connection instead, and a server that was stopped leaves it as
        it is: neither tells anything about the keys. `error` is the errno that ZeroMQ reports.
        """
        if not _ended_cleanly(self._connection, error):
            return self.unreachable()
        self._ended_handshakes[self._tried] += 1
        return self._ended_handshakes[self._tried] >= _HANDSHAKES

    def unreachable(self) -> bool:
        """Handle an attempt that shows nothing about the keys, and return False."""
        del self._ended_handshakes[self._tried]
        return False

    def reached(self) -> None:
        """Stop, since a handshake succeeded. The delay stays until `begin`."""
        self.end()
        self._ended_handshakes.clear()
        self._is_reported = False

    def end(self) -> None:
        """Stop until `begin` or `again`. The result of a running lookup is kept for then."""
        self.is_active = False
        self._left = []
        self._cancel_timer()
        self._connection.close()  # or the peer would not see its end

    def close(self) -> None:
        """Try no more. Threads that resolve the name are left to themselves."""
        self.end()
        for lookup in self._lookups:
            lookup.cancel()
        self._lookups.clear()

    def report(self, text: str, reason: str) -> None:
        """Log that there can be no attempt; once, until a server is reached."""
        if not self._is_reported:
            self._is_reported = True
            logger.error(
                "%s",
                text,
                extra={"event": "looking_failed", "address": self._address.text, "reason": reason},
            )

    def _begin_round(self) -> None:
        self._cancel_timer()
        if not self._address.targets:
            self._look_up()
        self._left = list(self._known)
        if self._left:
            self._next()
        else:
            self._timer = self._loop.call_later(_LOOKUP_EVERY_S, self._begin_round)

    def _next(self) -> None:
        self._cancel_timer()
        if not self._left:  # a lookup has just removed the address
            self.again()
            return
        self._tried = self._left.pop(0)
        self._dial(self._tried)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Names

    def _look_up(self) -> None:
        """Begin to resolve the name, unless that was just done or too many lookups have not ended.

        A slow lookup is never given up. Each later one sends its own queries.
        """
        now = self._loop.time()
        if self._lookups and now - min(self._lookups.values()) >= _LOOKUP_SLOW_S:
            self._unresolved("no name server answers")
        is_due = self._looked_up_at is None or now - self._looked_up_at >= _LOOKUP_EVERY_S
        if is_due and len(self._lookups) < _LOOKUPS:
            self._looked_up_at = now
            try:
                lookup = look_up(self._address.host, self._address.port)
            except OSError as error:
                self._unresolved(error.strerror or str(error))
            else:
                self._lookups[lookup] = now
                lookup.add_done_callback(self._looked_up)

    def _looked_up(self, lookup: "asyncio.Future[Sequence[Target]]") -> None:
        if lookup.cancelled():
            return
        del self._lookups[lookup]
        try:
            targets = lookup.result()
        except OSError as error:
            self._unresolved(error.strerror or str(error))
            return
        self.reason = ""
        were_known, self._known = self._known, targets
        if not self.is_active:
            return
        if not were_known:
            self._begin_round()
        elif targets != were_known:
            # The address of the present attempt may be stale: the new ones are next.
            self._left = [target for target in targets if target != self._tried]

    def _unresolved(self, reason: str) -> None:
        """Note why the name cannot be resolved at present; the addresses that are known are still tried."""
        self.reason = f"its name cannot be resolved: {reason}"
        if self.is_active:
            self.report(
                f"the name of the server at {self._address.text} cannot be resolved: {reason}", reason
            )


def _ended_cleanly(connection: Descriptor, error: int) -> bool:
    """Return whether the peer closed a connection and all its data was read, as far as the kernel tells.

    The errno that ZeroMQ reports does not tell. The first call that meets a reset consumes its error, and a
    read after that looks like one after a clean close. After a timeout it is that of an earlier failure, of
    any connection of the same thread. It decides only if there is no copy of the descriptor.
    """
    if error != errno.EPIPE or connection.number < 0:
        return error == errno.EPIPE
    try:
        with copy_of(connection.number) as sock:
            is_at_end = not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            if sock.family == socket.AF_UNIX:
                return is_at_end
            [state] = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    except OSError:  # it was reset, or it is still open
        return False
    return is_at_end and state == _CLOSE_WAIT
