"""The services of the compose file for two hosts serve uploads after either side has restarted."""

import asyncio
import os
import socket
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest

from aiotensor.cli.options import write_keys
from tests.deployment.composition import image_user, services_of
from tests.deployment.containers import container
from tests.examples.films import film, is_right
from verification.networks import Hosts
from verification.processes.peers import State, peers

pytestmark = [
    pytest.mark.extended,
    pytest.mark.asyncio(loop_factories=["asyncio"]),  # of the test; the programs have their own
    pytest.mark.timeout(300),
]


async def _succeed(state: State, url: str, path: str) -> None:
    """Upload a file until the server is ready and answers it with other than the documented 503."""
    body, status = Path(path).read_bytes(), 0  # noqa: ASYNC240 - small
    while status != 200:
        with suppress(httpx.TransportError):  # no server runs
            async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
                if (await http.get(f"{url}/ready")).status_code == 200:
                    answer = await http.post(f"{url}/videos", content=body)
                    status = answer.status_code
                    assert status == 503 or is_right(Path(path), answer.json()), answer.text
        await asyncio.sleep(0.05)


async def test_uploads_are_served_after_either_side_has_restarted(hosts: Hosts, folder: Path) -> None:
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
        succeed = partial(client.call, _succeed, url, str(folder / "film.mkv"))
        await succeed()

        await engine.close()
        engine = await stack.enter_async_context(container(engine_spec))
        await succeed()
        assert await engine.stop(services["engine"].grace_s) == 0, engine.printed
        await stack.enter_async_context(container(engine_spec))
        await succeed()

        assert await api.stop(services["api"].grace_s) == 0, api.printed
        assert "Traceback" not in api.printed
        await stack.enter_async_context(container(api_spec))
        await succeed()
