"""The TCP connections between the objects of this process, and the delivery of all messages on them.

The threads of ZeroMQ carry the messages of `tcp://`. Without this module, their progress at the beginning of
an iteration of a stepped loop would depend on the speed of the machine.
"""

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn, ParamSpec, TypeVar

from zmq.utils.garbage import gc as collector

__all__ = ["Delivery"]

_LONG_S = 60.0  # a delivery takes less than a millisecond on an idle machine

# States of TCP, and the values of its TCP_INFO; see linux/tcp.h.
_ESTABLISHED, _SYN_SENT = 1, 2
_INFO_BYTES = 216
_RECEIVED = struct.Struct("=Q"), 128
_SENT = struct.Struct("=QQ"), 200  # all bytes, and the repeated ones

P = ParamSpec("P")
R = TypeVar("R")

_Name = tuple[str, int]

_NOWHERE = ("", 0)


class _End(NamedTuple):
    """One end of a connection, as the kernel describes it.

    Attributes:
        state: the state of TCP.
        sent: the bytes that were sent, without repetitions.
        received: the bytes that have arrived.
    """

    state: int
    sent: int
    received: int


class Delivery:
    """Watch the connections of this process at one port.

    Args:
        port: where one object of this process listens at a time.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        if not collector.is_alive():
            collector.start()  # as the first connection would, for the rest of this process
        self._began_with = _threads_of_zeromq()

    def wait(self) -> None:
        """Wait until all messages have arrived, and the threads of ZeroMQ have passed them on.

        Then nothing changes before an object of this process acts: the kernel has passed each byte that one
        end has sent to the other one, and all threads were asleep at the same moment. A thread that the
        kernel has not scheduled between two looks at it was asleep all the time.
        """
        until = time.monotonic() + _LONG_S
        while True:
            before = _threads()
            are_asleep = all(state == b"S" for state, _ in before.values())
            if are_asleep and not self._is_under_way() and before == _threads():
                return
            if time.monotonic() > until:
                self._fail(before)
            os.sched_yield()

    def waiting(self, act: Callable[P, R]) -> Callable[P, R]:
        """Return a function that calls another one, and waits as `wait` does."""

        def act_and_wait(*args: P.args, **options: P.kwargs) -> R:
            try:
                return act(*args, **options)
            finally:
                self.wait()

        return act_and_wait

    def traffic(self) -> object:
        """Return values that change with each message and each connection."""
        return self._ends()

    def leftovers(self) -> list[str]:
        """Describe the connections that are open, and the threads of ZeroMQ that are newer than this."""
        began = [f"thread {thread}" for thread in _threads_of_zeromq() - self._began_with]
        return began + [f"{names} {end}" for names, end in self._ends().items()]

    def _is_under_way(self) -> bool:
        """Return whether the kernel has something to deliver."""
        ends = self._ends()
        for (here, there), end in ends.items():
            if end.state == _SYN_SENT:
                return True
            if end.state == _ESTABLISHED:
                other = ends.get((there, here))
                # Without the other end, the connection is still to be accepted, or its end to be noticed.
                if other is None or other.received != end.sent:
                    return True
        return False

    def _ends(self) -> dict[tuple[_Name, _Name], _End]:
        """Return the open ends of all connections, by the addresses of this end and of the other one.

        The sockets that listen, or are still to be connected, are among them, without another end.
        """
        found = {}
        for sock in _sockets():
            with contextlib.suppress(OSError):  # it has just been closed, or is not a TCP socket
                end, here, there = _described(sock), sock.getsockname(), _NOWHERE
                with contextlib.suppress(OSError):  # it is not connected
                    there = sock.getpeername()
                if self._port in (here[1], there[1]) or end.state == _SYN_SENT:
                    found[here, there] = end
        return found

    def _fail(self, threads: object) -> NoReturn:
        raise AssertionError(
            f"messages are under way without end: {self._ends()}, with the threads {threads}"
        )


def _described(sock: socket.socket) -> _End:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    layout, position = _SENT
    sent, repeated = layout.unpack_from(info, position)
    layout, position = _RECEIVED
    return _End(info[0], sent - repeated, *layout.unpack_from(info, position))


def _sockets() -> Iterator[socket.socket]:
    """Iterate over the IPv4 sockets of this process, which belong to others: do not close them."""
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=int(name))
        except OSError:
            continue  # it is not a socket, or has just been closed
        try:
            if sock.family == socket.AF_INET:
                yield sock
        finally:
            sock.detach()


def _threads() -> dict[str, tuple[bytes, bytes]]:
    """Return the state of each thread that Python did not start, and how often it was scheduled."""
    ours = {str(thread.native_id) for thread in threading.enumerate()}
    found = {}
    for name in os.listdir("/proc/self/task"):
        if name not in ours:
            with contextlib.suppress(OSError):  # it has just ended
                found[name] = _scheduled(f"/proc/self/task/{name}")
    return found


def _threads_of_zeromq() -> set[str]:
    found = set()
    for name in _threads():
        with contextlib.suppress(OSError), open(f"/proc/self/task/{name}/comm") as file:
            if file.read().startswith("ZMQ"):
                found.add(name)
    return found


def _scheduled(folder: str) -> tuple[bytes, bytes]:
    state = _read(f"{folder}/stat").rpartition(b")")[2].split(maxsplit=1)[0]
    return state, _read(f"{folder}/schedstat").split()[2]


def _read(path: str) -> bytes:
    """Read a short file of the kernel, in half the time that a file object takes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
