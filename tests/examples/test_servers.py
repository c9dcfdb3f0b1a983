"""The example servers decode uploads while they arrive, within limits of memory, disk and threads."""

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from demo.clips import sample_clips
from tests.examples.films import film, is_right
from tests.examples.programs import PORTS, Site, serving, taken
from tests.pages import LIMIT_S
from verification.processes import watch

PERMITS = 4
LARGEST = 8 << 20  # bytes of an upload

# Several tests share servers.
pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(LIMIT_S),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=PORTS)
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    """Run a server as its first comment shows, and check that it ends without errors."""
    with tempfile.TemporaryDirectory(prefix="aiotensor-") as folder:
        async with serving(request.param, Path(folder), MAX_UPLOAD_BYTES=str(LARGEST)) as site:
            yield site
            status, errors = await site.server.end(signal.SIGTERM)
            assert status == 0
            assert "Traceback" not in errors
            assert "ERROR" not in errors


def temporary_files(pid: int, folder: Path) -> list[int]:
    """Return the sizes of a process's open temporary files."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # for a descriptor that was closed after it was listed
            if os.readlink(entry).startswith(f"{folder}/"):
                found.append(os.stat(entry).st_size)
    return found


async def test_a_server_answers_videos_and_refuses_other_files(site: Site, folder: Path) -> None:
    clips = sample_clips()  # some have their index at the end
    film(folder / "4k.mkv", 7, height=2160, width=3840)  # a batch has few of its frames
    files = [*clips, folder / "4k.mkv"]
    answers = await asyncio.gather(*[site.http.post(site.path, content=file.read_bytes()) for file in files])
    for file, answer in zip(files, answers, strict=True):
        assert answer.status_code == 200, answer.text
        assert is_right(file, answer.json())
    for body, status in ((b"no video" * 1000, 400), (b"", 400), (bytes(LARGEST + 1), 413)):
        assert (await site.http.post(site.path, content=body)).status_code == status
    body = clips[1].read_bytes()
    for _ in range(6):  # clients that disconnect halfway
        _, writer = await site.begin(f"Content-Length: {len(body)}")
        writer.write(body[: len(body) // 2])
        await writer.drain()
        site.abort()
    assert (await site.http.post(site.path, content=body)).status_code == 200
    assert "aiotensor_client_permits_limit" in (await site.http.get("/metrics")).text


async def test_a_video_of_unknown_size_is_decoded_while_it_arrives(site: Site, folder: Path) -> None:
    film(folder / "raw", 150, container="h264", codec="libx264")
    film(folder / "mp4", 100, container="mp4", movflags="faststart")
    for name in ("raw", "mp4"):
        body = (folder / name).read_bytes()
        before, halfway = await taken(site.folder), asyncio.Event()

        async def parts(body: bytes = body, halfway: asyncio.Event = halfway) -> AsyncIterator[bytes]:
            yield body[: len(body) // 2]
            await halfway.wait()
            yield body[len(body) // 2 :]

        uploading = asyncio.create_task(site.http.post(site.path, content=parts()))
        while await taken(site.folder) == before:
            assert not uploading.done()
        halfway.set()
        answer = await uploading
        assert answer.status_code == 200
        assert is_right(folder / name, answer.json())


async def test_200_clients_that_send_only_headers_delay_no_other_client_beyond_its_limit(
    site: Site, folder: Path
) -> None:
    film(folder / "short.mkv", 10)
    body = (folder / "short.mkv").read_bytes()
    silent = [await site.begin("Content-Length: 1000000") for _ in range(200)]
    # The server reads its sockets in any order, so it may read some of these before the silent ones.
    while (refused := await site.http.post(site.path, content=body)).status_code == 200:
        pass
    assert (refused.status_code, "Retry-After" in refused.headers) == (503, True)
    waiting = [asyncio.create_task(reader.readline()) for reader, _ in silent]
    while sum(line.done() for line in waiting) < len(silent) - 2 * PERMITS:
        assert (await site.http.get("/metrics")).status_code == 200
    assert {line.result().split()[1] for line in waiting if line.done()} == {b"503"}
    site.abort()
    while (await site.http.post(site.path, content=body)).status_code == 503:
        pass


async def test_200_uploads_with_a_stopped_engine_hold_no_more_than_the_permits_allow(folder: Path) -> None:
    height, width, frames = 1080, 1920, 22
    path = folder / "hd.mkv"
    film(path, frames, height=height, width=width, noisy_rows=100)
    body = path.read_bytes()
    decoded_kib = frames * height * width * 3 // 1024
    # The limits are in code that both servers share.
    async with serving("fastapi_server", folder, is_one_process=True) as site:
        assert (await site.http.post(site.path, content=body)).status_code == 200
        memory, threads = watch.status(site.pid, "VmHWM"), watch.status(site.pid, "Threads")
        site.engine.process.send_signal(signal.SIGSTOP)
        uploads = [asyncio.create_task(site.http.post(site.path, content=body)) for _ in range(200)]
        refusals: list[httpx.Response] = []
        peak_files = peak_threads = 0
        for upload in asyncio.as_completed(uploads):
            refusals.append(await upload)
            peak_files = max(peak_files, len(temporary_files(site.pid, folder)))
            peak_threads = max(peak_threads, watch.status(site.pid, "Threads"))
            if len(refusals) == len(uploads) - PERMITS:
                break
        assert {(answer.status_code, "Retry-After" in answer.headers) for answer in refusals} == {(503, True)}
        assert watch.status(site.pid, "VmHWM") - memory < PERMITS * decoded_kib + 100 * 1024
        assert peak_files == PERMITS
        assert peak_threads - threads < len(uploads) // 2  # each decoder of libav has several
        site.engine.process.send_signal(signal.SIGCONT)
        answers = await asyncio.gather(*uploads)
        assert sum(answer.status_code == 200 for answer in answers) == PERMITS
        assert not temporary_files(site.pid, folder)
