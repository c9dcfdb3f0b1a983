"""How the demo hears of the server's workers, which are children of uvicorn and not its own.

Each worker connects to a socket of the demo, says that it has started, and last what it has done. A
connection that ends before that tells the demo of a worker that died; one that the demo ends tells the
worker to stop.
"""

import asyncio
import multiprocessing
import os
import signal
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from aiotensor.cli.demo.messages import WorkerMessage, WorkerReport, WorkerStarted
from aiotensor.cli.demo.processes import ProcessDiedError
from aiotensor.cli.demo.settings import Settings

__all__ = ["WorkerLink", "Workers"]


class Workers:
    """The demo's side.

    Args:
        path: of the socket.
        count: how many workers there will be.
    """

    def __init__(self, path: Path, count: int) -> None:
        self._path = path
        self._count = count
        self._pids: list[int] = []
        self._reports: list[WorkerReport] = []
        self._losses: list[ProcessDiedError] = []
        self._changed = asyncio.Condition()
        self._messages: msgspec.json.Decoder[WorkerMessage] = msgspec.json.Decoder(WorkerMessage)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._listen, self._path)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()

    async def started(self) -> list[int]:
        """Wait until every worker serves requests, and return their process ids."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._pids) >= self._count)
        return list(self._pids)

    async def loss(self) -> ProcessDiedError:
        """Wait until a worker ends without a report, and say which."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._losses)
        return self._losses[0]

    async def reports(self) -> list[WorkerReport]:
        """Wait until every worker that started has ended, and return what each has done.

        Raises:
            ProcessDiedError: one has ended without a report.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._losses or len(self._reports) == len(self._pids))
        if self._losses:
            raise self._losses[0]
        return sorted(self._reports, key=lambda report: report.pid)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        which = "that had not started yet"
        reported = False
        # A worker that was killed may leave half a line, or break the connection.
        with suppress(ConnectionError):
            while (line := await reader.readline()).endswith(b"\n"):
                message = self._messages.decode(line)
                if isinstance(message, WorkerStarted):
                    which = f"(process {message.pid})"
                    self._pids.append(message.pid)
                else:
                    reported = True
                    self._reports.append(message)
                await self._notify()
        writer.close()
        if not reported:
            self._losses.append(
                ProcessDiedError(f"a worker of the API server {which} died before the work was done")
            )
            await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class WorkerLink:
    """A worker's side. Stops the server when the demo has gone.

    Args:
        settings: what the worker knows.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def __aenter__(self) -> Self:
        try:
            reader, self._writer = await asyncio.open_unix_connection(self._settings.workers_socket)
        except OSError:
            self._stop_server()
            raise
        self._watching = asyncio.create_task(self._watch(reader))
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watching.cancel()
        self._writer.close()
        with suppress(OSError):  # the demo has gone: nobody reads it
            await self._writer.wait_closed()

    def send(self, message: WorkerMessage) -> None:
        """Tell the demo something."""
        self._writer.write(msgspec.json.encode(message) + b"\n")

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            await reader.read()  # the demo sends nothing
        self._stop_server()

    def _stop_server(self) -> None:
        supervisor = multiprocessing.parent_process() if self._settings.supervised else None
        # First who would start another worker, unless it has died and its number is somebody else's.
        if supervisor is not None and supervisor.pid == os.getppid():
            os.kill(supervisor.pid, signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
