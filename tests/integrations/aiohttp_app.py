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
    await request.app[CLIENT].send(totals.numbers(await request.read()))
    return web.Response()


@routes.get("/held")
async def get_held(request: web.Request) -> web.Response:
    """Return the resources of this worker."""
    return web.Response(body=totals.held(request.app[CLIENT]), content_type="application/json")


def make_app() -> web.Application:
    """Make the application."""
    app = web.Application(middlewares=[problem_middleware(retry_after_s=2.0)], client_max_size=1 << 30)
    app.cleanup_ctx.append(client_context(CLIENT, totals.client))
    app.add_routes(routes)
    return app


async def make_runner() -> web.AppRunner:
    """Return the runner of a worker of gunicorn."""
    return web.AppRunner(make_app(), handler_cancellation=True)


if __name__ == "__main__":
    listener = socket.socket(fileno=int(sys.argv[1]))
    web.run_app(make_app(), sock=listener, print=lambda *_: None, handler_cancellation=True)
