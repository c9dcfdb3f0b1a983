"""One trace leads from an HTTP request to the engine in another process, and back to its answer."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from fastapi import FastAPI, Request
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from opentelemetry.metrics import NoOpMeterProvider

from aiotensor.channel import MessageClient, MessageServer
from aiotensor.integrations import fastapi
from tests.integrations.opentelemetry.spans import (
    Seen,
    begin_recording,
    one,
    recorded,
    recording,
    tree,
)
from verification.processes.peers import State, peers

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

PIXELS = 3 << 20  # too large for a frame, and copied by a worker

# The spans of a request, below the span of the web framework.
REQUEST: dict[str, Any] = {
    "aiotensor request": {
        "aiotensor copy": {},
        "aiotensor deliver message": {},
        "aiotensor answer": {"forward": {}, "aiotensor copy": {}, "aiotensor deliver answer": {}},
    }
}
OF_THE_ENGINE = {"aiotensor deliver message", "aiotensor answer", "forward", "aiotensor copy"}


class Video(msgspec.Struct):
    """A request."""

    frames: torch.Tensor


class Sum(msgspec.Struct):
    """The answer, with a tensor of the same size."""

    total: int
    frames: torch.Tensor


async def open_engine(state: State) -> None:
    """Open an engine, which begins to answer."""
    server = await state.stack.enter_async_context(MessageServer(state.endpoint, Video))

    async def model(video: Video) -> Sum:
        with state.others["recorder"].tracer.start_as_current_span("forward"):
            await asyncio.sleep(0)
            return Sum(int(video.frames.sum()), video.frames + 1)

    state.others["serving"] = asyncio.create_task(server.serve(model))


async def ask(client: MessageClient[Sum]) -> int:
    answer = await client.request(Video(torch.ones(PIXELS, dtype=torch.uint8)))
    assert answer.frames.sum() == 2 * PIXELS
    return answer.total


def check(here: list[Seen], there: list[Seen]) -> None:
    """Check that both processes recorded the spans of one trace, with each parent and in order."""
    spans = [*here, *there]
    assert len({span.trace for span in spans}) == 1
    found = tree(spans)
    [route] = found
    assert route.endswith("/videos")
    inside = {name: below for name, below in found[route].items() if name.startswith("aiotensor")}
    assert inside == REQUEST
    assert {span.name for span in there} == OF_THE_ENGINE
    assert one(here, "aiotensor request").kind == "CLIENT"
    assert one(there, "aiotensor answer").kind == "SERVER"
    for span in spans:
        assert span.status == "UNSET"
        assert span.began <= span.ended
    asked, answered = one(here, "aiotensor request"), one(there, "aiotensor answer")
    assert asked.began < answered.began < asked.ended


async def test_one_trace_leads_from_an_upload_to_fastapi_to_the_answer_of_the_engine(folder: Path) -> None:
    with recording() as recorder:
        address = f"unix://{folder}/engine.sock"
        async with peers(address, 1, "spawn") as [peer]:
            await peer.call(begin_recording)
            await peer.call(open_engine)
            lifespan: fastapi.MessageLifespan[Sum] = fastapi.MessageLifespan(
                lambda: MessageClient(address, Sum)
            )
            app = FastAPI(lifespan=lifespan.lifespan)
            lifespan.install(app)

            @app.post("/videos")
            async def post_video(request: Request) -> int:
                await request.body()
                return await ask(await lifespan.client(request))

            FastAPIInstrumentor.instrument_app(
                app, tracer_provider=recorder.provider, meter_provider=NoOpMeterProvider()
            )
            async with (
                app.router.lifespan_context(app),
                httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as http,
            ):
                answer = await http.post("/videos", content=b"a video")
                assert answer.json() == PIXELS
            there = await peer.call(recorded)
    check(recorder.seen, there)
