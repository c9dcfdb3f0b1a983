"""Connect the demo to the workers of the server, which are children of uvicorn.

Each worker connects to a socket of the demo. It sends one record when it has started, and a report before it
ends. If the connection ends before the report, the worker has died. If the demo closes the connection, the
worker stops.
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

from demo.messages import WorkerMessage, WorkerReport, WorkerStarted
from demo.processes import ProcessDiedError
from demo.settings import Settings

__all__ = ["WorkerLink", "Workers"]


class Workers:
    """The connections to the workers, in the process of the demo.

    Args:
        path: the path of the socket.
        count: the number of workers.
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
        """Wait until all workers serve requests, and return their process ids."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._pids) >= self._count)
        return list(self._pids)

    async def loss(self) -> ProcessDiedError:
        """Wait until a worker ends without a report, and return an error that names it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._losses)
        return self._losses[0]

    async def reports(self) -> list[WorkerReport]:
        """Wait until all workers that started have ended, and return their reports.

        Raises:
            ProcessDiedError: a worker ended without a report.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._losses or len(self._reports) == len(self._pids))
        if self._losses:
            raise self._losses[0]
        return sorted(self._reports, key=lambda report: report.pid)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        which = "that had not started yet"
        reported = False
        # A worker that is killed may send an incomplete line, or reset the connection.
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
    """The connection of a worker to the demo. It stops the server when the demo closes it.

    Args:
        settings: the settings of the worker.
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
        with suppress(OSError):  # the demo has ended
            await self._writer.wait_closed()

    def send(self, message: WorkerMessage) -> None:
        """Send a record to the demo."""
        self._writer.write(msgspec.json.encode(message) + b"\n")

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            await reader.read()  # the demo sends nothing
        self._stop_server()

    def _stop_server(self) -> None:
        supervisor = multiprocessing.parent_process() if self._settings.supervised else None
        # The supervisor first, since it would start another worker. If it has died, another process may have
        # its process id.
        if supervisor is not None and supervisor.pid == os.getppid():
            os.kill(supervisor.pid, signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
