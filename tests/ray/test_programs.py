"""The examples for Ray run as shown, with the installed package."""

import asyncio
import os
import re
import signal
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from demo.clips import sample_clips
from tests.examples.films import is_right
from tests.examples.programs import Program
from verification.places import free_port

ROOT = Path(__file__).parents[2]
_ENDING_S = 30.0

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])


def processes_with(word: str) -> list[int]:
    """Return the processes with a word in their environment, which processes inherit from the program."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is not ours
            if word.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@asynccontextmanager
async def running(program: Path, *arguments: str) -> AsyncIterator[Program]:
    """Run a program outside of the repository, and check that no process of its cluster is left."""
    mark = str(uuid.uuid4())
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory(prefix="aiotensor-") as folder:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(program),
            *arguments,
            cwd=folder,
            env=environment | {"AIOTENSOR_TEST": mark, "XDG_RUNTIME_DIR": folder, "PYTHONUNBUFFERED": "1"},
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            yield Program(process)
            async with asyncio.timeout(_ENDING_S):
                await process.wait()
                while processes_with(mark):
                    await asyncio.sleep(0.1)
        finally:
            for pid in processes_with(mark):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await process.wait()


async def output_of(program: Path) -> str:
    """Run a program until it ends, and return its output."""
    async with running(program) as one:
        output, _ = await one.process.communicate()
        assert one.process.returncode == 0
    return output.decode()


async def test_the_example_exchanges_tensors_with_its_actor() -> None:
    output = await output_of(ROOT / "examples" / "ray_actor.py")

    assert "16 of 16 clips arrived unchanged in both directions" in output


async def test_ray_serve_answers_uploads_also_after_its_engine_was_killed() -> None:
    clips = sample_clips()
    port = free_port()
    url = f"http://127.0.0.1:{port}/videos"
    async with running(ROOT / "examples" / "ray_serve.py", str(port)) as program:
        await program.says("the server is ready")
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            answers = await asyncio.gather(*[http.post(url, content=clip.read_bytes()) for clip in clips])
            for clip, answer in zip(clips, answers, strict=True):
                assert answer.status_code == 200, answer.text
                assert is_right(clip, answer.json())
            assert (await http.post(url, content=b"no video")).status_code == 400

            os.kill(engine_of(program.process.pid), signal.SIGKILL)
            codes = set()
            while 200 not in codes:  # Ray starts the engine again
                codes.add((await http.post(url, content=clips[0].read_bytes())).status_code)
            assert codes <= {200, 503}
        program.process.send_signal(signal.SIGTERM)
        await program.process.communicate()
        assert program.process.returncode == 0


def engine_of(driver: int) -> int:
    """Return the process of the actor that owns the model, of the cluster that a driver has started."""
    environment = Path(f"/proc/{driver}/environ").read_bytes()
    [mark] = re.findall(rb"AIOTENSOR_TEST=([\w-]+)", environment)
    [engine] = [
        pid
        for pid in processes_with(mark.decode())
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::Engine")
    ]
    return engine
