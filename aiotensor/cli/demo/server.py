"""The API server: FastAPI on uvicorn and uvloop, with a tensor sender in each worker.

uvicorn starts workers, and each calls `create_app`; what it must know is in the environment:

    uvicorn aiotensor.cli.demo.server:create_app --factory --workers 2

A `TensorQueue` can only be handed to a child process, so with one there is a single worker, which is
the demo's own child: `run_server`.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from http import HTTPStatus
from multiprocessing.connection import Connection

import msgspec
import torch
import uvicorn
import uvloop
from fastapi import Depends, FastAPI, HTTPException, Request, Response, UploadFile

from aiotensor import TensorQueue, TensorSender
from aiotensor.channel import MessageClient
from aiotensor.cli.demo.decode import EmptyVideoError, VideoError, VideoTooLargeError
from aiotensor.cli.demo.messages import VideoAnalysis, WorkerStarted
from aiotensor.cli.demo.processes import Command, parent_gone, report_ready
from aiotensor.cli.demo.settings import Settings
from aiotensor.cli.demo.videos import Videos
from aiotensor.cli.demo.workers import WorkerLink
from aiotensor.integrations.fastapi import MessageLifespan

__all__ = ["create_app", "make_app", "run_server", "server_command"]

# A worker that imports torch on a busy machine answers uvicorn late. It is not hung, as uvicorn would think.
HEALTH_CHECK = 120  # seconds


def server_command(name: str, settings: Settings, listener: socket.socket, workers: int) -> Command:
    """Make the process in which uvicorn runs the server; several workers make it their supervisor.

    Args:
        name: what to call it in messages.
        settings: for the workers.
        listener: the socket that all of them accept connections from.
        workers: how many.
    """
    arguments = ["aiotensor.cli.demo.server:create_app", "--factory", f"--workers={workers}"]
    arguments += [f"--fd={listener.fileno()}", "--loop=uvloop", "--lifespan=on", "--ws=none"]
    arguments += ["--log-level=warning", "--no-access-log", f"--timeout-worker-healthcheck={HEALTH_CHECK}"]
    return Command(name, "uvicorn", arguments, settings.environment(), [listener.fileno()])


def create_app() -> FastAPI:
    """Make the application in a worker that uvicorn started.

    Raises:
        LookupError: the environment does not say where the engine is.
    """
    settings = Settings.from_environment()
    if settings.address is None:
        raise LookupError("these settings are for a server that was handed a queue")
    torch.set_num_threads(settings.threads)
    return make_app(settings.address, settings)


def make_app(endpoint: TensorQueue | str, settings: Settings) -> FastAPI:
    """Make the application.

    Args:
        endpoint: where the engine receives tensors.
        settings: everything else.
    """

    def make_sender() -> TensorSender:
        return TensorSender(
            endpoint,
            max_concurrent_videos=settings.max_concurrent_videos,
            arena_bytes=settings.arena_bytes,
        )

    def make_client(sender: TensorSender) -> MessageClient[VideoAnalysis]:
        return MessageClient(settings.engine_address, sender=sender, reply_type=VideoAnalysis)

    engine = MessageLifespan(make_sender, make_client)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with WorkerLink(settings) as link:
            async with engine.lifespan(app):
                videos = app.state.videos = Videos(engine.opened_sender, engine.opened_client)
                link.send(WorkerStarted(os.getpid()))
                yield
            link.send(videos.report())

    app = FastAPI(title="aiotensor demo", lifespan=lifespan)
    engine.install(app)
    app.add_exception_handler(VideoError, _refuse)

    # What the sender and the engine raise is answered by `engine`, and who hangs up is waited for no more.
    @app.post("/videos", dependencies=[Depends(engine.sender)])
    async def post_video(request: Request, file: UploadFile | None = None) -> Response:
        """Find the scene cuts of one video file, sent as the form field `file`."""
        if file is None:
            raise HTTPException(HTTPStatus.BAD_REQUEST, "no video: send one as the form field `file`")
        videos: Videos = request.app.state.videos
        return _json(await videos.answer(file.filename or "upload", file.file))

    @app.get("/statistics")
    async def get_statistics(request: Request) -> Response:
        """Say what this worker's sender holds now, and what it has done."""
        videos: Videos = request.app.state.videos
        return _json(videos.statistics())

    return app


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer for a file that is at fault itself."""
    match error:
        case EmptyVideoError():
            status = HTTPStatus.BAD_REQUEST
        case VideoTooLargeError():
            status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        case _:
            status = HTTPStatus.UNPROCESSABLE_ENTITY
    return _json({"detail": str(error)}, status)


def _json(content: object, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


class _Server(uvicorn.Server):
    """A server that says when it is ready, and leaves signals to the parent process."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_started()


async def _main(app: FastAPI, listener: socket.socket, pipe: Connection) -> bool:
    config = uvicorn.Config(app, lifespan="on", ws="none", log_config=None)
    server = _Server(config, on_started=partial(report_ready, pipe))

    def stop(_: asyncio.Task[None]) -> None:
        server.should_exit = True

    # A plain task, since a task group would wrap the exit that uvicorn raises when it cannot start.
    watching = asyncio.create_task(parent_gone(pipe))
    watching.add_done_callback(stop)
    try:
        with listener:
            await server.serve(sockets=[listener])
    finally:
        watching.cancel()
    return server.started


def run_server(queue: TensorQueue, settings: Settings, listener: socket.socket, pipe: Connection) -> None:
    """Run the API server, as a child with a queue to the engine, until the parent closes the pipe.

    Args:
        queue: where the engine receives tensors.
        settings: everything else.
        listener: the socket to accept connections from.
        pipe: the child's end of the pipe to the parent.
    """
    torch.set_num_threads(settings.threads)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if not runner.run(_main(make_app(queue, settings), listener, pipe)):
            raise SystemExit(1)  # uvicorn said why
