"""Run the `aiotensor` command in a separate process, and make keys for it."""

import io
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import coverage
import zmq

from verification.processes.peers import contexts

__all__ = ["Pair", "aiotensor", "in_fork"]


class Pair(NamedTuple):
    """A pair of CURVE keys."""

    public: str
    secret: str

    @classmethod
    def new(cls) -> "Pair":
        """Make a pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    def secret_file(self, folder: Path) -> str:
        """Write the secret key to a new file that only this user can read, and return its path."""
        file = folder / "secret"
        file.touch(0o600)
        file.write_text(f"{self.secret}\n")
        return str(file)


def aiotensor(*arguments: str) -> list[str]:
    """Return a command line, which measures coverage if the tests do."""
    measured = [] if coverage.Coverage.current() is None else ["-m", "coverage", "run"]
    return [sys.executable, "-W", "error", *measured, "-m", "aiotensor", *arguments]


class Ended(NamedTuple):
    """The end of a program: its exit status, its output and its errors."""

    status: int
    output: str
    errors: str


def in_fork(code: str, *arguments: str) -> Ended:
    """Run a program in a fork of a process that has imported torch, which starts faster than a new one.

    The program finds torch imported, and the library not imported.
    """
    context = contexts["forkserver"]
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(code, arguments, writer), daemon=True)
    process.start()
    writer.close()
    with reader:
        ended: Ended = reader.recv()
    process.join()
    return ended


def _run(code: str, arguments: tuple[str, ...], writer: Connection) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == "aiotensor":
            del sys.modules[name]
    warnings.simplefilter("error")
    sys.argv[1:] = arguments
    output, errors = io.StringIO(), io.StringIO()
    status = 0
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            exec(code, {"__name__": "__main__"})  # noqa: S102 - a program of the tests
        except SystemExit as end:
            status = int(end.code or 0)
    # Sent before the exit, which can fail in a process with narrow limits.
    writer.send(Ended(status, output.getvalue(), errors.getvalue()))
