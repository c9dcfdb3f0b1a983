"""One trace leads from an HTTP request to the engine in another process, and back to its answer."""

import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from unittest import mock

import httpx
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from fastapi import FastAPI, Request
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from opentelemetry.metrics import NoOpMeterProvider

from aiotensor import TensorReceiver, TensorSender
from aiotensor.channel import MessageClient
from aiotensor.integrations import aiohttp, fastapi
from tests.integrations.opentelemetry.engine import Sum, Video, open_engine, serve
from tests.integrations.opentelemetry.spans import (
    Recorder,
    Seen,
    begin_recording,
    one,
    recorded,
    recording,
    tree,
)
from verification.processes.peers import Peer, peers

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

PIXELS = 3 << 20  # too large for a frame, and copied by a worker

# The spans of a request, below the span of the web framework.
REQUEST = {
    "aiotensor request": {
        "aiotensor send tensor": {"aiotensor copy": {}, "aiotensor deliver tensor": {}},
        "aiotensor deliver message": {},
        "aiotensor answer": {
            "forward": {},
            "aiotensor send tensor": {"aiotensor copy": {}, "aiotensor deliver tensor": {}},
        },
    }
}
OF_THE_ENGINE = ["aiotensor deliver tensor", "aiotensor deliver message", "aiotensor answer", "forward"]


@asynccontextmanager
async def engine(folder: Path) -> AsyncIterator[tuple[Peer, TensorReceiver]]:
    """Start an engine in a spawned process, and open the receiver for its answers."""
    async with (
        TensorReceiver(f"unix://{folder}/answers") as receiver,
        peers(f"unix://{folder}/tensors", 1, "spawn") as [peer],
    ):
        await peer.call(begin_recording)
        await peer.call(open_engine, f"ipc://{folder}/messages", f"unix://{folder}/answers")
        await peer.call(serve)
        yield peer, receiver


def client(folder: Path, receiver: TensorReceiver) -> MessageClient[Sum]:
    sender = TensorSender(f"unix://{folder}/tensors", max_concurrent_videos=1)
    return MessageClient(f"ipc://{folder}/messages", sender=sender, receiver=receiver, reply_type=Sum)


async def ask(client: MessageClient[Sum]) -> int:
    await client.ready()
    answer = await client.request(Video(torch.ones(PIXELS, dtype=torch.uint8)))
    assert answer.frames.sum() == 2 * PIXELS
    return answer.total


@contextmanager
def instrumented_aiohttp(recorder: Recorder) -> Iterator[None]:
    """Instrument the applications of aiohttp that are created in the block."""
    with warnings.catch_warnings():
        # The instrumentation derives a class from `web.Application`, which aiohttp advises against.
        warnings.simplefilter("ignore", DeprecationWarning)
        from opentelemetry.instrumentation import aiohttp_server

        # Old versions of the instrumentation ignore the argument `tracer_provider`.
        with mock.patch.object(aiohttp_server, "tracer", recorder.provider.get_tracer("aiohttp")):
            instrumentor = aiohttp_server.AioHttpServerInstrumentor()
            instrumentor.instrument(tracer_provider=recorder.provider)
            try:
                yield
            finally:
                instrumentor.uninstrument()


def check(here: list[Seen], there: list[Seen]) -> None:
    """Check that both processes recorded the spans of one trace, with each parent and in order."""
    spans = [*here, *there]
    assert len({span.trace for span in spans}) == 1
    found = tree(spans)
    [route] = found
    assert route.endswith("/videos")
    inside = {name: below for name, below in found[route].items() if name.startswith("aiotensor")}
    assert inside == REQUEST
    assert sorted(span.name for span in there if span.kind == "INTERNAL") == ["aiotensor copy", "forward"]
    assert {span.name for span in there} >= set(OF_THE_ENGINE)
    assert one(here, "aiotensor request").kind == "CLIENT"
    assert one(there, "aiotensor answer").kind == "SERVER"
    for span in spans:
        assert span.status == "UNSET"
        assert span.began <= span.ended
    asked, answered = one(here, "aiotensor request"), one(there, "aiotensor answer")
    assert asked.began < answered.began < asked.ended
    sent, taken = one(here, "aiotensor send tensor"), one(there, "aiotensor deliver tensor")
    assert sent.attributes["messaging.message.id"] == taken.attributes["messaging.message.id"]
    assert sent.attributes["messaging.message.body.size"] == PIXELS
    assert taken.attributes["messaging.message.body.size"] == PIXELS


async def test_one_trace_leads_from_an_upload_to_fastapi_to_the_answer_of_the_engine(folder: Path) -> None:
    with recording() as recorder:
        async with engine(folder) as (peer, receiver):
            lifespan = fastapi.MessageLifespan(lambda: client(folder, receiver))
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


async def test_one_trace_leads_from_an_upload_to_aiohttp_to_the_answer_of_the_engine(folder: Path) -> None:
    key = web.AppKey("client", MessageClient[Sum])

    async def post_video(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response(await ask(request.app[key]))

    with recording() as recorder, instrumented_aiohttp(recorder):
        async with engine(folder) as (peer, receiver):
            app = web.Application()
            app.cleanup_ctx.append(aiohttp.client_context(key, lambda: client(folder, receiver)))
            app.add_routes([web.post("/videos", post_video)])
            async with TestClient(TestServer(app)) as http, http.post("/videos", data=b"a video") as answer:
                assert await answer.json() == PIXELS
            there = await peer.call(recorded)
    check(recorder.seen, there)
