"""One whole run: start the processes, upload, report, and stop everything."""

import asyncio
import itertools
import json
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import msgspec
import zmq
from rich.console import Console
from rich.text import Text

from aiotensor import SenderStatistics, TensorQueue
from aiotensor.cli.demo.engine import run_engine
from aiotensor.cli.demo.processes import Child, ProcessDiedError, running
from aiotensor.cli.demo.report import progress_bar, results, summarise, verdict
from aiotensor.cli.demo.server import run_server
from aiotensor.cli.demo.uploads import Upload, get_statistics, http_client, upload_all

__all__ = ["Options", "run_demo"]


@dataclass(frozen=True, slots=True)
class Options:
    """What to run.

    Attributes:
        clips: the files to upload.
        own_clips: whether the user named them; then a file that is no video is no failure of the demo.
        requests: uploads in all; each clip is uploaded at least once.
        concurrency: uploads on their way at once.
        max_concurrent_videos: videos that the server may decode or have on their way to the engine at once.
    """

    clips: Sequence[Path]
    own_clips: bool
    requests: int
    concurrency: int
    max_concurrent_videos: int


def run_demo(options: Options) -> int:
    """Run the demo, and return the exit status of the command."""
    return asyncio.run(_main(options))


async def _main(options: Options) -> int:
    errors = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix="aiotensor-", ignore_cleanup_errors=True) as folder,
        closing(TensorQueue()) as queue,
    ):
        engine_socket = Path(folder, "engine.sock")
        if len(bytes(engine_socket)) > zmq.IPC_PATH_MAX_LEN:
            return _fail(errors, f"the path {folder} is too long for a socket: set TMPDIR to a shorter one")
        engine = Child("engine", run_engine, queue, engine_socket)
        server = Child("API server", run_server, queue, engine_socket, options.max_concurrent_videos)
        with anyio.CancelScope() as scope, _cancelled_by_signals(scope, [server, engine]) as signals:
            try:
                run = await _run(options, server, engine, errors)
            except ProcessDiedError as error:
                return _fail(errors, str(error))
    if signals:
        errors.print("stopped", style="yellow")
        return 128 + signals[0]
    return _show(options, *run)


def _fail(errors: Console, reason: str) -> int:
    errors.print(Text.assemble(("error", "bold red"), f": {reason}"), soft_wrap=True)
    return 1


async def _run(
    options: Options, server: Child, engine: Child, errors: Console
) -> tuple[list[Upload], SenderStatistics, float]:
    clips = list(itertools.islice(itertools.cycle(options.clips), max(options.requests, len(options.clips))))
    deaths: list[ProcessDiedError] = []

    async def end_with(child: Child) -> None:
        deaths.append(await child.death())
        group.cancel_scope.cancel()

    async with running(server, engine), anyio.create_task_group() as group:
        group.start_soon(end_with, server)
        group.start_soon(end_with, engine)
        errors.print(f"engine: process {engine.pid}, API server: process {server.pid}", highlight=False)
        with errors.status("starting"):
            base_url = await server.ready()
            await engine.ready()
        errors.print(f"uploading {len(clips)} videos to {base_url}", highlight=False)
        async with http_client(base_url) as client:
            began = time.monotonic()
            with progress_bar(errors) as bar:
                task = bar.add_task("uploading", total=len(clips))
                uploads = await upload_all(
                    client, clips, concurrency=options.concurrency, on_done=lambda _: bar.advance(task)
                )
            seconds = time.monotonic() - began
            statistics = await get_statistics(client)
        group.cancel_scope.cancel()
    if deaths:
        raise deaths[0]
    return uploads, statistics, seconds


def _show(options: Options, uploads: list[Upload], statistics: SenderStatistics, seconds: float) -> int:
    summary = summarise(uploads, statistics, seconds)
    wrong = summary.lost or summary.mismatched or summary.failed
    good = bool(summary.videos) and not wrong and (options.own_clips or not summary.refused)
    output = Console()
    # Soft wrap: the terminal breaks long lines, and a file or a pipe gets them whole.
    for part in [*results(uploads), verdict(summary, good=good)]:
        output.print(part, highlight=False, soft_wrap=isinstance(part, Text))
    print(json.dumps(msgspec.to_builtins(summary)), flush=True)
    return 0 if good else 1


@contextmanager
def _cancelled_by_signals(scope: anyio.CancelScope, children: Sequence[Child]) -> Iterator[list[int]]:
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
