"""The services of the compose file for two hosts serve uploads while either side restarts."""

import asyncio
import os
import socket
from collections import Counter
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from aiotensor.cli.options import write_keys
from tests.deployment.composition import image_user, services_of
from tests.deployment.containers import container
from tests.examples.films import film, is_right
from verification.networks import Hosts
from verification.processes.peers import State, peers

AT_ONCE = 3
REASONS = {"engine_lost", "engine_unavailable", "busy"}  # of documented 503s

pytestmark = [
    pytest.mark.extended,
    pytest.mark.asyncio(loop_factories=["asyncio"]),  # of the test; the programs have their own
    pytest.mark.timeout(300),
]


@dataclass(frozen=True)
class Answer:
    """The answer to an upload."""

    status: int
    is_right: bool = False
    reason: str = ""
    retry_after: str = ""


async def _upload_forever(state: State, url: str, path: str) -> None:
    """Upload a file again and again, each time over a new connection, as through a simple proxy."""
    body = Path(path).read_bytes()  # noqa: ASYNC240 - small
    state.others |= {"answers": [], "unanswered": []}

    async def upload() -> None:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            try:
                answer = await http.post(url, content=body, headers={"Connection": "close"})
            except httpx.TransportError as error:
                state.others["unanswered"].append(repr(error))
                await asyncio.sleep(0.05)
                return
        if answer.status_code == 200:
            found = Answer(200, is_right(Path(path), answer.json()))
        else:
            header = answer.headers.get("retry-after", "")
            found = Answer(answer.status_code, reason=answer.json()["reason"], retry_after=header)
        state.others["answers"].append(found)

    async def repeat() -> None:
        while True:
            await upload()

    await asyncio.gather(*(repeat() for _ in range(AT_ONCE)))


async def _list(state: State, name: str) -> list[Any]:
    return list(state.others[name])


async def _ready(state: State, url: str) -> None:
    """Wait until the server is ready."""
    status = 0
    while status != 200:
        with suppress(httpx.TransportError):
            async with httpx.AsyncClient(timeout=20, trust_env=False) as http:
                status = (await http.get(url)).status_code
        await asyncio.sleep(0.05)


async def _succeed(state: State) -> None:
    """Wait until uploads have succeeded that begin after this call."""
    answers, before = state.others["answers"], len(state.others["answers"])
    while sum(answer.status == 200 for answer in answers[before:]) < 3 * AT_ONCE:  # some have begun before
        await asyncio.sleep(0.05)


async def test_uploads_are_served_while_either_side_restarts(hosts: Hosts, folder: Path) -> None:
    services = services_of("compose.two-hosts.yaml")
    secrets = folder / "keys"
    write_keys(secrets, ["api"])
    for file in secrets.iterdir():
        os.chown(file, image_user(), image_user())
    film(folder / "film.mkv", 40, height=180, width=320)
    # Like a container runtime: the names of the other services, and the name of the host itself.
    hosts.a.know({"engine": hosts.b.address, socket.gethostname(): hosts.a.address})
    hosts.b.know({"api": hosts.a.address, socket.gethostname(): hosts.b.address})
    engine_spec = services["engine"].spec(folder, hosts.b, secrets)
    api_spec = services["api"].spec(folder, hosts.a, secrets)
    [published] = services["api"].definition["ports"]
    url = f"http://{published.rpartition(':')[0]}"

    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(container(api_spec))
        engine = await stack.enter_async_context(container(engine_spec))
        await engine.says("the engine is ready")
        [client] = await stack.enter_async_context(peers("", 1, first=hosts.a.enter))
        await client.call(_ready, f"{url}/ready")
        uploading = client.start(_upload_forever, f"{url}/videos", str(folder / "film.mkv"))
        await client.call(_succeed)

        for _ in range(2):
            await engine.close()
            engine = await stack.enter_async_context(container(engine_spec))
            await client.call(_succeed)
        assert await engine.stop(services["engine"].grace_s) == 0, engine.printed
        engine = await stack.enter_async_context(container(engine_spec))
        await client.call(_succeed)
        assert not await client.call(_list, "unanswered")

        assert await api.stop(services["api"].grace_s) == 0, api.printed
        assert "Traceback" not in api.printed
        before = Counter(answer.status for answer in await client.call(_list, "answers"))
        api = await stack.enter_async_context(container(api_spec))
        await client.call(_ready, f"{url}/ready")
        unanswered = await client.call(_list, "unanswered")
        await client.call(_succeed)
        assert await client.call(_list, "unanswered") == unanswered  # only while no server ran

        answers = await client.call(_list, "answers")
        assert not uploading.done()
    print(Counter((answer.status, answer.reason) for answer in answers), len(unanswered))
    for answer in answers:
        if answer.status == 200:
            assert answer.is_right
        else:
            assert (answer.status, answer.reason in REASONS) == (503, True), answer
            assert int(answer.retry_after) > 0
    assert before[200] >= 4 * AT_ONCE
