"""A ZeroMQ context: the threads behind the sockets of one client or server."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import zmq

from aiotensor.worker import Worker

__all__ = ["Context", "begin", "check_descriptors", "end"]

_BEGINS_WITH = 8  # descriptors: of a context with its threads, and its first socket


class Context(zmq.Context["zmq.Socket[bytes]"]):
    """A context that closes its sockets when it is garbage-collected.

    `zmq.Context` has weak references to them. The garbage collector clears these before it calls finalizers,
    and ending a context waits forever for a socket that is open.
    """

    _owned: "list[zmq.Socket[bytes]]"

    def __init__(self) -> None:
        self._owned = []
        super().__init__()

    def socket(self, *args: Any, **options: Any) -> "zmq.Socket[bytes]":
        """Make a socket, and keep it until it is closed."""
        made = super().socket(*args, **options)
        self._owned = [*(one for one in self._owned if not one.closed), made]
        return made

    def term(self) -> None:
        """Wait until all that the closed sockets sent has left or their time is over."""
        super().term()
        self._owned = []  # they refer to this

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # An event loop that watches a socket refers to this, so none does any more.
        if not is_finalizing() and not self.closed:
            for one in self._owned:
                one.close(0)
            self.term()


def begin() -> Context:
    """Make a context.

    Raises:
        OSError: this process has no descriptors left.
    """
    check_descriptors()
    return Context()


def check_descriptors() -> None:
    """See that there are descriptors for a context: ZeroMQ ends the process if its threads find none.

    Raises:
        OSError: there are not.
    """
    with contextlib.ExitStack() as spare:
        for _ in range(_BEGINS_WITH):
            spare.callback(os.close, os.eventfd(0))


async def end(context: Context) -> None:
    """End a context whose sockets are closed, when all that they sent has left or their time is over.

    Cancelling stops the waiting, and nothing else.
    """
    worker = Worker("aiotensor-channel")
    try:
        ended = worker.submit(context.term)
    except OSError:  # there is no thread to be had
        context.term()
    else:
        await asyncio.shield(ended)
    finally:
        worker.close()
