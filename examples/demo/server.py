"""The API server: FastAPI on uvicorn and uvloop, with a message client in each worker.

uvicorn starts the workers. Each worker calls `create_app`, and reads its settings from the environment:

    uvicorn demo.server:create_app --app-dir examples --factory --workers 2

A `TensorQueue` is passed as an argument, which uvicorn's workers do not get, so with a queue there is a
single worker: a child of the demo that runs `run_server`.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from http import HTTPStatus
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch
import uvicorn
import uvloop
from fastapi import Depends, FastAPI, HTTPException, Request, Response, UploadFile

from aiotensor import MessageClient, TensorQueue
from aiotensor.integrations.fastapi import MessageLifespan
from demo.decode import VideoError, VideoTooLargeError
from demo.messages import VideoAnalysis, WorkerStarted
from demo.processes import Command, parent_gone, report_ready
from demo.settings import Settings
from demo.videos import Videos
from demo.workers import WorkerLink

__all__ = ["create_app", "make_app", "run_server", "server_command"]

EXAMPLES = Path(__file__).parents[1]

# In seconds. With the default, uvicorn kills workers on a busy machine, since they import torch for too long.
HEALTH_CHECK = 120


def server_command(name: str, settings: Settings, listener: socket.socket, workers: int) -> Command:
    """Return the process of uvicorn, which is the supervisor if there are several workers.

    Args:
        name: the name of the process in messages.
        settings: the settings of the workers.
        listener: the socket from which all workers accept connections.
        workers: the number of workers.
    """
    arguments = ["demo.server:create_app", f"--app-dir={EXAMPLES}", "--factory", f"--workers={workers}"]
    arguments += [f"--fd={listener.fileno()}", "--loop=uvloop", "--lifespan=on", "--ws=none"]
    arguments += ["--log-level=warning", "--no-access-log", f"--timeout-worker-healthcheck={HEALTH_CHECK}"]
    return Command(name, "uvicorn", arguments, settings.environment(), [listener.fileno()])


def create_app() -> FastAPI:
    """Return the application of a worker that uvicorn starts.

    Raises:
        LookupError: the environment has no address of the engine.
    """
    settings = Settings.from_environment()
    if settings.address is None:
        raise LookupError("the settings have no address: they are those of a server with a queue")
    torch.set_num_threads(settings.threads)
    return make_app(settings.address, settings)


def make_app(endpoint: TensorQueue | str, settings: Settings) -> FastAPI:
    """Return the application.

    Args:
        endpoint: the address or queue at which the engine receives requests.
        settings: the other settings.
    """

    def make_client() -> MessageClient[VideoAnalysis]:
        return MessageClient(
            endpoint,
            VideoAnalysis,
            max_concurrent_videos=settings.max_concurrent_videos,
            arena_bytes=settings.arena_bytes,
        )

    engine = MessageLifespan(make_client)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with WorkerLink(settings) as link:
            async with engine.lifespan(app):
                videos = app.state.videos = Videos(engine.opened_client)
                link.send(WorkerStarted(os.getpid()))
                yield
            link.send(videos.report())

    app = FastAPI(title="aiotensor demo", lifespan=lifespan)
    engine.install(app)
    app.add_exception_handler(VideoError, _refuse)

    # `engine` answers errors of the client and the engine, and cancels requests whose clients disconnect.
    @app.post("/videos", dependencies=[Depends(engine.client)])
    async def post_video(request: Request, file: UploadFile | None = None) -> Response:
        """Return the scene cuts of a video file in the form field `file`."""
        if file is None:
            raise HTTPException(HTTPStatus.BAD_REQUEST, "no video: send one as the form field `file`")
        videos: Videos = request.app.state.videos
        return _json(await videos.answer(file.filename or "upload", file.file))

    @app.get("/statistics")
    async def get_statistics(request: Request) -> Response:
        """Return the statistics of this worker's client."""
        videos: Videos = request.app.state.videos
        return _json(videos.statistics())

    return app


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer an upload of an invalid file."""
    match error:
        case VideoTooLargeError():
            status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        case _:  # empty, not a video, or damaged
            status = HTTPStatus.BAD_REQUEST
    return _json({"detail": str(error)}, status)


def _json(content: object, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


class _Server(uvicorn.Server):
    """A server that reports when it is ready, and leaves signals to the parent process."""

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

    # Not a task group, which would wrap the SystemExit that uvicorn raises if it cannot start.
    watching = asyncio.create_task(parent_gone(pipe))
    watching.add_done_callback(stop)
    try:
        with listener:
            await server.serve(sockets=[listener])
    finally:
        watching.cancel()
    return server.started


def run_server(queue: TensorQueue, settings: Settings, listener: socket.socket, pipe: Connection) -> None:
    """Run the API server with a queue to the engine until the parent closes the pipe.

    Args:
        queue: the queue at which the engine receives requests.
        settings: the other settings.
        listener: the socket from which the server accepts connections.
        pipe: the child's end of the pipe to the parent.
    """
    torch.set_num_threads(settings.threads)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if not runner.run(_main(make_app(queue, settings), listener, pipe)):
            raise SystemExit(1)  # uvicorn has logged the reason
