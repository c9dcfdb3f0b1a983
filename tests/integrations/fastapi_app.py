"""A FastAPI server for the tests: its engine adds up the bytes of uploads."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, TypeAlias

import msgspec
from fastapi import Depends, FastAPI, Request, Response

from aiotensor.channel import MessageClient, Permit
from aiotensor.integrations.fastapi import MessageLifespan
from tests.integrations import totals

engine = MessageLifespan(
    totals.client,
    drain_s=totals.DRAIN_S,
    retry_after_s=2.0,
    upload_grace_s=totals.UPLOAD_GRACE_S,
)

Client: TypeAlias = Annotated[MessageClient[totals.Total], Depends(engine.client)]
Begun: TypeAlias = Annotated[Permit, Depends(engine.permit, scope="function")]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Surround the lifespan of the engine with one of the application."""
    async with engine.lifespan(app):
        app.state.is_open = True
        yield
        app.state.is_open = False


app = FastAPI(lifespan=lifespan)
engine.install(app)


@app.post("/totals")
async def post_totals(request: Request, client: Client, permit: Begun) -> Response:
    """Add up the bytes of an upload, with a permit from before the upload is read."""
    message = totals.numbers(await request.body())
    total = await client.request(message, inside=permit)
    return Response(msgspec.json.encode(total), media_type="application/json")


@app.post("/left")
async def post_left(request: Request, client: Client) -> Response:
    """Send an upload to the engine without a request."""
    [sender] = client.senders
    handle = await sender.send(totals.numbers(await request.body()).values)
    return Response(msgspec.json.encode(handle), media_type="application/json")


@app.get("/held")
async def get_held(client: Client) -> Response:
    """Return the resources of this worker."""
    return Response(msgspec.json.encode(totals.held(client)), media_type="application/json")
