"""A FastAPI server: it answers each uploaded video with the mean colours of its frames.

python examples/engine.py &
uvicorn fastapi_server:app --app-dir examples --workers 2
curl --data-binary @video.mp4 http://127.0.0.1:8000/videos

It needs `pip install 'aiotensor[fastapi,prometheus]' av uvicorn`.
"""

from typing import Annotated, TypeAlias

import anyio
import anyio.to_thread
import prometheus_client
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from messages import MESSAGES, TENSORS, Summary
from videos import UnreadableVideoError, Upload, colours

from aiotensor import TensorSender
from aiotensor.channel import MessageClient
from aiotensor.integrations.fastapi import MessageLifespan
from aiotensor.integrations.prometheus import AioTensorCollector

engine = MessageLifespan(
    # Each worker may have 4 batches of frames on their way, in 512 MiB; who waits longer than 5 s gets a 503.
    lambda: TensorSender(TENSORS, max_concurrent_videos=4, arena_bytes=512 << 20, max_wait_s=5),
    lambda sender: MessageClient(MESSAGES, sender=sender, reply_type=Summary, max_wait_s=5),
)
app = FastAPI(lifespan=engine.lifespan)
engine.install(app)
prometheus_client.REGISTRY.register(AioTensorCollector())
scrapes = anyio.CapacityLimiter(1)  # metrics are wanted most when all threads of the application are busy

Sender: TypeAlias = Annotated[TensorSender, Depends(engine.sender)]
Client: TypeAlias = Annotated[MessageClient[Summary], Depends(engine.client)]


@app.post("/videos")
async def post_video(request: Request, sender: Sender, client: Client) -> list[list[float]]:
    """Answer with the mean colour of each frame, as red, green and blue from 0 to 255."""
    try:
        length = request.headers.get("content-length")
        upload = Upload(request.stream(), int(length) if length else None)
        return await colours(upload, sender, client)
    except UnreadableVideoError as error:
        raise HTTPException(422, str(error)) from error


@app.get("/metrics")
async def get_metrics() -> Response:
    """Say what this worker holds and has done, as Prometheus reads it; of several workers, one answers."""
    page = await anyio.to_thread.run_sync(prometheus_client.generate_latest, limiter=scrapes)
    return Response(page, media_type=prometheus_client.CONTENT_TYPE_LATEST)
