"""The address where a server listens: a socket file of this user, a local port, or a port with keys."""

import asyncio
import errno
import os
import socket
from collections.abc import Mapping, Sequence

import zmq

from aiotensor.errors import UsageError
from aiotensor.transports.address import is_folder
from aiotensor.transports.socket_file import SocketFile
from aiotensor.transports.zeromq.addresses import Address, Target, look_up
from aiotensor.transports.zeromq.authenticator import Authenticator
from aiotensor.transports.zeromq.context import ZmqContext, begin, check_descriptors, end
from aiotensor.transports.zeromq.monitor import SocketEvents
from aiotensor.transports.zeromq.sockets import LoopSocket

__all__ = ["MessageListener"]

_LOOKUP_S = 10.0  # the maximum time that opening waits for a name to be resolved
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.ENODEV)  # this machine has no such address

# A connection whose handshake takes longer is closed. A client has a shorter limit, and ends it first.
_HANDSHAKE_S = 5

# The maximum number of connections that wait to be accepted. In a flood, the kernel retries a rejected
# connection a second later. With a larger backlog, it would wait as long behind connections that have ended.
_BACKLOG = 256


class MessageListener:
    """Listen at an address, once; belongs to the running loop.

    Args:
        address: the address.
        options: the options of the socket.
        allowed: the public keys of the clients; empty if they need no keys.
    """

    def __init__(
        self, address: Address, options: Mapping[int, int | bytes], allowed: frozenset[bytes]
    ) -> None:
        self.address = address.text
        self._where = address
        # Without ROUTER_MANDATORY, a ROUTER silently drops messages to a disconnected or slow client.
        self._options = {
            **options,
            zmq.ROUTER_MANDATORY: 1,
            zmq.HANDSHAKE_IVL: _HANDSHAKE_S * 1000,
            zmq.BACKLOG: _BACKLOG,
        }
        self._targets: Sequence[Target] = ()
        self._listener: socket.socket | None = None
        self._allowed = allowed
        self._context: ZmqContext | None = None
        self._authenticator: Authenticator | None = None
        self._file: SocketFile | None = None
        self._socket: LoopSocket | None = None

    async def open(self) -> None:
        """Prepare to listen.

        At an ``ipc://`` address, this waits and raises errors as `SocketFile.take` does. At a ``tcp://``
        address with a host name, it waits until the name is resolved, for at most ten seconds.

        Raises:
            UsageError: another server listens at the address, or the file is not a socket of this user.
            OSError: this process cannot listen at the address, or has no descriptors left; see `errno`.
        """
        check_descriptors()
        try:
            self._targets = await self._find_targets()
            if self._where.path is not None:
                # As `UnixListener` does: ZeroMQ itself would replace the socket of a live server.
                kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
                sock = socket.socket(socket.AF_UNIX, kind)
                self._file = SocketFile(self._where.path, sock, makes_folder=is_folder(self._where.text))
                await self._file.take()
                self._listener = sock
            self._context = begin()  # checks again: nothing is awaited from here until the socket is made
            if self._allowed:
                try:
                    self._authenticator = Authenticator(self._context, self._allowed)
                except zmq.ZMQError as error:
                    raise OSError(error.errno, error.strerror) from error
        except BaseException:
            await self.close(0.0)
            raise

    def listen(self, events: SocketEvents) -> LoopSocket:
        """Begin to listen; to be called immediately after `open`. After an error, call `close`.

        For a host name, this listens at the first of its addresses that this machine has. For ``localhost``,
        that is 127.0.0.1, or ::1 where there is no IPv4.

        Args:
            events: the object whose callbacks the socket calls.

        Raises:
            UsageError: another server listens at the address.
            OSError: this process cannot listen at the address, or has no descriptors left; see `errno`.
        """
        if self._context is None:
            raise AssertionError("a listener is opened before it listens")
        self._socket = self._bind(self._context, events)
        if self._where.path is None:
            self.address = self._socket.address  # with the actual port
        return self._socket

    async def _find_targets(self) -> Sequence[Target]:
        """Return the targets at which to listen; a name is resolved first."""
        where = self._where
        if where.targets:
            return where.targets
        try:
            socket.if_nametoindex(where.host)
        except OSError:  # it is the name of a host
            pass
        else:
            # ZeroMQ finds the address of an interface itself; with its IPv6 option, only an IPv6 address.
            text = f"tcp://{where.host}:{where.port}"
            return Target(text), Target(text, is_ipv6=True)
        try:
            async with asyncio.timeout(_LOOKUP_S):
                return await look_up(where.host, where.port)
        except TimeoutError:
            reason = f"no name server answered for {_LOOKUP_S:g} s"
        except OSError as error:
            reason = error.strerror or str(error)
        raise OSError(
            errno.EADDRNOTAVAIL,
            f"cannot listen at {self.address}: the name {where.host} cannot be resolved ({reason}); use an "
            f"address of this machine, or tcp://*:{where.port} for all of them",
        )

    def _bind(self, context: ZmqContext, events: SocketEvents) -> LoopSocket:
        """Listen at the first target that is an address of this machine."""
        last = None
        for target in self._targets:
            try:
                sock = LoopSocket(context, zmq.ROUTER, {**self._options, **target.options}, events)
            except zmq.ZMQError as error:
                raise OSError(error.errno, error.strerror) from error
            try:
                descriptor = None if self._listener is None else os.dup(self._listener.fileno())
                sock.bind(target.address, descriptor)
            except zmq.ZMQError as error:
                sock.close()
                if error.errno == errno.EADDRINUSE:
                    raise UsageError(f"another server already listens at {self.address}") from error
                last = error
                if error.errno not in _NOT_HERE:
                    break
            except BaseException:
                sock.close()
                raise
            else:
                return sock
        if last is None:
            raise AssertionError("an address has at least one target")
        text = f"cannot listen at {self.address}: {last.strerror}"
        if self._where.path is None and last.errno in _NOT_HERE:
            found = ", ".join(str(target.address) for target in self._targets)
            text += (
                f"; this machine does not have the address {found}: use one of its own, or "
                f"tcp://*:{self._where.port} for all of them"
            )
        raise OSError(last.errno, text) from last

    async def close(self, linger_s: float) -> None:
        """Close, and wait until ZeroMQ has sent the messages that it accepted, at most `linger_s` seconds.

        Cancellation ends this wait.
        """
        context = self._close_sockets(linger_s)
        if context is not None:
            await end(context)

    def abort(self) -> None:
        """Close without waiting, and discard the messages that ZeroMQ has not sent."""
        context = self._close_sockets(0.0)
        if context is not None:
            context.term()  # takes less than a millisecond without messages to send

    def _close_sockets(self, linger_s: float) -> ZmqContext | None:
        """Close all sockets, and return their context, which has to be terminated."""
        if self._file is not None:
            self._file.leave()
        if self._socket is not None:
            self._socket.close(linger_s)
        if self._authenticator is not None:
            self._authenticator.close()
            self._authenticator = None
        context, self._context = self._context, None
        return context
