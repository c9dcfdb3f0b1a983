"""A ZeroMQ context: the threads behind the sockets of one client or server."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import zmq

from aiotensor.runtime.worker import Worker

__all__ = ["ZmqContext", "begin", "check_descriptors", "end"]

_BEGINS_WITH = 8  # descriptors that a context, its threads and its first socket need


class ZmqContext(zmq.Context["zmq.Socket[bytes]"]):
    """A context that closes its sockets when it is garbage-collected.

    `zmq.Context` has weak references to its sockets. The garbage collector clears these before it calls
    finalizers, and terminating a context waits forever for an open socket.
    """

    _owned: "list[zmq.Socket[bytes]]"

    def __init__(self) -> None:
        self._owned = []
        super().__init__()

    def socket(self, *args: Any, **options: Any) -> "zmq.Socket[bytes]":
        """Create a socket, and keep a reference to it until it is closed."""
        made = super().socket(*args, **options)
        self._owned = [*(one for one in self._owned if not one.closed), made]
        return made

    def term(self) -> None:
        """Wait until the closed sockets have sent their messages, or their linger time has passed."""
        super().term()
        self._owned = []  # the sockets refer to this context

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # An event loop that watches a socket refers to this context, so no loop watches one now.
        if not is_finalizing() and not self.closed:
            for one in self._owned:
                one.close(0)
            self.term()


def begin() -> ZmqContext:
    """Create a context.

    Raises:
        OSError: this process has no descriptors left.
    """
    check_descriptors()
    return ZmqContext()


def check_descriptors() -> None:
    """Check that there are descriptors for a context: ZeroMQ aborts the process if its threads get none.

    Raises:
        OSError: this process has too few descriptors left.
    """
    with contextlib.ExitStack() as spare:
        for _ in range(_BEGINS_WITH):
            spare.callback(os.close, os.eventfd(0))


async def end(context: ZmqContext) -> None:
    """Terminate a context whose sockets are closed, after they have sent their messages or timed out.

    Cancellation ends the wait, but the context still terminates.
    """
    worker = Worker("aiotensor-channel")
    try:
        ended = worker.submit(context.term)
    except OSError:  # no thread can be started
        context.term()
    else:
        await asyncio.shield(ended)
    finally:
        worker.close()
