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

from tests.deployment.groups import MemoryGroup
from tests.deployment.inside import Spec

__all__ = ["ROOT", "USER", "Container", "container", "party", "problem"]

ROOT = Path(__file__).parents[2]
USER = 10001

_NAMESPACES = ("--mount", "--pid", "--ipc", "--uts", "--fork", "--mount-proc")


class Container:
    """A running container.

    Attributes:
        pid: the id of its first process in the PID namespace of this process.
        output: the lines that it has printed.
    """

    def __init__(self, parent: asyncio.subprocess.Process, pid: int) -> None:
        self._parent = parent  # `unshare`, which ends like its child
        self._lines: asyncio.Queue[str] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())
        self.pid = pid
        self.output: list[str] = []

    async def says(self, text: str) -> str:
        """Wait until it has printed a line with a text, and return the line."""
        while text not in (line := await self._lines.get()):
            assert line, f"it ended without printing {text!r}: {self.printed}"
        return line

    @property
    def printed(self) -> str:
        """Its output as one text."""
        return "".join(self.output)

    async def ends(self) -> int | None:
        """Wait until it ends, and return its exit status, which is not 0 if it was killed."""
        await self._reading
        return await self._parent.wait()

    async def close(self) -> None:
        """Kill it unless it has ended."""
        if self._parent.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        await self.ends()

    async def _read(self) -> None:
        assert self._parent.stdout is not None
        while line := (await self._parent.stdout.readline()).decode():
            self.output.append(line)
            self._lines.put_nowait(line)
        self._lines.put_nowait("")

    async def stop(self, grace_s: float) -> int | None:
        """End it with SIGTERM, as a container runtime does; raise `TimeoutError` after `grace_s` seconds."""
        os.kill(self.pid, signal.SIGTERM)
        async with asyncio.timeout(grace_s):
            return await self.ends()

    async def kill(self) -> None:
        """End it as the kernel does when memory runs out."""
        os.kill(self.pid, signal.SIGKILL)
        await self.ends()


@asynccontextmanager
async def container(spec: Spec) -> AsyncIterator[Container]:
    """Run a container, and end it with the block."""
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


def party(
    role: str,
    where: Path | str,
    *numbers: int,
    user: int = USER,
    group: MemoryGroup | None = None,
    first_user: int | None = None,
) -> Spec:
    """Return a container with one side of a transfer.

    Args:
        role: a role of `tests.deployment.party`.
        where: the folder that both sides share, or an address.
        numbers: the numbers of the role.
        user: the user of the container.
        group: its control group.
        first_user: the user of the machine that is user 0 in its user namespace, if it has its own.
    """
    address, mounts = where, {}
    if isinstance(where, Path):
        address, mounts = "unix:///run/aiotensor/engine.sock", {"/run/aiotensor": str(where)}
    command = ["python", "-W", "error", "-m", "tests.deployment.party", role, address, *numbers]
    folder = None if group is None else str(group.folder)
    return Spec(
        [*map(str, command)], str(ROOT), user=user, mounts=mounts, group=folder, first_user=first_user
    )


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
def problem() -> str | None:
    """Return why this machine cannot run containers."""
    if os.geteuid() != 0:
        return "containers need root"
    for program in ("unshare", "mount"):
        if shutil.which(program) is None:
            return f"the command `{program}` of util-linux is not installed"
    tried = subprocess.run(
        _command(Spec(["python", "-c", "import aiotensor"], str(ROOT))),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if tried.returncode != 0:
        return f"this machine cannot run containers: {tried.stderr.strip()[-200:]}"
    return None
