"""A FastAPI server for the tests: its engine adds up the bytes of uploads."""

from typing import Annotated, TypeAlias

import msgspec
from fastapi import Depends, FastAPI, Request, Response

from aiotensor.channel import MessageClient, Permit
from aiotensor.integrations.fastapi import MessageLifespan
from tests.integrations import totals

engine = MessageLifespan(totals.client, retry_after_s=2.0)

Client: TypeAlias = Annotated[MessageClient[totals.Total], Depends(engine.client)]
Begun: TypeAlias = Annotated[Permit, Depends(engine.permit, scope="function")]


app = FastAPI(lifespan=engine.lifespan)
engine.install(app)


@app.post("/totals")
async def post_totals(request: Request, client: Client, permit: Begun) -> Response:
    """Add up the bytes of an upload, with a permit from before the upload is read."""
    message = totals.numbers(await request.body())
    total = await client.request(message, inside=permit)
    return Response(msgspec.json.encode(total), media_type="application/json")


@app.post("/left")
async def post_left(request: Request, client: Client) -> None:
    """Send an upload to the engine without a request."""
    await client.send(totals.numbers(await request.body()))


@app.get("/held")
async def get_held(client: Client) -> Response:
    """Return the resources of this worker."""
    return Response(totals.held(client), media_type="application/json")
