"""Trace uploads from a FastAPI server to an engine in another process, and print the spans of the last one.

python examples/traced.py

The client has one permit, and memory for one video: the last of three uploads waits for both. It needs
`pip install 'aiotensor[fastapi,opentelemetry]' httpx opentelemetry-sdk opentelemetry-instrumentation-fastapi
uvicorn`.
"""

import asyncio
import multiprocessing
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple

import httpx
import msgspec
import torch
import uvicorn
from fastapi import FastAPI, Request
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from aiotensor import MessageClient, MessageServer
from aiotensor.integrations.fastapi import MessageLifespan
from aiotensor.integrations.opentelemetry import instrument

SHAPE = (40, 360, 640, 3)  # frames, height, width, colours
VIDEO_BYTES = 40 * 360 * 640 * 3


class Video(msgspec.Struct):
    """A request."""

    frames: torch.Tensor


class Colour(msgspec.Struct):
    """The answer: the mean red, green and blue."""

    mean: list[float]


class Row(NamedTuple):
    """A span; times are in nanoseconds since the epoch."""

    process: str
    name: str
    trace: int
    id: int
    parent: int
    began: int
    ended: int


def make_tracer(process: str) -> tuple[TracerProvider, InMemorySpanExporter]:
    """Instrument this process. An application would export to a collector, not to memory."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrument(provider)
    return provider, exporter


def rows(process: str, exporter: InMemorySpanExporter) -> list[Row]:
    """Return the spans of this process."""
    return [
        Row(
            process,
            span.name,
            span.context.trace_id,
            span.context.span_id,
            0 if span.parent is None else span.parent.span_id,
            span.start_time or 0,
            span.end_time or 0,
        )
        for span in exporter.get_finished_spans()
        if span.context is not None
    ]


# The engine


async def serve(address: str, provider: TracerProvider, parent: Connection) -> None:
    """Answer requests until the parent sends something."""
    tracer = provider.get_tracer("engine")

    def forward(video: Video) -> Colour:
        with tracer.start_as_current_span("forward"):
            return Colour(video.frames.flatten(0, 2).float().mean(dim=0).tolist())

    async def answer(video: Video) -> Colour:
        return await asyncio.to_thread(forward, video)

    async with MessageServer(address, Video) as server:
        serving = asyncio.create_task(server.serve(answer, max_concurrent=1))
        await asyncio.to_thread(parent.recv)
        serving.cancel()
        await asyncio.wait([serving])


def run_engine(address: str, parent: Connection) -> None:
    """Answer requests, and send the spans to the parent at the end."""
    provider, exporter = make_tracer("engine")
    asyncio.run(serve(address, provider, parent))
    parent.send(rows("engine", exporter))


# The API server


def make_app(address: str, provider: TracerProvider) -> FastAPI:
    """Return the application, which sends each upload to the engine."""

    def make_client() -> MessageClient[Colour]:
        return MessageClient(address, Colour, max_concurrent_videos=1, arena_bytes=VIDEO_BYTES)

    engine = MessageLifespan(make_client)
    app = FastAPI(lifespan=engine.lifespan)
    engine.install(app)
    tracer = provider.get_tracer("server")

    def decode(upload: bytes) -> torch.Tensor:
        with tracer.start_as_current_span("decode"):
            return torch.full(SHAPE, upload[0], dtype=torch.uint8)  # in place of a video decoder

    @app.post("/videos")
    async def post_video(request: Request) -> list[float]:
        """Answer with the mean colour of a video."""
        client = await engine.client(request)
        frames = await asyncio.to_thread(decode, await request.body())
        return (await client.request(Video(frames))).mean

    FastAPIInstrumentor.instrument_app(app, tracer_provider=provider, exclude_spans=["receive", "send"])
    return app


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[str]:
    """Serve an application at a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        task = asyncio.create_task(server.serve([sock]))
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        server.should_exit = True
        await task


async def upload(app: FastAPI) -> None:
    """Upload a video to warm up the memory and the model, and then three videos at once."""
    async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        for count in (1, 3):
            answers = [http.post("/videos", content=bytes([128])) for _ in range(count)]
            for answer in await asyncio.gather(*answers):
                answer.raise_for_status()


def record() -> list[Row]:
    """Run both processes, and return the spans of the upload that ended last, in the order of their times."""
    spawn = multiprocessing.get_context("spawn")
    provider, exporter = make_tracer("API server")
    with tempfile.TemporaryDirectory(prefix="aiotensor-") as folder:
        address = f"unix://{folder}/engine.sock"
        ours, theirs = spawn.Pipe()
        engine = spawn.Process(target=run_engine, args=(address, theirs))
        engine.start()
        theirs.close()  # so that `recv` raises `EOFError` if the engine dies
        try:
            asyncio.run(upload(make_app(address, provider)))
        finally:
            ours.send(None)
        found = [*rows("API server", exporter), *ours.recv()]
        engine.join()
    last = max(found, key=lambda row: row.ended)
    return sorted((row for row in found if row.trace == last.trace), key=lambda row: row.began)


def ordered(found: list[Row], parent: int = 0, depth: int = 0) -> list[tuple[int, Row]]:
    """Return the spans below a parent with their depths, each before its children."""
    listed = []
    for row in found:
        if row.parent == parent:
            listed += [(depth, row), *ordered(found, row.id, depth + 1)]
    return listed


if __name__ == "__main__":
    spans = ordered(record())
    for depth, row in spans:
        since, lasted = (row.began - spans[0][1].began) / 1e6, (row.ended - row.began) / 1e6
        print(f"{since:8.1f} ms {lasted:8.1f} ms  {row.process:10}  {'  ' * depth}{row.name}")
