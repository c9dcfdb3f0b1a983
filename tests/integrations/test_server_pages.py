"""The programs of the pages about FastAPI and aiohttp do what the pages say."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from aiohttp.web import Request, Response
from fastapi import FastAPI

from aiotensor import TensorReceiver
from aiotensor.channel import MessageServer, Permit
from aiotensor.integrations.fastapi import TensorLifespan
from tests.channel.parties import Place, place

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

DOCS = Path(__file__).parents[2] / "docs"
PROGRAMS: list[str] = [
    program
    for page in ("fastapi.md", "aiohttp.md")
    for program in re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.M)
]


def run(here: Place, *words: str) -> dict[str, Any]:
    """Run the one program of the pages that has all of these words, at a place, and return its names."""
    [text] = [text for text in PROGRAMS if all(word in text for word in words)]
    for kind, address in (("unix", here.tensors), ("ipc", here.messages)):
        text = re.sub(rf'"{kind}://[^"]+"', repr(address), text)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(text, "page", "exec"), names)  # noqa: S102 - it is ours
    return names


def http(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


async def test_a_message_lost_when_its_handler_returned_is_answered_with_503() -> None:
    with place() as here:
        names = run(here, "MessageLifespan", "EnginePermit")
        app, engine = names["app"], names["engine"]

        async def handler(permit: Permit) -> None:
            await permit.allocate((3,), torch.uint8)
            [sender] = engine.opened_client.senders
            assert sender.discard_all() == 1

        handler.__annotations__["permit"] = names["EnginePermit"]
        app.add_api_route("/", handler)
        async with (
            TensorReceiver(here.tensors) as receiver,
            MessageServer(here.messages, dict, receiver=receiver),
            app.router.lifespan_context(app),
            http(app) as client,
        ):
            answer = await client.get("/")
            assert (answer.status_code, answer.json()["reason"]) == (503, "engine_lost")


async def test_the_documented_lifespan_encloses_that_of_the_sender() -> None:
    with place() as here:
        names = run(here, "TensorLifespan", "asynccontextmanager")
        app: FastAPI = names["app"]
        engine: TensorLifespan = names["engine"]
        async with app.router.lifespan_context(app):
            assert app.state.sender is engine.opened_sender


async def test_the_program_for_aiohttp_has_a_sender_and_a_client() -> None:
    with place() as here:
        names = run(here, "web.AppKey", "make_client")
        runner = await names["make_runner"]()

        async def handler(request: Request) -> Response:
            client = request.app[names["CLIENT"]]
            return Response(text=f"{client.senders[0].id} {client.statistics().servers}")

        runner.app.router.add_get("/", handler)
        async with TestClient(TestServer(runner.app)) as client:
            answer = await (await client.get("/")).text()
            assert answer == f"{runner.app[names['CLIENT']].senders[0].id} 0"
