"""Run the `aiotensor` command, and make keys for it."""

import asyncio
import json
import sys
from pathlib import Path
from typing import NamedTuple

import coverage
import zmq
from click.testing import CliRunner, Result

from aiotensor.cli.command import aiotensor as command


class Pair(NamedTuple):
    """A pair of CURVE keys."""

    public: str
    secret: str

    @classmethod
    def new(cls) -> "Pair":
        """Make a pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    def file(self, folder: Path, server_key: str) -> str:
        """Write the key file of a side with this pair that connects to a server; return its path."""
        file = folder / f"{self.public.encode().hex()[:8]}-{server_key.encode().hex()[:8]}.json"
        file.write_text(json.dumps({"secret_key": self.secret, "server_key": server_key}))
        return str(file)


def aiotensor(*arguments: str) -> list[str]:
    """Return a command line, which measures coverage if the tests do."""
    measured = [] if coverage.Coverage.current() is None else ["-m", "coverage", "run"]
    return [sys.executable, "-W", "error", *measured, "-m", "aiotensor", *arguments]


async def run(*arguments: str, **environment: str) -> Result:
    """Run the command in another thread, which does not block the loop."""
    return await asyncio.to_thread(CliRunner().invoke, command, arguments, env=environment)
