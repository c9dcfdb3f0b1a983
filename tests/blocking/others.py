"""A process in the other role, with the async or the blocking API, for tests without an event loop.

Its functions have the same names in both: coroutine functions of `verification.processes.peers` and
`tests.channel.peers`, functions of `tests.blocking.works`.
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from aiotensor.transports.endpoints import Endpoint
from tests.blocking import works
from tests.blocking.waiting import until
from tests.channel import peers as channel_peers
from verification import loops
from verification.processes import peers, watch

__all__ = ["APIS", "Other", "Pending", "other"]

APIS = ["async", "blocking"]

_context = multiprocessing.get_context("forkserver")  # which `peers` has prepared


class Pending:
    """A call that runs in another process."""

    def __init__(self, other: "Other", number: int) -> None:
        self._other = other
        self._number = number

    def result(self) -> Any:
        """Wait for the end, and return the result or raise the error."""
        return self._other.result(self._number)


class Other:
    """A process that runs calls, one after the other with the blocking API, concurrently with the async API.

    Args:
        api: the API that it uses.
        endpoint: the endpoint of its sender or receiver.
    """

    def __init__(self, api: str, endpoint: Endpoint) -> None:
        connection, theirs = _context.Pipe()
        self._connection: Connection = connection
        self._modules: list[object] = [works] if api == "blocking" else [peers, channel_peers]
        main: Callable[..., None] = works.main if api == "blocking" else peers.main
        arguments: tuple[object, ...] = (endpoint, theirs)
        if api == "async":
            arguments += (loops.Kind("asyncio", "plain"),)
        self.process = _context.Process(target=main, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self._results: dict[int, tuple[object, BaseException | None]] = {}
        self._next = 0

    @property
    def pid(self) -> int:
        pid = self.process.pid
        assert pid is not None
        return pid

    def begin(self, name: str, *args: object, **kwargs: object) -> Pending:
        """Start a call in the process."""
        [work] = [getattr(module, name) for module in self._modules if hasattr(module, name)]
        number, self._next = self._next, self._next + 1
        self._connection.send((number, work, args, kwargs))
        return Pending(self, number)

    def call(self, name: str, *args: object, **kwargs: object) -> Any:
        """Start a call in the process, and return its result."""
        return self.begin(name, *args, **kwargs).result()

    def result(self, number: int) -> object:
        while number not in self._results:
            answered, result, error = self._connection.recv()
            self._results[answered] = result, error
        result, error = self._results.pop(number)
        if error is not None:
            raise error
        return result

    def kill(self) -> None:
        """Kill the process, as the kernel does when memory is exhausted."""
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Stop the process, and wait until it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        until(lambda: watch.is_stopped(self.pid))

    def go_on(self) -> None:
        """Continue the process, if it still exists."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def finish(self) -> int | None:
        """End the process unless it was killed, and return its exit status."""
        with contextlib.suppress(BrokenPipeError):
            self._connection.send(None)
        self.process.join()
        return self.process.exitcode

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self._connection.close()


@contextmanager
def other(api: str, endpoint: Endpoint) -> Iterator[Other]:
    """Start a process, which ends with the block and without an error."""
    process = Other(api, endpoint)
    try:
        yield process
        assert process.finish() in (0, -signal.SIGKILL)
    finally:
        process.close()
