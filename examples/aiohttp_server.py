"""An aiohttp server: it answers each uploaded video with the mean colours of its frames.

python examples/engine.py &
python examples/aiohttp_server.py
curl --data-binary @video.mp4 http://127.0.0.1:8080/videos

It needs `pip install 'aiotensor[aiohttp]' av`. The first argument is the port, if it is to be another.
"""

import sys

from aiohttp import web
from messages import MESSAGES, TENSORS, Summary
from videos import UnreadableVideoError, Upload, colours

from aiotensor import TensorSender
from aiotensor.channel import MessageClient
from aiotensor.integrations.aiohttp import client_context, problem_middleware, sender_context

SENDER = web.AppKey("sender", TensorSender)
CLIENT = web.AppKey("client", MessageClient[Summary])

routes = web.RouteTableDef()


@routes.post("/videos")
async def post_video(request: web.Request) -> web.Response:
    """Answer with the mean colour of each frame, as red, green and blue from 0 to 255."""
    try:
        upload = Upload(request.content.iter_any(), request.content_length)
        found = await colours(upload, request.app[SENDER], request.app[CLIENT])
    except UnreadableVideoError as error:
        raise web.HTTPUnprocessableEntity(text=str(error)) from error
    return web.json_response(found)


def make_app() -> web.Application:
    """Make the application."""
    app = web.Application(middlewares=[problem_middleware()])
    app.cleanup_ctx.append(
        # 4 batches of frames may be on their way, in 512 MiB; who waits longer than 5 s gets a 503.
        sender_context(SENDER, lambda: TensorSender(TENSORS, 4, arena_bytes=512 << 20, max_wait_s=5))
    )
    app.cleanup_ctx.append(
        client_context(
            CLIENT,
            lambda: MessageClient(MESSAGES, sender=app[SENDER], reply_type=Summary, max_wait_s=5),
        )
    )
    app.add_routes(routes)
    return app


if __name__ == "__main__":
    # A handler whose client hangs up is cancelled, and gives back what it holds.
    web.run_app(make_app(), port=int(sys.argv[1]) if len(sys.argv) > 1 else 8080, handler_cancellation=True)
