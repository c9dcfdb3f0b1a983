"""The same server in aiohttp, as a program that gets the number of a listening socket, or in gunicorn."""

import socket
import sys

import msgspec
from aiohttp import web

from aiotensor.channel import MessageClient
from aiotensor.integrations.aiohttp import client_context, problem_middleware
from tests.integrations import totals

CLIENT = web.AppKey("client", MessageClient[totals.Total])


routes = web.RouteTableDef()


@routes.post("/totals")
async def post_totals(request: web.Request) -> web.Response:
    """Add up the bytes of an upload, with a permit from before the upload is read."""
    async with request.app[CLIENT].permit() as permit:
        message = totals.numbers(await request.read())
        total = await request.app[CLIENT].request(message, inside=permit)
    return web.Response(body=msgspec.json.encode(total), content_type="application/json")


@routes.post("/left")
async def post_left(request: web.Request) -> web.Response:
    """Send an upload to the engine without a request."""
    [sender] = request.app[CLIENT].senders
    handle = await sender.send(totals.numbers(await request.read()).values)
    return web.Response(body=msgspec.json.encode(handle), content_type="application/json")


@routes.get("/held")
async def get_held(request: web.Request) -> web.Response:
    """Return the resources of this worker."""
    held = totals.held(request.app[CLIENT])
    return web.Response(body=msgspec.json.encode(held), content_type="application/json")


def make_app() -> web.Application:
    """Make the application."""
    middleware = problem_middleware(retry_after_s=2.0, upload_grace_s=totals.UPLOAD_GRACE_S)
    app = web.Application(middlewares=[middleware], client_max_size=1 << 30)
    app.cleanup_ctx.append(client_context(CLIENT, totals.client, drain_s=totals.DRAIN_S))
    app.add_routes(routes)
    return app


async def make_runner() -> web.AppRunner:
    """Return the runner of a worker of gunicorn."""
    return web.AppRunner(make_app(), handler_cancellation=True, lingering_time=totals.UPLOAD_GRACE_S)


if __name__ == "__main__":
    listener = socket.socket(fileno=int(sys.argv[1]))
    web.run_app(
        make_app(),
        sock=listener,
        print=lambda *_: None,
        handler_cancellation=True,
        lingering_time=totals.UPLOAD_GRACE_S,  # how long a stalled client may keep its connection
    )
