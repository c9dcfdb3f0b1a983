"""The API server process: FastAPI on uvicorn and uvloop, with a tensor sender beside it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from http import HTTPStatus
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec
import torch
import uvicorn
import uvloop
from fastapi import FastAPI, HTTPException, Request, Response, UploadFile

from aiotensor import TensorQueue, TensorSender
from aiotensor.cli.demo.engine_client import EngineClient
from aiotensor.cli.demo.processes import parent_gone, report_ready, threads_per_process
from aiotensor.cli.demo.videos import Refusal, Videos

__all__ = ["make_app", "run_server"]

T = TypeVar("T")


def make_app(queue: TensorQueue, engine_socket: Path, *, max_concurrent_videos: int) -> FastAPI:
    """Make the application.

    Args:
        queue: where the engine receives tensors.
        engine_socket: where it takes requests.
        max_concurrent_videos: how many videos may be decoded or on their way at once; others wait.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with (
            TensorSender(queue, max_concurrent_videos=max_concurrent_videos) as sender,
            EngineClient(engine_socket) as engine,
        ):
            app.state.videos = Videos(sender, engine)
            yield

    app = FastAPI(title="aiotensor demo", lifespan=lifespan)

    @app.post("/videos")
    async def post_video(request: Request, file: UploadFile | None = None) -> Response:
        """Find the scene cuts of one video file, sent as the form field `file`."""
        if file is None:
            raise HTTPException(HTTPStatus.BAD_REQUEST, "no video: send one as the form field `file`")
        videos: Videos = request.app.state.videos
        answer = partial(videos.answer, file.filename or "upload", file.file)
        outcome = await _while_connected(request, answer)
        if isinstance(outcome, Refusal):
            raise HTTPException(outcome.status, outcome.reason)
        return _json(outcome)

    @app.get("/statistics")
    async def get_statistics(request: Request) -> Response:
        """Say what the sender holds now, and what it has done."""
        videos: Videos = request.app.state.videos
        return _json(videos.statistics())

    return app


async def _while_connected(request: Request, work: Callable[[], Awaitable[T]]) -> T | None:
    """Do the work, but cancel it when the client goes away; then the result is None."""
    result = None

    async def wait_until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(wait_until_gone)
        result = await work()
        group.cancel_scope.cancel()
    return result


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


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


async def _main(app: FastAPI, pipe: Connection) -> bool:
    # Port 0: the kernel picks a free one, and it is ours before anybody hears of it.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = uvicorn.Config(app, lifespan="on", ws="none", log_config=None)
    server = _Server(config, on_started=lambda: report_ready(pipe, f"http://127.0.0.1:{port}"))

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


def run_server(queue: TensorQueue, engine_socket: Path, max_concurrent_videos: int, pipe: Connection) -> None:
    """Run the API server until the parent closes the pipe.

    Args:
        queue: where the engine receives tensors.
        engine_socket: where it takes requests.
        max_concurrent_videos: how many videos may be decoded or on their way at once; others wait.
        pipe: the child's end of the pipe to the parent; gets the server's address once it is ready.
    """
    torch.set_num_threads(threads_per_process())
    app = make_app(queue, engine_socket, max_concurrent_videos=max_concurrent_videos)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if not runner.run(_main(app, pipe)):
            raise SystemExit(1)  # uvicorn said why
