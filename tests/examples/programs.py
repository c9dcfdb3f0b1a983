"""Run the examples as their first comments show, and send them uploads."""

import ast
import asyncio
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from aiotensor.inspection import inspect
from aiotensor.types import ServerStatistics
from verification.places import free_port

ROOT = Path(__file__).parents[2]
PORTS = {"fastapi_server": 8000, "aiohttp_server": 8080}


def shown(example: str) -> list[list[str]]:
    """Return the commands that an example's first comment shows."""
    text = ast.get_docstring(ast.parse((ROOT / "examples" / f"{example}.py").read_text())) or ""
    return [
        shlex.split(line.removesuffix("&"))
        for line in text.splitlines()
        if line.startswith(("python ", "uvicorn ", "curl "))
    ]


@dataclass
class Program:
    """A running example."""

    process: asyncio.subprocess.Process

    async def says(self, text: str) -> None:
        """Wait until it has printed a line."""
        assert self.process.stdout is not None
        while text not in (line := (await self.process.stdout.readline()).decode()):
            assert line, f"it ended without saying {text!r}"

    async def end(self, number: signal.Signals) -> tuple[int, str]:
        """End it with a signal, and return its exit status and its standard error."""
        self.process.send_signal(number)
        _, errors = await self.process.communicate()
        return self.process.returncode or 0, errors.decode()


@asynccontextmanager
async def running(command: list[str], folder: Path, **environment: str) -> AsyncIterator[Program]:
    """Run a command with its sockets and temporary files in a folder."""
    name, *arguments = command
    program = [sys.executable] if name == "python" else [sys.executable, "-m", name]
    process = await asyncio.create_subprocess_exec(
        *program,
        *arguments,
        cwd=ROOT,
        env={
            **os.environ,
            "XDG_RUNTIME_DIR": str(folder),
            "TMPDIR": str(folder),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
            "PYTHONUNBUFFERED": "1",
            **environment,
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield Program(process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@asynccontextmanager
async def engine(folder: Path, example: str = "engine") -> AsyncIterator[Program]:
    """Run an engine, and wait until it is ready."""
    [command] = shown(example)
    async with running(command, folder) as program:
        await program.says("the engine is ready")
        yield program


@dataclass
class Site:
    """A running server, and its engine."""

    example: str
    folder: Path  # of their sockets and temporary files
    engine: Program
    server: Program
    http: httpx.AsyncClient
    path: str  # of videos
    writers: list[asyncio.StreamWriter] = field(default_factory=list)  # of raw connections

    @property
    def pid(self) -> int:
        """The process of the server, or the parent of its workers."""
        return self.server.process.pid

    async def begin(self, *headers: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send the headers of an upload."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.http.base_url.port)
        self.writers.append(writer)
        writer.write("\r\n".join([f"POST {self.path} HTTP/1.1", "Host: here", *headers, "", ""]).encode())
        await writer.drain()
        return reader, writer

    def abort(self) -> None:
        """Reset the connections of `begin`."""
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()


@asynccontextmanager
async def serving(
    example: str, folder: Path, *, is_one_process: bool = False, **environment: str
) -> AsyncIterator[Site]:
    """Start the engine and a server as shown, but at a free port, and wait until both are ready."""
    first, command, upload = shown(example)
    assert [first] == shown("engine")
    port = free_port()
    command += ["--port", str(port)] if command[0] == "uvicorn" else [str(port)]
    if is_one_process and command[0] == "uvicorn":
        command += ["--workers", "1"]
    url = httpx.URL(upload[-1])
    assert url.port == PORTS[example]
    async with (
        running(first, folder) as owner,
        running(command, folder, **environment) as program,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            transport=httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None), retries=100),
            timeout=60,
            trust_env=False,
        ) as http,
    ):
        await owner.says("the engine is ready")
        await http.get("/metrics")  # retries until the server listens
        site = Site(example, folder, owner, program, http, url.path)
        try:
            yield site
        finally:
            site.abort()


async def taken(folder: Path) -> int:
    """Return the number of requests that the engine has taken."""
    found = await inspect(f"unix://{folder}/example-engine.sock", patience_s=5)
    assert isinstance(found.statistics, ServerStatistics)
    return found.statistics.messages_taken
