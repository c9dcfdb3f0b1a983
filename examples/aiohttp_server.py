"""An aiohttp server: it answers each uploaded video with the mean colours of its frames.

python examples/engine.py &
python examples/aiohttp_server.py
curl --data-binary @video.mp4 http://127.0.0.1:8080/videos

It needs `pip install 'aiotensor[aiohttp,prometheus]' av`. An optional argument is the port.
"""

import asyncio
import sys

import prometheus_client
from aiohttp import web

from addresses import ENGINE, keys_of
from aiotensor import MessageClient
from aiotensor.integrations.aiohttp import client_context, problem_middleware
from aiotensor.integrations.prometheus import AioTensorCollector
from messages import Summary
from two_hosts.keys import ApiKeys
from uploads import Upload
from videos import Admission, UnreadableVideoError, colours

# A longer wait is answered with 503.
VIDEOS_AT_ONCE = 4
ARENA_BYTES = 512 << 20
MAX_WAIT_S = 5

ADMISSION = web.AppKey("admission", Admission)
CLIENT = web.AppKey("client", MessageClient[Summary])

routes = web.RouteTableDef()
prometheus_client.REGISTRY.register(AioTensorCollector())


@routes.post("/videos")
async def post_video(request: web.Request) -> web.Response:
    """Answer with the mean colour of each frame, as red, green and blue from 0 to 255."""
    app = request.app
    upload = Upload(request.content.iter_any(), request.content_length)
    try:
        async with app[ADMISSION]:
            found = await colours(upload, app[CLIENT])
    except UnreadableVideoError as error:
        raise web.HTTPBadRequest(text=str(error)) from error
    return web.json_response(found)


@routes.get("/metrics")
async def get_metrics(request: web.Request) -> web.Response:
    """Answer with the metrics of this server for Prometheus."""
    page = await asyncio.to_thread(prometheus_client.generate_latest)
    return web.Response(body=page, headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})


def make_app() -> web.Application:
    """Make the application."""

    def make_client() -> MessageClient[Summary]:
        keys = keys_of(ApiKeys)
        return MessageClient(ENGINE, Summary, VIDEOS_AT_ONCE, ARENA_BYTES, max_wait_s=MAX_WAIT_S, **keys)

    app = web.Application(middlewares=[problem_middleware()])
    app[ADMISSION] = Admission(VIDEOS_AT_ONCE, MAX_WAIT_S)
    app.cleanup_ctx.append(client_context(CLIENT, make_client))
    app.add_routes(routes)
    return app


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8080
    # A handler whose client disconnects is cancelled, and releases its memory.
    web.run_app(make_app(), port=port, handler_cancellation=True)
