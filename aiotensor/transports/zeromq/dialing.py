"""Where a client connects to its server, and when it tries again.

A server has one address, or several: ``localhost`` and a name can have more than one. They are tried in turn,
with a new socket for each attempt:

    attempt --fails--> next address ... last address --fails, after 5 to 250 ms--> first address

A name is resolved before its first address is tried, because the server may have moved to another address.
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
from aiotensor.runtime.outage import Absence
from aiotensor.transports.address import missing_at
from aiotensor.transports.zeromq.addresses import Address, Target, look_up

__all__ = ["DIALING_OPTIONS", "Dialer"]

logger = logger_of("transports")

# The same delays as at `unix://`.
_FIRST_RETRY_S = 0.005
_LAST_RETRY_S = 0.25

_CONNECT_S = 1.0  # the kernel would try for a minute or two, with pauses that grow to many seconds
_HANDSHAKE_S = 2.0  # less than the server waits: this side can distinguish its own timeout from refused keys
_HANDSHAKES = 3  # ended handshakes in a row that indicate other keys: one may be due to a killed server

_CLOSE_WAIT = 8  # the state of TCP in which only the peer has closed the connection

# After this time the log states that no name server answers; the system's resolver gives up much later.
_LOOKUP_SLOW_S = 2.0

DIALING_OPTIONS: Mapping[int, int] = {
    zmq.CONNECT_TIMEOUT: int(_CONNECT_S * 1000),
    zmq.HANDSHAKE_IVL: int(_HANDSHAKE_S * 1000),
    # Practically never: a socket that ZeroMQ reconnects sends its queued messages to the next server. Without
    # an interval, ZeroMQ would discard messages that have arrived, and would not report failed attempts.
    zmq.RECONNECT_IVL: 2**31 - 1,
}


class Dialer:
    """Choose which address of a server to try, and when; belongs to the running loop.

    Args:
        address: the address of the server.
        dial: called to connect to a target. If that fails, the owner calls `again`.
    """

    def __init__(self, address: Address, dial: Callable[[Target], None]) -> None:
        self.is_active = False  # whether there are attempts: until a server is reached, or `end`
        self.reason = ""  # why the name cannot be resolved; "" if it can
        self._loop = asyncio.get_running_loop()
        self._address = address
        self._dial = dial
        self._left: list[Target] = []  # to be tried before the next delay
        self._tried = Target("")
        self._delay = _FIRST_RETRY_S
        self._timer: asyncio.TimerHandle | None = None
        self._lookup: asyncio.Future[Sequence[Target]] | None = None
        self._is_reported = False
        self._connection = Descriptor(-1)  # a copy of the descriptor, until the handshake has ended
        self._ended_handshakes: Counter[Target] = Counter()  # in a row, by the server at each address
        self._absence = Absence(address.text, self._missing)

    def begin(self) -> None:
        """Try the first address at once."""
        self.end()
        self.reason = ""
        self._ended_handshakes.clear()
        self.is_active = True
        self._absence.begin()
        self._delay = _FIRST_RETRY_S
        self._begin_round()

    def again(self) -> None:
        """Try the next address soon; after the last one, try the first one again after a delay."""
        self.is_active = True
        self._absence.begin()
        self._cancel()
        self._connection.close()
        if self._left:
            self._timer = self._loop.call_later(0, self._next)
        else:
            self._timer = self._loop.call_later(self._delay, self._begin_round)
            self._delay = min(2 * self._delay, _LAST_RETRY_S)

    def connected(self, descriptor: int) -> None:
        """Keep a copy of the descriptor of a new connection, until its handshake has ended."""
        try:
            # ZeroMQ may have closed it by now, and its number may belong to another connection. Then one more
            # handshake is needed to detect how it ends.
            self._connection = Descriptor(os.dup(descriptor))
        except OSError:  # ZeroMQ has closed it, or there are no descriptors left
            self._connection = Descriptor(-1)

    def refused(self, error: int) -> bool:
        """Return whether a server has ended enough handshakes in a row to conclude that it has other keys.

        A server that is overloaded resets the connection instead, and a server that was stopped leaves it
        open. Neither shows anything about the keys. `error` is the errno that ZeroMQ reports.
        """
        if not _ended_cleanly(self._connection, error):
            return self.unreachable()
        self._ended_handshakes[self._tried] += 1
        return self._ended_handshakes[self._tried] >= _HANDSHAKES

    def unreachable(self) -> bool:
        """Reset the count of ended handshakes after an attempt that shows nothing about the keys.

        Always returns False.
        """
        del self._ended_handshakes[self._tried]
        return False

    def reached(self) -> None:
        """Stop trying, because a handshake has succeeded; the delay is kept until `begin`."""
        self.end()
        self._ended_handshakes.clear()
        self._is_reported = False

    def end(self) -> None:
        """Stop trying until `begin` or `again`."""
        self.is_active = False
        self._absence.end()
        self._left = []
        self._cancel()
        self._connection.close()  # otherwise the peer would not see the end of the connection

    def report(self, text: str, reason: str) -> None:
        """Log why no attempt is possible, only once until a server is reached."""
        if not self._is_reported:
            self._is_reported = True
            logger.error(
                "%s",
                text,
                extra={"event": "looking_failed", "address": self._address.text, "reason": reason},
            )

    def _begin_round(self) -> None:
        self._cancel()
        if self._address.targets:
            self._left = list(self._address.targets)
            self._next()
        else:
            self._look_up()

    def _next(self) -> None:
        self._cancel()
        self._tried = self._left.pop(0)
        self._dial(self._tried)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lookup is not None:
            self._lookup.cancel()
            self._lookup = None

    def _missing(self) -> str:
        """Return the reason why no server was reached."""
        path = self._address.path
        if path:
            return missing_at(path)
        return self.reason or "no process listens there, or it does not answer"

    # Names

    def _look_up(self) -> None:
        """Resolve the name, and try its addresses then."""
        try:
            self._lookup = look_up(self._address.host, self._address.port)
        except OSError as error:
            self._unresolved(error.strerror or str(error))
            self.again()
            return
        self._lookup.add_done_callback(self._looked_up)
        self._timer = self._loop.call_later(_LOOKUP_SLOW_S, self._unresolved, "no name server answers")

    def _looked_up(self, lookup: "asyncio.Future[Sequence[Target]]") -> None:
        if lookup.cancelled():
            return
        error = lookup.exception()
        if lookup is not self._lookup:  # it was cancelled after it had ended
            return
        if isinstance(error, OSError):
            self._unresolved(error.strerror or str(error))
            self.again()
        else:
            self.reason = ""
            self._left = list(lookup.result())
            self._next()

    def _unresolved(self, reason: str) -> None:
        """Log why the name cannot be resolved at present, and keep the reason for errors."""
        self.reason = f"its name cannot be resolved: {reason}"
        self.report(f"the name of the server at {self._address.text} cannot be resolved: {reason}", reason)


def _ended_cleanly(connection: Descriptor, error: int) -> bool:
    """Return whether the peer closed a connection and all its data was read, as far as the kernel reports.

    The errno that ZeroMQ reports does not show this. The first call after a reset consumes the error, and a
    later read looks like one after a clean close. After a timeout, the errno is that of an earlier failure,
    of any connection of the same thread. So `error` decides only if there is no copy of the descriptor.
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
