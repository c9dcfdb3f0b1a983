"""One trace leads from an HTTP request to the engine in another process, and back to its answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
import torch
from fastapi import FastAPI, Request
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from opentelemetry.metrics import NoOpMeterProvider

from aiotensor import TensorReceiver, TensorSender
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
from verification.processes.peers import Peer, State, peers

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


class Video(msgspec.Struct):
    """A request."""

    frames: torch.Tensor


class Sum(msgspec.Struct):
    """The answer, with a tensor of the same size."""

    total: int
    frames: torch.Tensor


async def open_engine(state: State, messages: str, answers: str) -> None:
    """Open an engine that begins to answer, with a sender to the receiver of its client."""
    enter = state.stack.enter_async_context
    receiver = await enter(TensorReceiver(state.endpoint))
    sender = await enter(TensorSender(answers, max_concurrent_videos=1))
    server = await enter(MessageServer(messages, Video, receiver=receiver, sender=sender))
    await sender.ready()

    async def model(video: Video) -> Sum:
        with state.others["recorder"].tracer.start_as_current_span("forward"):
            await asyncio.sleep(0)
            return Sum(int(video.frames.sum()), video.frames + 1)

    state.others["serving"] = asyncio.create_task(server.serve(model))


@asynccontextmanager
async def engine(folder: Path) -> AsyncIterator[tuple[Peer, TensorReceiver]]:
    """Start an engine in a spawned process, and open the receiver for its answers."""
    async with (
        TensorReceiver(f"unix://{folder}/answers") as receiver,
        peers(f"unix://{folder}/tensors", 1, "spawn") as [peer],
    ):
        await peer.call(begin_recording)
        await peer.call(open_engine, f"ipc://{folder}/messages", f"unix://{folder}/answers")
        yield peer, receiver


def client(folder: Path, receiver: TensorReceiver) -> MessageClient[Sum]:
    sender = TensorSender(f"unix://{folder}/tensors", max_concurrent_videos=1)
    return MessageClient(f"ipc://{folder}/messages", sender=sender, receiver=receiver, reply_type=Sum)


async def ask(client: MessageClient[Sum]) -> int:
    await client.ready()
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
