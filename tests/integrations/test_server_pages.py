"""The programs of the pages about FastAPI, aiohttp and several engines do what the pages say."""

import asyncio
import io
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from fastapi import FastAPI

from aiotensor import TensorReceiver
from aiotensor.channel import MessageServer, Permit
from aiotensor.integrations.fastapi import TensorLifespan
from tests.channel.parties import Place, place

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

DOCS = Path(__file__).parents[2] / "docs"
PROGRAMS: list[str] = [
    program
    for page in ("fastapi.md", "aiohttp.md", "several-engines.md")
    for program in re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.M)
]


def program(here: Place, *words: str) -> str:
    """Return the one program of the pages that has all of these words, with the addresses of a place."""
    [text] = [text for text in PROGRAMS if all(word in text for word in words)]
    for kind, address in (("unix", here.tensors), ("ipc", here.messages)):
        text = re.sub(rf'"{kind}://[^"]+"', repr(address), text)
    return text.replace("engine:///run/user/1000/", here.tensors.replace("unix:", "engine:") + "-")


def run(here: Place, *words: str) -> dict[str, Any]:
    """Run a program of the pages in this process, and return its names."""
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(program(here, *words), "page", "exec"), names)  # noqa: S102 - it is ours
    return names


@asynccontextmanager
async def engine_of(text: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run an engine of the pages in another process, and kill it at the end."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", text, *arguments)
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


def http(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


async def test_the_server_of_the_page_on_fastapi_answers_an_upload() -> None:
    with place() as here:
        app = run(here, "MessageLifespan", "EnginePermit")["app"]
        async with (
            engine_of(program(here, "blocking.TensorReceiver", "unix://")),
            app.router.lifespan_context(app),
            http(app) as client,
            asyncio.timeout(60),
        ):
            while (answer := await client.post("/videos", content=b"aaccee")).status_code == 503:
                pass  # the engine has not started yet
            assert (answer.status_code, answer.json()) == (200, {"brightness": 99.0})


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


async def test_the_server_of_the_page_on_aiohttp_answers_an_upload() -> None:
    with place() as here:
        runner = await run(here, "web.AppKey", "make_client")["make_runner"]()
        async with (
            engine_of(program(here, "blocking.TensorReceiver", "unix://")),
            TestClient(TestServer(runner.app)) as client,
            asyncio.timeout(60),
        ):
            video = b"aaccee" * 500_000  # more than the default limit of aiohttp
            while (answer := await client.post("/videos", data=io.BytesIO(video))).status == 503:
                pass  # the engine has not started yet
            assert answer.status == 200
            assert await answer.json() == {"brightness": pytest.approx(99)}


async def test_the_engines_of_the_page_on_several_engines_answer_its_client() -> None:
    with place() as here:
        names = run(here, "ENGINES", "MessageLifespan")
        engine = program(here, "sys.argv[1]")
        async with (
            engine_of(engine, "0"),
            engine_of(engine, "1"),
            names["make_client"]() as client,
            asyncio.timeout(60),
        ):
            while client.statistics().servers < 2:
                await asyncio.sleep(0.02)
            for target in range(2):
                answer = await client.request({"frames": torch.ones(10)}, target=target)
                assert answer == {"brightness": 1.0}
