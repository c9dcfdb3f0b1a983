"""A process that has imported what takes long, and forks programs: Python runs and ends them as it does any.

    test -- a name, arguments, where to write --> nursery -- fork --> program
    test <-- its pid, and later its status ------ nursery

A child of multiprocessing would not do: it ends without taking the interpreter apart.
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
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self

__all__ = ["Ended", "Nursery", "Program", "last_words"]

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 20.0  # for a program to end
_LONGEST = 4096

# Called when the interpreter ends, after what is registered by modules that are imported later.
last_words: list[Callable[[], object]] = []


class Ended(NamedTuple):
    """How a program has ended: its exit status, negative for a signal, and what it wrote and nobody read."""

    status: int
    lines: list[str]
    errors: str


class Program:
    """A program that runs, as the test sees it."""

    def __init__(self, nursery: "Nursery", pid: int, output: IO[str], errors: IO[str]) -> None:
        self.pid = pid
        self._nursery = nursery
        self._output = output
        self._errors = errors
        self._status: int | None = None

    def line(self) -> str:
        """Wait for the next line that it writes."""
        return self._output.readline().rstrip("\n")

    def signal(self, number: signal.Signals = signal.SIGINT) -> None:
        """Send it a signal; by default the one of Ctrl-C."""
        os.kill(self.pid, number)

    def ended(self) -> Ended:
        """Wait until it has ended, and fail if it does not."""
        try:
            self._status = self._nursery.wait(self.pid, _LIMIT_S)
        except TimeoutError:
            self.signal(signal.SIGABRT)  # faulthandler says where it hangs
            self._status = self._nursery.status()
            raise AssertionError(f"the program did not end:\n{self._errors.read()}") from None
        return Ended(self._status, self._output.read().splitlines(), self._errors.read())

    def close(self) -> None:
        if self._status is None:
            self.signal(signal.SIGKILL)
            self._nursery.wait(self.pid, _LIMIT_S)


class Nursery:
    """Start programs; a test waits for one at a time."""

    def __enter__(self) -> Self:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        options = ["-W", "error", "-X", "faulthandler", "-m", "tests.blocking.nursery", str(theirs.fileno())]
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
            TimeoutError: it took longer than so many seconds; the status is told when it has ended.
        """
        self._socket.send(json.dumps({"pid": pid}).encode())
        self._socket.settimeout(limit_s)
        try:
            return self.status()
        finally:
            self._socket.settimeout(None)

    def status(self) -> int:
        """Return the next number that the nursery tells."""
        number: int = json.loads(self._socket.recv(_LONGEST))
        return number


def _next_program(control: socket.socket) -> Callable[[], None] | None:
    """Do what tests ask; return in each child with its program, and with none when all is over."""
    from tests.blocking import programs  # behind `last_words`

    # Or each program, which has what was imported from here, would copy most of it when it ends.
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


def _end() -> None:
    for word in last_words:
        word()


if __name__ == "__main__":
    # Not the module that is named so: programs import that one.
    from tests.blocking import nursery

    atexit.register(nursery._end)
    with socket.socket(fileno=int(sys.argv[1])) as control:
        program = _next_program(control)
    if program is not None:
        program()
