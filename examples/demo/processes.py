"""Start child processes, wait until they are ready, detect their end, and stop them.

The parent and each `Child` are connected by a pipe. The child sends one byte when it is ready. The parent
closes its end to stop the child. The kernel closes it when the parent is killed, so no child outlives the
parent. A `Command` is another program, which is stopped by a signal.
"""

import asyncio
import logging
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

logger = logging.getLogger(__name__)

GRACE = 10.0  # seconds until a child that does not stop is killed


class ProcessDiedError(Exception):
    """A child process ended too early."""


class Process(Protocol):
    """A process that the demo starts and stops."""

    @property
    def pid(self) -> int | None:
        """The process id; None before the start."""

    def start(self) -> None:
        """Start the process."""

    async def ready(self) -> None:
        """Wait until the process is ready."""

    async def death(self) -> ProcessDiedError:
        """Wait until the process ends, and return an error that states its exit status."""

    async def stop(self) -> None:
        """Stop the process, and wait for its end."""

    def kill(self) -> None:
        """Kill the process if it is running."""


class Child:
    """One child process of the demo.

    Args:
        name: the name of the process in messages, for example ``"engine"``.
        target: the function to run in the child. Its last argument is the child's end of the pipe.
        args: the other arguments of the function.
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
        # Ctrl-C sends a signal to every process of the terminal. The child inherits blocked signals, so that
        # only the parent handles them, and stops the child. The first start of a process also starts the
        # resource tracker, which would unblock the signals: start it before.
        resource_tracker.ensure_running()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._childs_end.close()  # so that the pipe breaks when the child dies

    async def ready(self) -> None:
        """Wait until the child is ready."""
        await _readable(self._pipe.fileno())
        try:
            self._pipe.recv_bytes()
        except EOFError:  # the child died, and the task that waits in `death` cancels this one
            await anyio.sleep_forever()
        self._is_ready = True

    async def death(self) -> ProcessDiedError:
        """Wait until the process ends, and return an error that states its exit status."""
        await _readable(self._process.sentinel)
        self._process.join()
        return _death(self.name, self._process.exitcode or 0)

    async def stop(self) -> None:
        """Stop the process, and wait for its end."""
        self._pipe.close()
        self._childs_end.close()
        if self._process.pid is None:
            return  # never started
        if self._is_ready:  # otherwise it has nothing to clean up
            with anyio.move_on_after(GRACE) as grace:
                await _readable(self._process.sentinel)
            if grace.cancelled_caught:
                _warn_of_kill(self.name)
        self.kill()
        self._process.join()

    def kill(self) -> None:
        """Kill the process if it is running."""
        if self._process.is_alive():
            self._process.kill()


class Command:
    """Another Python program, in a separate process group.

    Ctrl-C in the terminal sends no signal to this group, and all its processes can be killed at once.

    Args:
        name: the name of the process in messages.
        module: the module that Python runs.
        arguments: the arguments of the program.
        environment: additional environment variables.
        descriptors: the file descriptors that it inherits, with the same numbers.
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
        self._end = os.pidfd_open(self._process.pid)  # readable after the end of the process

    async def ready(self) -> None:
        """Mark the process as ready. It cannot report this, so the caller must have waited until then."""
        self._is_ready = True

    async def death(self) -> ProcessDiedError:
        """Wait until the process ends, and return an error that states its exit status."""
        await _readable(self._end)
        return _death(self.name, _status(self._end))

    async def stop(self) -> None:
        """Stop the process and its children, and wait for the end of the process."""
        if self._process is None:
            return  # never started
        if self._is_ready:  # otherwise it has nothing to clean up
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
        """Kill the process and its children."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


@asynccontextmanager
async def running(*children: Process) -> AsyncIterator[None]:
    """Start processes, and stop them in the same order at the end of the block."""
    try:
        for child in children:
            child.start()
        yield
    finally:
        with anyio.CancelScope(shield=True):
            for child in children:
                await child.stop()


def report_ready(pipe: Connection) -> None:
    """Report to the parent that this process is ready."""
    with suppress(BrokenPipeError):  # `parent_gone` handles the end of the parent
        pipe.send_bytes(b".")


async def parent_gone(pipe: Connection) -> None:
    """Wait until the parent closes its end of the pipe or dies."""
    await _readable(pipe.fileno())


def threads_per_process(processes: int) -> int:
    """Return the number of threads of torch in each of several processes that share the cores."""
    return max(1, len(os.sched_getaffinity(0)) // processes)


def _death(name: str, status: int) -> ProcessDiedError:
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return ProcessDiedError(f"the {name} process {how} before the work was done")


def _status(end: int) -> int:
    # WNOWAIT keeps the process id, which is also that of its process group, until `Command.stop` uses it.
    ended = os.waitid(os.P_PIDFD, end, os.WEXITED | os.WNOWAIT)
    if ended is None:
        raise AssertionError("a process that has ended has a status")
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _warn_of_kill(name: str) -> None:
    logger.warning(
        "the %s process did not stop within %g s and is killed",
        name,
        GRACE,
    )


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(descriptor, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(descriptor)
