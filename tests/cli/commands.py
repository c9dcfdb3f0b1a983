"""Run the `aiotensor` command, and make keys for it."""

import asyncio
import sys
from pathlib import Path
from typing import NamedTuple

import coverage
import zmq
from click.testing import CliRunner, Result

from aiotensor.cli.command import aiotensor as command

__all__ = ["Pair", "aiotensor", "run"]


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


async def run(*arguments: str, **environment: str) -> Result:
    """Run the command in another thread, which does not block the loop."""
    return await asyncio.to_thread(CliRunner().invoke, command, arguments, env=environment)
