"""A process that has imported torch and forks programs, so that they start faster.

The test writes a name and arguments as a line of JSON. The process forks the program, which answers with its
pid, and later with its exit status. Children of `multiprocessing` could not replace it: they exit without
finalizing the interpreter.
"""

import atexit
import gc
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 20.0  # for a program to end

# Called when the interpreter exits, after the exit handlers of modules that are imported later.
last_words: list[Callable[[], object]] = []


class Ended(NamedTuple):
    """The end of a program: its exit status, negative for a signal, and its unread output and errors."""

    status: int
    lines: list[str]
    errors: str


class Program:
    """A running program."""

    def __init__(self, answers: IO[bytes], output: IO[str], errors: IO[str]) -> None:
        self.pid = int(answers.readline())
        self._answers, self._output, self._errors = answers, output, errors
        self._status: int | None = None

    def line(self) -> str:
        """Wait for the next line of its output."""
        return self._output.readline().rstrip("\n")

    def signal(self, number: signal.Signals = signal.SIGINT) -> None:
        """Send a signal to the program, by default SIGINT."""
        os.kill(self.pid, number)

    def ended(self) -> Ended:
        """Wait until the program has ended, and fail if it hangs."""
        is_ending = bool(select.select([self._answers], [], [], _LIMIT_S)[0])
        if not is_ending:
            self.signal(signal.SIGABRT)  # faulthandler prints the tracebacks
        self._status = int(self._answers.readline())
        ended = Ended(self._status, self._output.read().splitlines(), self._errors.read())
        assert is_ending, f"the program did not end:\n{ended.errors}"
        return ended

    def close(self) -> None:
        if self._status is None:
            self.signal(signal.SIGKILL)
            self._answers.readline()


class ForkServer:
    """Start programs, one at a time."""

    def __enter__(self) -> Self:
        command = f"{sys.executable} -W error -X faulthandler -m tests.blocking.fork_server"
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command.split(), cwd=_ROOT, stdin=pipe, stdout=pipe, bufsize=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    @contextmanager
    def program(self, name: str, *arguments: object) -> Iterator[Program]:
        """Start a function of `tests.blocking.programs`, and end it with the block."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        output, errors = os.pipe(), os.pipe()
        with open(output[0]) as written, open(errors[0]) as complained:
            streams = [f"/proc/{os.getpid()}/fd/{pipe[1]}" for pipe in (output, errors)]
            self._process.stdin.write(json.dumps([name, arguments, streams]).encode() + b"\n")
            program = Program(self._process.stdout, written, complained)
            os.close(output[1])
            os.close(errors[1])
            try:
                yield program
            finally:
                program.close()


def _next_program() -> Callable[[], None] | None:
    """Serve requests of tests; return the program in each child, and None at the end."""
    from tests.blocking import programs  # after the definition of `last_words`

    # Otherwise the garbage collection at the end of each program would copy most of the shared pages.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        name, arguments, streams = json.loads(line)
        if not (child := os.fork()):
            opened = [os.open(path, os.O_WRONLY) for path in streams]
            os.write(1, b"%d\n" % os.getpid())
            for number, descriptor in enumerate(opened, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            return lambda: getattr(programs, name)(*arguments)
        os.write(1, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return None


def end() -> None:
    for word in last_words:
        word()


if __name__ == "__main__":
    # Import the module by name, as programs do: `__main__` is another instance of it.
    from tests.blocking import fork_server

    atexit.register(fork_server.end)
    program = _next_program()
    if program is not None:
        program()
