"""A process that has imported torch and forks programs, so that they start faster.

The test sends a name, arguments, and descriptors for output and errors. The process forks the program, and
replies with its pid, and later with its exit status. Children of `multiprocessing` could not replace it: they
exit without finalizing the interpreter.
"""

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self

__all__ = ["Ended", "ForkServer", "Program", "last_words"]

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 20.0  # for a program to end
_LONGEST = 4096

# Called when the interpreter exits, after the exit handlers of modules that are imported later.
last_words: list[Callable[[], object]] = []


class Ended(NamedTuple):
    """The end of a program: its exit status, negative for a signal, and its unread output and errors."""

    status: int
    lines: list[str]
    errors: str


class Program:
    """A running program."""

    def __init__(self, fork_server: "ForkServer", pid: int, output: IO[str], errors: IO[str]) -> None:
        self.pid = pid
        self._fork_server = fork_server
        self._output = output
        self._errors = errors
        self._status: int | None = None

    def line(self) -> str:
        """Wait for the next line of its output."""
        return self._output.readline().rstrip("\n")

    def signal(self, number: signal.Signals = signal.SIGINT) -> None:
        """Send a signal to the program, by default SIGINT."""
        os.kill(self.pid, number)

    def stop(self) -> None:
        """Stop the program, and wait until it has stopped."""
        from tests.blocking.waiting import until  # these import the library, which exits before `last_words`
        from verification.processes import watch

        self.signal(signal.SIGSTOP)
        until(lambda: watch.is_stopped(self.pid))

    def go_on(self) -> None:
        """Continue the program, if it still exists."""
        with suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the program, as the kernel does when memory is exhausted, and wait until it has ended."""
        self.signal(signal.SIGKILL)
        self._status = self._fork_server.wait(self.pid, _LIMIT_S)

    def ended(self) -> Ended:
        """Wait until the program has ended, and fail if it hangs."""
        try:
            self._status = self._fork_server.wait(self.pid, _LIMIT_S)
        except TimeoutError:
            self.signal(signal.SIGABRT)  # faulthandler prints the tracebacks
            self._status = self._fork_server.status()
            raise AssertionError(f"the program did not end:\n{self._errors.read()}") from None
        return Ended(self._status, self._output.read().splitlines(), self._errors.read())

    def close(self) -> None:
        if self._status is None:
            self.signal(signal.SIGKILL)
            self._fork_server.wait(self.pid, _LIMIT_S)


class ForkServer:
    """Start programs; a test waits for one at a time."""

    def __enter__(self) -> Self:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        options = [
            "-W",
            "error",
            "-X",
            "faulthandler",
            "-m",
            "tests.blocking.fork_server",
            str(theirs.fileno()),
        ]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *options], cwd=_ROOT, pass_fds=[theirs.fileno()]
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._process.wait()

    @contextmanager
    def program(self, name: str, *arguments: object) -> Iterator[Program]:
        """Start a function of `tests.blocking.programs`, and end it with the block."""
        output, errors = os.pipe(), os.pipe()
        with open(output[0]) as written, open(errors[0]) as complained:
            request = json.dumps({"name": name, "arguments": arguments})
            socket.send_fds(self._socket, [request.encode()], [output[1], errors[1]])
            os.close(output[1])
            os.close(errors[1])
            program = Program(self, self.status(), written, complained)
            try:
                yield program
            finally:
                program.close()

    def wait(self, pid: int, limit_s: float) -> int:
        """Wait for the end of a program, and return its exit status.

        Raises:
            TimeoutError: it did not end within `limit_s` seconds; `status` returns its status later.
        """
        self._socket.send(json.dumps({"pid": pid}).encode())
        self._socket.settimeout(limit_s)
        try:
            return self.status()
        finally:
            self._socket.settimeout(None)

    def status(self) -> int:
        """Return the next number that the process sends."""
        number: int = json.loads(self._socket.recv(_LONGEST))
        return number


def _next_program(control: socket.socket) -> Callable[[], None] | None:
    """Serve requests of tests; return the program in each child, and None at the end."""
    from tests.blocking import programs  # after the definition of `last_words`

    # Otherwise the garbage collection at the end of each program would copy most of the shared pages.
    gc.collect()
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, _LONGEST, 2)
        if not data:
            return None
        request = json.loads(data)
        if "pid" in request:
            _, status = os.waitpid(request["pid"], 0)
            control.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            continue
        child = os.fork()
        if not child:
            for number, descriptor in enumerate(descriptors, 1):
                os.dup2(descriptor, number)
        for descriptor in descriptors:
            os.close(descriptor)
        if not child:
            return lambda: getattr(programs, request["name"])(*request["arguments"])
        control.send(json.dumps(child).encode())


def end() -> None:
    for word in last_words:
        word()


if __name__ == "__main__":
    # Import the module by name, as programs do: `__main__` is another instance of it.
    from tests.blocking import fork_server

    atexit.register(fork_server.end)
    with socket.socket(fileno=int(sys.argv[1])) as control:
        program = _next_program(control)
    if program is not None:
        program()
