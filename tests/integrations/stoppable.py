"""An engine that stops as engines do in production: a program, and a function that starts it.

    python -m tests.integrations.stoppable blocking unix:///run/t ipc:///run/m 0.05

SIGTERM raises `SystemExit`, and SIGINT `KeyboardInterrupt`, in a main thread that runs the model or the event
loop. The program writes "ready" once it answers, and "working" when the first request arrives.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from aiotensor import TensorReceiver, blocking
from aiotensor.channel import MessageServer
from tests.integrations.totals import Numbers, Total

__all__ = ["STYLES", "Engine", "engine"]


class Model:
    """Add numbers up, in a given time for each message."""

    def __init__(self, pace_s: float) -> None:
        self.pace_s = pace_s
        self._has_begun = False
        self._never = threading.Event()

    def begin(self) -> None:
        """Report the first message."""
        if not self._has_begun:
            self._has_begun = True
            _report("working")

    def run(self, message: Numbers) -> Total:
        """Work in this thread."""
        self.begin()
        self._never.wait(self.pace_s)  # a model waits for its GPU; a signal interrupts both
        return Total(int(message.values.sum()))

    async def run_async(self, message: Numbers) -> Total:
        """Work on the event loop."""
        self.begin()
        await asyncio.sleep(self.pace_s)
        return Total(int(message.values.sum()))


def _report(word: str) -> None:
    print(word, flush=True)


def _serve_blocking(tensors: str, messages: str, model: Model) -> None:
    with (
        blocking.TensorReceiver(tensors) as receiver,
        blocking.MessageServer(messages, Numbers, receiver=receiver) as server,
    ):
        _report("ready")
        server.serve(model.run)


async def _serve_asyncio(tensors: str, messages: str, model: Model) -> None:
    async with (
        TensorReceiver(tensors) as receiver,
        MessageServer(messages, Numbers, receiver=receiver) as server,
    ):
        _report("ready")
        await server.serve(model.run_async, max_concurrent=4)


STYLES: Mapping[str, Callable[[str, str, Model], None]] = {
    "blocking": _serve_blocking,
    "asyncio": lambda *arguments: asyncio.run(_serve_asyncio(*arguments)),
}

ROOT = Path(__file__).parents[2]


@dataclass
class Engine:
    """A running engine.

    Attributes:
        process: its process.
    """

    process: asyncio.subprocess.Process

    async def reports(self, word: str) -> None:
        """Wait until the engine has written a line."""
        if self.process.stdout is None:
            raise AssertionError("the output of the engine is a pipe")
        assert (await self.process.stdout.readline()).decode() == f"{word}\n"

    async def stop(self, number: signal.Signals) -> tuple[int, str]:
        """Send a signal, and return the exit status and the text on standard error."""
        self.process.send_signal(number)
        _, errors = await self.process.communicate()
        return self.process.returncode or 0, errors.decode()


@asynccontextmanager
async def engine(style: str, folder: Path, *, pace_s: float) -> AsyncIterator[Engine]:
    """Start an engine that is ready to answer, and kill it at the end of the block.

    Args:
        style: a key of `STYLES`.
        folder: the folder for its sockets.
        pace_s: the time of its work on each message, in seconds.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.integrations.stoppable"),
        *(style, f"unix://{folder}/t", f"ipc://{folder}/m", str(pace_s)),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        started = Engine(process)
        await started.reports("ready")
        yield started
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    style, tensors, messages, pace_s = sys.argv[1:]
    with suppress(KeyboardInterrupt):
        STYLES[style](tensors, messages, Model(float(pace_s)))
