"""Containers without a container runtime: the namespaces, limits and restrictions of Docker's defaults.

`tests.deployment.inside` lists them. They need root, and a test is skipped without it.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path

import msgspec
import pytest

from tests.deployment.inside import Spec

ROOT = Path(__file__).parents[2]

_NAMESPACES = ("--mount", "--pid", "--ipc", "--uts", "--fork", "--mount-proc")


class Container:
    """A running container."""

    def __init__(self, parent: asyncio.subprocess.Process, pid: int) -> None:
        self._parent = parent  # `unshare`, which ends like its child
        self._lines: asyncio.Queue[str] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())
        self._pid = pid  # in the PID namespace of this process
        self._output: list[str] = []

    async def says(self, text: str) -> str:
        """Wait until it has printed a line with a text, and return the line."""
        while text not in (line := await self._lines.get()):
            assert line, f"it ended without printing {text!r}: {self.printed}"
        return line

    @property
    def printed(self) -> str:
        """Its output as one text."""
        return "".join(self._output)

    async def ends(self) -> int | None:
        """Wait until it ends, and return its exit status, which is not 0 if it was killed."""
        await self._reading
        return await self._parent.wait()

    async def close(self) -> None:
        """Kill it, as the kernel does when memory runs out, unless it has ended."""
        if self._parent.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        await self.ends()

    async def _read(self) -> None:
        assert self._parent.stdout is not None
        while line := (await self._parent.stdout.readline()).decode():
            self._output.append(line)
            self._lines.put_nowait(line)
        self._lines.put_nowait("")

    async def stop(self, grace_s: float) -> int | None:
        """End it with SIGTERM, as a container runtime does; raise `TimeoutError` after `grace_s` seconds."""
        os.kill(self._pid, signal.SIGTERM)
        async with asyncio.timeout(grace_s):
            return await self.ends()


@asynccontextmanager
async def container(spec: Spec) -> AsyncIterator[Container]:
    """Run a container, and end it with the block; skip the test on a machine that cannot run one."""
    if found := _problem():
        pytest.skip(found)
    parent = await asyncio.create_subprocess_exec(
        *_command(spec),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=1 << 20,
    )
    started = Container(parent, await _first_child(parent))
    try:
        yield started
    finally:
        await started.close()


async def _first_child(parent: asyncio.subprocess.Process) -> int:
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    while not (found := children.read_text().split()):  # noqa: ASYNC240 - not on a disk
        await asyncio.sleep(0.01)
    return int(found[0])


def _command(spec: Spec) -> list[str]:
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    spec = msgspec.structs.replace(spec, environment={**paths, **spec.environment})
    program = [sys.executable, "-m", "tests.deployment.inside", msgspec.json.encode(spec).decode()]
    return ["unshare", *_NAMESPACES, *program]


@cache
def _problem() -> str | None:
    """Return why this machine cannot run containers."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "containers need root, and the command `unshare` of util-linux"
    command = _command(Spec(["python", "-c", "import aiotensor"], str(ROOT)))
    tried = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    return f"this machine cannot run containers: {tried.stderr.strip()[-200:]}" if tried.returncode else None
