"""Start child processes, learn when they are ready, notice when they die, and end them.

One pipe joins the parent and each child. The child writes one line into it once it is ready; the
parent writes nothing and closes its end to stop the child. The kernel closes that end too when the
parent is killed, so no child outlives it.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import anyio

__all__ = ["Child", "ProcessDiedError", "parent_gone", "report_ready", "running", "threads_per_process"]

logger = logging.getLogger(__name__)

GRACE = 10.0  # seconds in which a child that was told to stop must have ended; then it is killed


class ProcessDiedError(Exception):
    """A child process ended while it was needed."""


class Child:
    """One child process of the demo.

    Args:
        name: what to call it in messages, for example ``"engine"``.
        target: runs in the child; gets the child's end of the pipe as its last argument.
        args: the arguments before that one.
    """

    def __init__(self, name: str, target: Callable[..., None], *args: Any) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, self._childs_end = context.Pipe()
        self._is_ready = False
        self._process = context.Process(
            target=target, args=(*args, self._childs_end), name=f"aiotensor {name}"
        )

    @property
    def pid(self) -> int | None:
        """The process id; None before the start."""
        return self._process.pid

    def start(self) -> None:
        """Start the process."""
        # Ctrl-C reaches every process of the terminal. The child is born with the signals blocked, so
        # that only the parent answers them, and ends the child in order. The tracker, which the first
        # start of a process would start, unblocks them.
        resource_tracker.ensure_running()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._childs_end.close()  # from here on only the child holds it

    async def ready(self) -> str:
        """Wait for the line that the child reports when it is ready."""
        await _readable(self._pipe.fileno())
        try:
            line = self._pipe.recv_bytes().decode()
        except EOFError:  # it died first: whoever watches `death` ends this wait
            await anyio.sleep_forever()
            raise AssertionError("unreachable") from None
        self._is_ready = True
        return line

    async def death(self) -> ProcessDiedError:
        """Wait until the process has ended, and say how."""
        await _readable(self._process.sentinel)
        self._process.join()
        status = self._process.exitcode or 0
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return ProcessDiedError(f"the {self.name} process {how} before the work was done")

    async def stop(self) -> None:
        """Tell the process to stop, and wait until it has."""
        self._pipe.close()
        self._childs_end.close()
        if self._process.pid is None:
            return  # never started
        if self._is_ready:  # else it has nothing yet that it should end in order
            with anyio.move_on_after(GRACE) as grace:
                await _readable(self._process.sentinel)
            if grace.cancelled_caught:
                logger.warning("the %s process did not stop within %g s and is killed", self.name, GRACE)
        self.kill()
        self._process.join()

    def kill(self) -> None:
        """End the process at once, if it still runs."""
        if self._process.is_alive():
            self._process.kill()


@asynccontextmanager
async def running(*children: Child) -> AsyncIterator[None]:
    """Start these processes, and stop them in the same order at the end."""
    try:
        for child in children:
            child.start()
        yield
    finally:
        with anyio.CancelScope(shield=True):
            for child in children:
                await child.stop()


def report_ready(pipe: Connection, line: str = "") -> None:
    """Tell the parent that this process is ready."""
    with suppress(BrokenPipeError):  # the parent is gone already, as `parent_gone` will say
        pipe.send_bytes(line.encode())


async def parent_gone(pipe: Connection) -> None:
    """Wait until the parent closed its end of the pipe, or died."""
    await _readable(pipe.fileno())


def threads_per_process() -> int:
    """Say how many threads torch may use in each of the two processes that share this machine."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(descriptor, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(descriptor)
