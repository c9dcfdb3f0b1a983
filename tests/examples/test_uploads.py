"""The servers of the examples decode uploads while they arrive, within limits of memory, disk and threads."""

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

from tests.examples.films import film, is_right
from tests.examples.programs import PORTS, Site, serving, taken
from verification.processes import watch

PERMITS = 4
LARGEST = 8 << 20  # bytes of an upload

# Several tests share servers; tests of memory start their own.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=PORTS)
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    """Run each example as one process."""
    with tempfile.TemporaryDirectory(prefix="aiotensor-") as folder:
        async with serving(
            request.param, Path(folder), is_one_process=True, MAX_UPLOAD_BYTES=str(LARGEST)
        ) as site:
            yield site


def temporary_files(pid: int, folder: Path) -> list[int]:
    """Return the sizes of a process's open temporary files."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # for a descriptor that was closed after it was listed
            if os.readlink(entry).startswith(f"{folder}/"):
                found.append(os.stat(entry).st_size)
    return found


async def status_of(reader: asyncio.StreamReader) -> int:
    """Wait for a response, and return its status."""
    return int((await reader.readline()).split()[1])


async def in_two_parts(body: bytes, halfway: asyncio.Event) -> AsyncIterator[bytes]:
    yield body[: len(body) // 2]
    await halfway.wait()
    yield body[len(body) // 2 :]


async def send_endlessly(writer: asyncio.StreamWriter, chunk: bytes) -> None:
    with suppress(ConnectionError):
        while True:
            writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            await writer.drain()


async def test_a_decoded_video_is_never_in_memory_as_a_whole(folder: Path) -> None:
    frames, path = 600, folder / "long.mkv"
    film(path, frames)
    body = path.read_bytes()
    decoded_kib = frames * 640 * 360 * 3 // 1024
    async with serving("fastapi_server", folder, is_one_process=True) as site:
        halfway = asyncio.Event()
        headers = {"Content-Length": str(len(body))}
        uploading = asyncio.create_task(
            site.http.post(site.path, content=in_two_parts(body, halfway), headers=headers)
        )
        while not await taken(folder):
            assert not uploading.done()
        before = watch.status(site.pid, "VmHWM")
        halfway.set()
        answer = await uploading
        assert answer.status_code == 200
        assert len(answer.json()) == frames
        assert watch.status(site.pid, "VmHWM") - before < decoded_kib // 8


async def test_a_video_of_unknown_size_is_decoded_while_it_arrives(site: Site, folder: Path) -> None:
    film(folder / "raw", 150, container="h264", codec="libx264")
    film(folder / "matroska", 100)
    film(folder / "mp4", 100, container="mp4", movflags="faststart")
    for name in ("raw", "matroska", "mp4"):
        before, halfway = await taken(site.folder), asyncio.Event()
        parts = in_two_parts((folder / name).read_bytes(), halfway)
        uploading = asyncio.create_task(site.http.post(site.path, content=parts))
        while await taken(site.folder) == before:
            assert not uploading.done()
        halfway.set()
        answer = await uploading
        assert answer.status_code == 200
        assert is_right(folder / name, answer.json())


async def test_an_upload_is_refused_when_it_exceeds_the_largest_size(site: Site, folder: Path) -> None:
    film(folder / "raw", 30, container="h264", codec="libx264")
    body = (folder / "raw").read_bytes()
    reader, _ = await site.begin(f"Content-Length: {LARGEST + 1}")
    assert await status_of(reader) == 413
    reader, writer = await site.begin("Transfer-Encoding: chunked")
    answer, sending = (
        asyncio.create_task(status_of(reader)),
        asyncio.create_task(send_endlessly(writer, body)),
    )
    peak = 0
    while not answer.done():
        await asyncio.wait([answer], timeout=0.01)  # between two looks
        peak = max([peak, *temporary_files(site.pid, site.folder)])
    assert await answer == 413
    sending.cancel()
    site.abort()
    assert LARGEST // 2 < peak <= LARGEST
    assert not temporary_files(site.pid, site.folder)
    assert (await site.http.post(site.path, content=body)).status_code == 200


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
        assert (await site.http.post(site.path, content=body)).status_code == 200
        assert not temporary_files(site.pid, folder)


async def test_200_clients_that_send_only_headers_delay_no_other_client_beyond_its_limit(
    site: Site, folder: Path
) -> None:
    film(folder / "short.mkv", 10)
    body = (folder / "short.mkv").read_bytes()
    assert (await site.http.post(site.path, content=body)).status_code == 200
    silent = [await site.begin("Content-Length: 1000000") for _ in range(200)]
    # The server reads its sockets in any order, so it may read some of these before the silent ones.
    while (refused := await site.http.post(site.path, content=body)).status_code == 200:
        pass
    assert (refused.status_code, "Retry-After" in refused.headers) == (503, True)
    # The server refuses the other silent clients, too, and keeps only the admitted ones.
    waiting = [asyncio.create_task(reader.readline()) for reader, _ in silent]
    while sum(line.done() for line in waiting) < len(silent) - PERMITS:
        assert (await site.http.get("/metrics")).status_code == 200
    assert {line.result().split()[1] for line in waiting if line.done()} == {b"503"}
    site.abort()
    assert (await site.http.post(site.path, content=body)).status_code == 200


@pytest.mark.parametrize("site", ["fastapi_server"], indirect=True)
async def test_large_frames_are_decoded_in_small_batches(site: Site, folder: Path) -> None:
    film(folder / "4k.mkv", 7, height=2160, width=3840)
    answer = await site.http.post(site.path, content=(folder / "4k.mkv").read_bytes())
    assert answer.status_code == 200, answer.text
    assert is_right(folder / "4k.mkv", answer.json())


async def test_the_refusal_of_a_file_states_the_reason(site: Site, folder: Path) -> None:
    film(folder / "leading.mp4", 5, container="mp4", movflags="faststart")
    film(folder / "trailing.mp4", 30, container="mp4", noisy_rows=300)
    leading, trailing = (folder / "leading.mp4").read_bytes(), (folder / "trailing.mp4").read_bytes()

    async def chunked(body: bytes) -> AsyncIterator[bytes]:
        yield body

    uploads: list[tuple[bytes | AsyncIterator[bytes], str]] = [
        (b"", "this is no video: Invalid data found when processing input"),
        (leading[:40], "the file has no video stream"),
        (leading[: leading.index(b"mdat") + 4], "the video ends before its first frame"),
        (trailing[: len(trailing) // 2], "this is no video: Invalid data found when processing input"),
        (
            chunked(trailing),
            "this is no video: Invalid data found when processing input; without a known size, its index "
            "must be at the start",
        ),
    ]
    for body, reason in uploads:
        answer = await site.http.post(site.path, content=body)
        assert answer.status_code == 400
        assert (answer.json()["detail"] if site.example == "fastapi_server" else answer.text) == reason
