"""Start child processes, learn when they are ready, notice when they die, and end them.

One pipe joins the parent and each `Child`. The child writes one byte into it once it is ready; the
parent writes nothing and closes its end to stop the child. The kernel closes that end too when the
parent is killed, so no child outlives it. A `Command` is another program, and is told by signals.
"""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Protocol

import anyio

from aiotensor.runtime.logs import logger_of

__all__ = [
    "Child",
    "Command",
    "Process",
    "ProcessDiedError",
    "parent_gone",
    "report_ready",
    "running",
    "threads_per_process",
]

logger = logger_of("cli")

GRACE = 10.0  # seconds in which a child that was told to stop must have ended; then it is killed


class ProcessDiedError(Exception):
    """A child process ended while it was needed."""


class Process(Protocol):
    """What can be started, watched and ended."""

    @property
    def pid(self) -> int | None:
        """The process id; None before the start."""

    def start(self) -> None:
        """Start the process."""

    async def ready(self) -> None:
        """Wait until the process is ready."""

    async def death(self) -> ProcessDiedError:
        """Wait until the process has ended, and say how."""

    async def stop(self) -> None:
        """Tell the process to stop, and wait until it has."""

    def kill(self) -> None:
        """End the process at once, if it still runs."""


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

    async def ready(self) -> None:
        """Wait until the child reports that it is ready."""
        await _readable(self._pipe.fileno())
        try:
            self._pipe.recv_bytes()
        except EOFError:  # it died first: whoever watches `death` ends this wait
            await anyio.sleep_forever()
        self._is_ready = True

    async def death(self) -> ProcessDiedError:
        """Wait until the process has ended, and say how."""
        await _readable(self._process.sentinel)
        self._process.join()
        return _death(self.name, self._process.exitcode or 0)

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
                _warn_of_kill(self.name)
        self.kill()
        self._process.join()

    def kill(self) -> None:
        """End the process at once, if it still runs."""
        if self._process.is_alive():
            self._process.kill()


class Command:
    """Another program in Python, with a process group of its own.

    So Ctrl-C in the terminal does not reach it and its children, and they can be ended with it.

    Args:
        name: what to call it in messages.
        module: what Python runs.
        arguments: of the program.
        environment: what is added to the environment.
        descriptors: what it inherits, by the same numbers.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Sequence[int],
    ) -> None:
        self.name = name
        self._command = [sys.executable, "-m", module, *arguments]
        self._environment = environment
        self._descriptors = descriptors
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False

    @property
    def pid(self) -> int | None:
        """The process id; None before the start."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process."""
        self._process = subprocess.Popen(
            self._command,
            env={**os.environ, **self._environment},
            pass_fds=self._descriptors,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        self._end = os.pidfd_open(self._process.pid)  # readable once the process has ended

    async def ready(self) -> None:
        """Note that the process is ready, as the caller must have learned: it has no way to say so."""
        self._is_ready = True

    async def death(self) -> ProcessDiedError:
        """Wait until the process has ended, and say how."""
        await _readable(self._end)
        return _death(self.name, _status(self._end))

    async def stop(self) -> None:
        """Tell the process to stop, and wait until it and its children have."""
        if self._process is None:
            return  # never started
        if self._is_ready:  # else there is nothing yet that it should end in order
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._end, signal.SIGTERM)
            with anyio.move_on_after(GRACE) as grace:
                await _readable(self._end)
            if grace.cancelled_caught:
                _warn_of_kill(self.name)
        self.kill()
        self._process.wait()
        os.close(self._end)

    def kill(self) -> None:
        """End the process and its children at once."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


@asynccontextmanager
async def running(*children: Process) -> AsyncIterator[None]:
    """Start these processes, and stop them in the same order at the end."""
    try:
        for child in children:
            child.start()
        yield
    finally:
        with anyio.CancelScope(shield=True):
            for child in children:
                await child.stop()


def report_ready(pipe: Connection) -> None:
    """Tell the parent that this process is ready."""
    with suppress(BrokenPipeError):  # the parent is gone already, as `parent_gone` will say
        pipe.send_bytes(b".")


async def parent_gone(pipe: Connection) -> None:
    """Wait until the parent closed its end of the pipe, or died."""
    await _readable(pipe.fileno())


def threads_per_process(processes: int) -> int:
    """Say how many threads torch may use in each of the processes that share this machine."""
    return max(1, len(os.sched_getaffinity(0)) // processes)


def _death(name: str, status: int) -> ProcessDiedError:
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return ProcessDiedError(f"the {name} process {how} before the work was done")


def _status(end: int) -> int:
    # Only a look: until `Command.stop`, nobody else gets the number, which its process group has too.
    ended = os.waitid(os.P_PIDFD, end, os.WEXITED | os.WNOWAIT)
    if ended is None:
        raise AssertionError("a process that has ended has a status")
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _warn_of_kill(name: str) -> None:
    logger.warning(
        "the %s process did not stop within %g s and is killed",
        name,
        GRACE,
        extra={"event": "process_killed", "child": name, "waited_s": GRACE},
    )


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(descriptor, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(descriptor)
