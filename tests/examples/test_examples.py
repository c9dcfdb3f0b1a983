"""Each example runs as its first comment shows, and does what it says."""

import ast
import asyncio
import os
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import httpx
import numpy as np
import pytest

from aiotensor.cli.demo.clips import sample_clips
from aiotensor.inspection import inspect
from tests.processes import watch

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])  # of the tests; the programs have their own

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
    """An example that runs."""

    process: asyncio.subprocess.Process

    async def says(self, text: str) -> None:
        """Wait until it has printed a line."""
        assert self.process.stdout is not None
        while text not in (line := (await self.process.stdout.readline()).decode()):
            assert line, f"it ended without saying {text!r}"

    async def end(self, number: signal.Signals) -> tuple[int, str]:
        """Have it end, and return its exit status and what it said of errors."""
        self.process.send_signal(number)
        _, errors = await self.process.communicate()
        return self.process.returncode or 0, errors.decode()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="aiotensor-") as path:
        yield Path(path)


@asynccontextmanager
async def running(command: list[str], folder: Path) -> AsyncIterator[Program]:
    name, *arguments = command
    program = [sys.executable] if name == "python" else [sys.executable, "-m", name]
    process = await asyncio.create_subprocess_exec(
        *program,
        *arguments,
        cwd=ROOT,
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
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
async def engine(folder: Path) -> AsyncIterator[Program]:
    [command] = shown("engine")
    async with running(command, folder) as program:
        await program.says("the engine is ready")
        yield program


@asynccontextmanager
async def server(example: str, folder: Path) -> AsyncIterator[tuple[Program, httpx.AsyncClient, str]]:
    """Start the engine and a server as shown, but at a free port, and return where videos go."""
    first, command, upload = shown(example)
    assert [first] == shown("engine")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command += ["--port", str(port)] if command[0] == "uvicorn" else [str(port)]
    url = httpx.URL(upload[-1])
    assert url.port == PORTS[example]
    transport = httpx.AsyncHTTPTransport(retries=100)  # until it listens
    async with (
        engine(folder),
        running(command, folder) as program,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=60, trust_env=False
        ) as http,
    ):
        yield program, http, url.path


def decoded(clip: Path) -> list[np.ndarray]:
    """Decode a clip as a whole."""
    with av.open(str(clip)) as video:
        return [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]


def is_right(clip: Path, answer: list[list[float]]) -> bool:
    """Say whether an answer has the mean colour of each frame."""
    return np.allclose(answer, [frame.mean(axis=(0, 1)) for frame in decoded(clip)], atol=0.01)


@pytest.mark.parametrize("example", PORTS)
async def test_a_server_answers_uploads_of_any_kind_of_video_and_refuses_what_is_none(
    example: str, folder: Path
) -> None:
    async with server(example, folder) as (program, http, path):
        clips = sample_clips()  # some have their index at the end
        answers = await asyncio.gather(*[http.post(path, content=clip.read_bytes()) for clip in clips])
        for clip, answer in zip(clips, answers, strict=True):
            assert answer.status_code == 200, answer.text
            assert is_right(clip, answer.json())
        refused = await http.post(path, content=b"no video" * 1000)
        assert refused.status_code == 422
        assert "no video" in refused.text
        body = clips[1].read_bytes()
        for _ in range(3):  # clients that hang up halfway
            _, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port)
            head = f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body[: len(body) // 2])
            await writer.drain()
            writer.close()
        again = await http.post(path, content=clips[1].read_bytes())
        assert again.status_code == 200
        status, errors = await program.end(signal.SIGTERM)
        assert status == 0
        assert "Traceback" not in errors
        assert "ERROR" not in errors
        assert "ignored" not in errors


async def test_the_batch_client_prints_a_line_for_each_file_and_fails_if_one_failed(folder: Path) -> None:
    _, [*command, _, _, _] = shown("batch_client")
    clips = [str(clip) for clip in sample_clips()]
    async with engine(folder) as owner:
        async with running(command + clips, folder) as program:
            output, errors = await program.process.communicate()
            assert (program.process.returncode, errors) == (0, b"")
            assert len(output.splitlines()) == len(clips)
        async with running([*command, clips[0], __file__], folder) as program:
            output, errors = await program.process.communicate()
            assert program.process.returncode == 1
            assert b"test_examples.py: this is no video" in errors
            assert len(output.splitlines()) == 1
        assert await owner.end(signal.SIGINT) == (0, "")


def film(path: Path, frames: int) -> None:
    """Make a video that can be read as it comes."""
    rows, columns = np.mgrid[0:360, 0:640]
    with av.open(str(path), "w", format="matroska") as video:
        stream = video.add_stream("mpeg4", rate=30)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = 640, 360, "yuv420p", 8_000_000
        stream.time_base = Fraction(1, 30)
        for number in range(frames):
            picture = np.stack([rows + number, columns, rows + columns], axis=2).astype(np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                video.mux(packet)
        for packet in stream.encode(None):
            video.mux(packet)


@pytest.mark.parametrize("example", PORTS)
async def test_clients_that_hang_up_while_their_videos_are_decoded_harm_no_server(
    example: str, folder: Path
) -> None:
    path = folder / "long.mkv"
    film(path, 60)
    body = path.read_bytes()
    tensors = f"unix://{folder}/example-engine.tensors"

    async def in_use() -> int:
        senders = (await inspect(tensors, patience_s=5)).senders
        return sum(one.statistics.bytes_in_use for one in senders if one.statistics is not None)

    async with server(example, folder) as (program, http, url):
        assert (await http.post(url, content=body)).status_code == 200
        head = f"POST {url} HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        for _ in range(10):
            writers = []
            for _ in range(4):
                _, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port)
                writer.write(head + body[: len(body) * 3 // 4])
                writers.append(writer)
            while not await in_use():
                pass
            for writer in writers:
                writer.transport.abort()
            while await in_use():
                pass
        assert (await http.post(url, content=body)).status_code == 200
        status, errors = await program.end(signal.SIGTERM)
        assert status == 0
        assert "Traceback" not in errors


async def test_a_video_is_decoded_while_it_arrives_and_never_needs_its_size_in_memory(folder: Path) -> None:
    frames, path = 600, folder / "long.mkv"
    film(path, frames)
    body = path.read_bytes()
    decoded_kib = frames * 640 * 360 * 3 // 1024
    tensors = f"unix://{folder}/example-engine.tensors"
    async with server("fastapi_server", folder) as (_, http, url):
        halfway = asyncio.Event()

        async def parts() -> AsyncIterator[bytes]:
            yield body[: len(body) // 2]
            await halfway.wait()
            yield body[len(body) // 2 :]

        size = {"Content-Length": str(len(body))}
        uploading = asyncio.create_task(http.post(url, content=parts(), headers=size))
        while (await inspect(tensors, patience_s=5)).statistics.tensors_taken < 1:
            assert not uploading.done()
            await asyncio.sleep(0.05)  # between two looks
        [worker] = [
            sender.pid
            for sender in (await inspect(tensors, patience_s=5)).senders
            if sender.statistics is not None and sender.statistics.tensors_sent
        ]
        before = watch.status(worker, "VmHWM")
        halfway.set()
        answer = await uploading
        assert answer.status_code == 200
        assert len(answer.json()) == frames
        assert watch.status(worker, "VmHWM") - before < decoded_kib // 8
