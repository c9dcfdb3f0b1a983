"""Real HTTP servers in separate processes, their engine, and requests to them."""

import asyncio
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import httpx
import msgspec

from tests.integrations import engine
from tests.integrations.totals import Held, Total, total_of
from verification.processes.peers import Peer, peers

ROOT = Path(__file__).parents[2]

Command: TypeAlias = Callable[[int, int], list[str]]


def _uvicorn(descriptor: int, workers: int) -> list[str]:
    return [
        *("uvicorn", "tests.integrations.fastapi_app:app", f"--fd={descriptor}", f"--workers={workers}"),
        *("--log-level=warning", "--timeout-worker-healthcheck=120"),
    ]


def _gunicorn(app: str, worker: str, descriptor: int, workers: int) -> list[str]:
    return [
        *("gunicorn", app, f"--worker-class={worker}", f"--workers={workers}", f"--bind=fd://{descriptor}"),
        *("--log-level=warning", "--timeout=120", "--no-control-socket"),
    ]


SERVERS: Mapping[str, Command] = {
    "uvicorn": _uvicorn,
    "gunicorn-uvicorn": lambda descriptor, workers: _gunicorn(
        "tests.integrations.fastapi_app:app", "uvicorn_worker.UvicornWorker", descriptor, workers
    ),
    "aiohttp": lambda descriptor, workers: ["tests.integrations.aiohttp_app", str(descriptor)],
    "gunicorn-aiohttp": lambda descriptor, workers: _gunicorn(
        "tests.integrations.aiohttp_app:make_runner", "aiohttp.GunicornWebWorker", descriptor, workers
    ),
}


@dataclass
class Site:
    """A server that runs."""

    process: asyncio.subprocess.Process  # or the parent of its workers
    port: int
    errors: Path  # what it wrote to standard error

    def said(self) -> str:
        """Return its standard error."""
        return self.errors.read_text()

    async def stop(self) -> tuple[int, str]:
        """Stop the server with SIGTERM, and return its exit status and its standard error."""
        self.process.send_signal(signal.SIGTERM)
        return await self.process.wait(), self.said()


@asynccontextmanager
async def site(kind: str, workers: int, settings: Mapping[str, str]) -> AsyncIterator[Site]:
    """Start a server with settings in its environment, and end it with the block."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **settings}
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0), backlog=256) as here:
        errors = Path(folder, "errors")
        # Connections wait in the backlog until a worker accepts them.
        command = SERVERS[kind](here.fileno(), workers)
        file = os.open(errors, os.O_WRONLY | os.O_CREAT)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", *command),
                cwd=ROOT,
                env=environment,
                stderr=file,
                pass_fds=[here.fileno()],
                start_new_session=True,  # its workers can be ended with it
            )
        finally:
            os.close(file)
        try:
            running = Site(process, here.getsockname()[1], errors)
            yield running
        finally:
            sys.stderr.write(running.said())  # shown if the test fails
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def http_client(site: Site) -> httpx.AsyncClient:
    """Return a client with a connection for each request, so that the requests reach all workers."""
    return httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{site.port}",
        timeout=60,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=False,
    )


async def workers_of(http: httpx.AsyncClient, count: int) -> dict[int, Held]:
    """Send requests until this number of workers has reported its resources."""
    found: dict[int, Held] = {}
    while len(found) < count:
        answers = await asyncio.gather(*[http.get("/held") for _ in range(4 * count)])
        for answer in answers:
            held = msgspec.json.decode(answer.content, type=Held)
            found[held.pid] = held
    return found


MiB = 1 << 20
UPLOAD = bytes(range(256)) * 256  # its tensor has a MiB
RETRY_AFTER = "2"


@dataclass
class Scene:
    """A server and its engines, of which the first is open."""

    site: Site
    http: httpx.AsyncClient
    engines: list[Peer]
    workers: int


@asynccontextmanager
async def scene(
    kind: str,
    folder: Path,
    *,
    engines: int = 1,
    workers: int = 2,
    arena_bytes: int = 64 * MiB,
    max_wait_s: float = 20,
) -> AsyncIterator[Scene]:
    address = f"unix://{folder}/engine.sock"
    settings = {
        "TOTALS_ADDRESS": address,
        "TOTALS_ARENA_BYTES": str(arena_bytes),
        "TOTALS_MAX_WAIT_S": str(max_wait_s),
    }
    async with (
        peers(address, engines) as ready,
        site(kind, workers, settings) as server,
        http_client(server) as http,
    ):
        await ready[0].call(engine.open_engine)
        on = Scene(server, http, ready, 1 if kind == "aiohttp" else workers)
        await workers_of(http, on.workers)  # a worker that is still starting ends without closing its client
        yield on


def is_answered(response: httpx.Response) -> bool:
    """Return whether an upload was answered with its total; otherwise check its refusal."""
    if response.status_code == 200:
        assert msgspec.json.decode(response.content, type=Total).total == total_of(UPLOAD)
        return True
    assert response.status_code == 503, response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["retry-after"] == RETRY_AFTER
    problem = response.json()
    assert (problem["status"], problem["title"]) == (503, "Service Unavailable")
    assert problem["reason"] in {"busy", "engine_lost", "engine_unavailable"}
    return False
