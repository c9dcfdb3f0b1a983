"""Run the demo: start the processes, upload the videos, report the results, and stop everything."""

import asyncio
import itertools
import json
import signal
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import anyio
import msgspec
from rich.console import Console
from rich.text import Text

from aiotensor import MessageServer, TensorQueue
from demo.decode import VideoError, measure
from demo.engine import run_engine
from demo.messages import AnalyseVideo, WorkerReport
from demo.processes import (
    Child,
    Process,
    ProcessDiedError,
    running,
    threads_per_process,
)
from demo.report import progress_bar, results, summarise, verdict
from demo.server import run_server, server_command
from demo.settings import Settings
from demo.uploads import Upload, http_client, upload_all
from demo.workers import Workers

__all__ = ["Options", "run_demo"]

SOCKETS = ("engine.sock", "workers.sock")

# The shared memory of each worker.
LEAST_ARENA_BYTES = 1 << 24
MOST_ARENA_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run.

    Attributes:
        clips: the files to upload.
        own_clips: whether the user named the clips; if so, the run succeeds even if some are not videos.
        requests: the number of uploads; each clip is uploaded at least once.
        concurrency: the number of concurrent uploads.
        max_concurrent_videos: the number of videos that each worker may decode or send at once.
        workers: the number of workers of the API server; 1 with a queue.
        link: the link between the workers and the engine, ``"unix"`` or ``"queue"``.
    """

    clips: Sequence[Path]
    own_clips: bool
    requests: int
    concurrency: int
    max_concurrent_videos: int
    workers: int
    link: str


@dataclass(frozen=True, slots=True)
class _Processes:
    server: Process
    engine: Child
    workers: Workers
    base_url: str


def run_demo(options: Options) -> int:
    """Run the demo, and return the exit status of the command."""
    arena_bytes = _arena_bytes(options.clips)  # before anything is started that must be stopped
    return asyncio.run(_main(options, arena_bytes))


async def _main(options: Options, arena_bytes: int) -> int:
    errors = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix="aiotensor-", ignore_cleanup_errors=True) as name,
        # Port 0: the kernel chooses a free port.
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        folder, queue = Path(name), TensorQueue()
        try:
            for file in SOCKETS:  # an unopened server only checks its address
                MessageServer(f"unix://{quote(str(folder / file))}", AnalyseVideo)
        except ValueError:
            return _fail(errors, f"the path {folder} is too long for a socket: set TMPDIR to a shorter one")
        processes = _processes(options, folder, arena_bytes, queue, listener)
        ours = [processes.server, processes.engine]
        with anyio.CancelScope() as scope, _cancelled_by_signals(scope, ours) as signals:
            try:
                run = await _run(options, processes, errors)
            except ProcessDiedError as error:
                return _fail(errors, str(error))
    if signals:
        errors.print("stopped", style="yellow")
        return 128 + signals[0]
    return _show(options, *run)


def _processes(
    options: Options, folder: Path, arena_bytes: int, queue: TensorQueue, listener: socket.socket
) -> _Processes:
    engine_socket, workers_socket = (folder / file for file in SOCKETS)
    address = f"unix://{quote(str(engine_socket))}" if options.link == "unix" else None
    settings = Settings(
        address=address,
        workers_socket=str(workers_socket),
        supervised=options.workers > 1,
        max_concurrent_videos=options.max_concurrent_videos,
        arena_bytes=arena_bytes,
        threads=threads_per_process(options.workers + 1),
    )
    if address is None:
        server: Process = Child("API server", run_server, queue, settings, listener)
    else:
        server = server_command("API server", settings, listener, options.workers)
    return _Processes(
        server=server,
        engine=Child("engine", run_engine, address or queue, folder, settings.threads),
        workers=Workers(workers_socket, options.workers),
        base_url=f"http://127.0.0.1:{listener.getsockname()[1]}",
    )


def _arena_bytes(clips: Iterable[Path]) -> int:
    """Return the size of each worker's shared memory: twice the size of the largest clip, within limits."""
    largest = 0
    for clip in clips:
        with suppress(VideoError, OSError), clip.open("rb") as file:  # the server reports the error
            largest = max(largest, measure(file).nbytes)
    return min(max(2 * largest, LEAST_ARENA_BYTES), MOST_ARENA_BYTES)


def _fail(errors: Console, reason: str) -> int:
    errors.print(Text.assemble(("error", "bold red"), f": {reason}"), soft_wrap=True)
    return 1


async def _run(
    options: Options, processes: _Processes, errors: Console
) -> tuple[list[Upload], list[WorkerReport], float]:
    clips = list(itertools.islice(itertools.cycle(options.clips), max(options.requests, len(options.clips))))
    server, engine, workers = processes.server, processes.engine, processes.workers
    deaths: list[ProcessDiedError] = []

    async def end_with(death: Callable[[], Awaitable[ProcessDiedError]]) -> None:
        deaths.append(await death())
        group.cancel_scope.cancel()

    async def loss() -> ProcessDiedError:
        error = await workers.loss()
        # Uvicorn may be waiting for the health check of the dead worker, and handles no signals until then.
        server.kill()
        return error

    async with workers:
        async with running(server, engine), anyio.create_task_group() as group:
            # A single worker is the process of the server, whose death says more.
            losses = [loss] if options.workers > 1 else []
            for death in (server.death, engine.death, *losses):
                group.start_soon(end_with, death)
            errors.print(f"engine: process {engine.pid}, API server: process {server.pid}", highlight=False)
            with errors.status("starting"):
                await engine.ready()
                pids = await workers.started()
                await server.ready()
            errors.print(f"its workers: {', '.join(map(str, pids))}", highlight=False)
            errors.print(f"uploading {len(clips)} videos to {processes.base_url}", highlight=False)
            async with http_client(processes.base_url) as client:
                began = time.monotonic()
                with progress_bar(errors) as bar:
                    task = bar.add_task("uploading", total=len(clips))
                    uploads = await upload_all(
                        client, clips, concurrency=options.concurrency, on_done=lambda _: bar.advance(task)
                    )
                seconds = time.monotonic() - began
            group.cancel_scope.cancel()
        if deaths:
            raise deaths[0]
        return uploads, await workers.reports(), seconds


def _show(options: Options, uploads: list[Upload], reports: list[WorkerReport], seconds: float) -> int:
    summary = summarise(uploads, reports, seconds, link=options.link)
    wrong = summary.lost or summary.mismatched or summary.failed
    good = bool(summary.videos) and not wrong and (options.own_clips or not summary.refused)
    output = Console()
    # Soft wrap: the terminal breaks long lines, and files and pipes receive whole lines.
    for part in [*results(uploads), *verdict(summary, good=good)]:
        output.print(part, highlight=False, soft_wrap=isinstance(part, Text))
    print(json.dumps(msgspec.to_builtins(summary)), flush=True)
    return 0 if good else 1


@contextmanager
def _cancelled_by_signals(scope: anyio.CancelScope, children: Sequence[Process]) -> Iterator[list[int]]:
    """Cancel a scope at the first Ctrl-C or SIGTERM, and kill the children at the second."""
    received: list[int] = []
    loop = asyncio.get_running_loop()

    def handle(number: int) -> None:
        received.append(number)
        scope.cancel()
        if len(received) > 1:
            for child in children:
                child.kill()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle, number)
    try:
        yield received
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
