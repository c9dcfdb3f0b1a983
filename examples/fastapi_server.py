"""A FastAPI server: it answers each uploaded video with the mean colours of its frames.

python examples/engine.py &
uvicorn fastapi_server:app --app-dir examples --workers 2 --timeout-graceful-shutdown 30
curl --data-binary @video.mp4 http://127.0.0.1:8000/videos

It needs `pip install 'aiotensor[fastapi,prometheus]' av uvicorn`.
"""

import asyncio
import logging
from typing import Annotated, TypeAlias

import prometheus_client
from fastapi import Depends, FastAPI, HTTPException, Request, Response

from addresses import ENGINE, keys_of
from aiotensor import MessageClient
from aiotensor.integrations.fastapi import MessageLifespan
from aiotensor.integrations.prometheus import AioTensorCollector
from messages import Summary
from two_hosts.keys import ApiKeys
from uploads import Upload
from videos import Admission, UnreadableVideoError, colours

# Limits of each worker. A longer wait is answered with 503.
VIDEOS_AT_ONCE = 4
ARENA_BYTES = 512 << 20
MAX_WAIT_S = 5

logging.basicConfig(level=logging.INFO)  # uvicorn logs only the requests
admission = Admission(VIDEOS_AT_ONCE, MAX_WAIT_S)


def make_client() -> MessageClient[Summary]:
    """Create the client of a worker."""
    keys = keys_of(ApiKeys)
    return MessageClient(ENGINE, Summary, VIDEOS_AT_ONCE, ARENA_BYTES, max_wait_s=MAX_WAIT_S, **keys)


engine = MessageLifespan(make_client)
app = FastAPI(lifespan=engine.lifespan)
engine.install(app)
prometheus_client.REGISTRY.register(AioTensorCollector())

Client: TypeAlias = Annotated[MessageClient[Summary], Depends(engine.client)]


@app.post("/videos")
async def post_video(request: Request, client: Client) -> list[list[float]]:
    """Answer with the mean colour of each frame, as red, green and blue from 0 to 255."""
    length = request.headers.get("content-length")
    upload = Upload(request.stream(), int(length) if length else None)
    try:
        async with admission:
            return await colours(upload, client)
    except UnreadableVideoError as error:
        raise HTTPException(400, str(error)) from error


@app.get("/live")
async def get_live() -> None:
    """Answer whether this worker runs: a restart of the server would not help a missing engine."""


@app.get("/ready")
async def get_ready() -> None:
    """Answer with 503 unless an engine is connected and a video could be sent to it within `MAX_WAIT_S`."""
    await engine.opened_client.ready(nbytes=0)


@app.get("/metrics")
async def get_metrics() -> Response:
    """Answer with the metrics of this worker for Prometheus; each scrape reaches one of the workers."""
    page = await asyncio.to_thread(prometheus_client.generate_latest)
    return Response(page, media_type=prometheus_client.CONTENT_TYPE_LATEST)
