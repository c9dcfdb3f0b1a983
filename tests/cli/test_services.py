"""The engine and the API server as real processes, without the command around them."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx
import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from aiotensor import SenderStatistics, TensorQueue, TensorSender
from aiotensor.cli.demo.engine import run_engine
from aiotensor.cli.demo.engine_client import EngineClient, EngineError
from aiotensor.cli.demo.fingerprint import fingerprint
from aiotensor.cli.demo.messages import AnalyseVideo, EngineFailure, EngineReply, VideoAnswer
from aiotensor.cli.demo.processes import Child, Process, ProcessDiedError, running
from aiotensor.cli.demo.server import run_server, server_command
from aiotensor.cli.demo.settings import Settings
from aiotensor.cli.demo.uploads import Outcome, Upload, http_client, upload_all
from aiotensor.cli.demo.workers import Workers

RED, BLUE = (220, 20, 20), (20, 20, 220)
FRAMES = np.zeros((8, 12, 16, 3), np.uint8)
TIMES = np.arange(8) / 25


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "sockets"  # the engine removes it
    folder.mkdir()
    return folder


@pytest.fixture
def socket_path(folder: Path) -> Path:
    return folder / "engine.sock"


@pytest.fixture(params=["unix", "queue"])
def endpoint(request: pytest.FixtureRequest, folder: Path) -> TensorQueue | str:
    return TensorQueue() if request.param == "queue" else f"unix://{folder}/tensors.sock"


@asynccontextmanager
async def engine_running(endpoint: TensorQueue | str, socket_path: Path) -> AsyncIterator[Child]:
    engine = Child("engine", run_engine, endpoint, socket_path, 1)
    async with running(engine):
        await engine.ready()
        yield engine


@dataclass
class Services:
    client: httpx.AsyncClient
    server: Process
    engine: Child
    workers: Workers
    pids: list[int]


@asynccontextmanager
async def services(
    endpoint: TensorQueue | str, folder: Path, *, max_concurrent_videos: int, workers: int = 1
) -> AsyncIterator[Services]:
    engine_socket, workers_socket = folder / "engine.sock", folder.with_name("workers.sock")
    settings = Settings(
        address=endpoint if isinstance(endpoint, str) else None,
        engine_socket=str(engine_socket),
        workers_socket=str(workers_socket),
        supervised=workers > 1,
        max_concurrent_videos=max_concurrent_videos,
        arena_bytes=1 << 24,
        threads=1,
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if isinstance(endpoint, TensorQueue):
            server: Process = Child("API server", run_server, endpoint, settings, listener)
        else:
            server = server_command("API server", settings, listener, workers)
        engine = Child("engine", run_engine, endpoint, engine_socket, 1)
        async with Workers(workers_socket, workers) as registered, running(server, engine):
            await engine.ready()
            pids = await registered.started()
            await server.ready()
            async with http_client(f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
                yield Services(client, server, engine, registered, pids)


async def test_the_engine_answers_requests_as_they_are_done_and_not_as_they_came(
    endpoint: TensorQueue | str, socket_path: Path
) -> None:
    async with (
        engine_running(endpoint, socket_path),
        TensorSender(endpoint) as sender,
        EngineClient(socket_path) as engine,
    ):
        async with sender.message() as later:
            request = AnalyseVideo(await later.send(TIMES), await later.send(FRAMES))
            first = asyncio.create_task(engine.analyse(request))
            async with sender.message() as sooner:
                request = AnalyseVideo(await sooner.send(TIMES), await sooner.send(FRAMES + 1))
            second = await engine.analyse(request)
            assert not first.done()

        assert second.frames == fingerprint(FRAMES + 1)
        assert (await first).frames == fingerprint(FRAMES)
        assert (await first).times == fingerprint(TIMES)


async def test_a_request_that_cannot_be_answered_leaves_the_others_alone(
    endpoint: TensorQueue | str, socket_path: Path
) -> None:
    async with (
        engine_running(endpoint, socket_path),
        TensorSender(endpoint) as sender,
        EngineClient(socket_path) as engine,
    ):
        async with sender.message() as message:
            discarded = AnalyseVideo(await message.send(TIMES), await message.send(FRAMES))
        sender.discard(discarded.frames)
        async with sender.message() as message:
            too_short = AnalyseVideo(await message.send(TIMES[:3]), await message.send(FRAMES))
        async with sender.message() as message:
            no_frames = AnalyseVideo(await message.send(TIMES), await message.send(TIMES))
        async with sender.message() as message:
            good = AnalyseVideo(await message.send(TIMES), await message.send(FRAMES))

        with pytest.raises(EngineError, match="ValueError: expected one time for each of 8 frames"):
            await engine.analyse(too_short)
        with pytest.raises(EngineError, match="DiscardedError"):
            await engine.analyse(discarded)  # after what was sent later, as a request may overtake a discard
        with pytest.raises(EngineError, match="ValueError: expected uint8 frames"):
            await engine.analyse(no_frames)
        assert (await engine.analyse(good)).cuts == []
        with pytest.raises(EngineError, match="AlreadyTakenError"):
            await engine.analyse(good)


async def test_a_message_that_is_no_request_is_answered_with_the_reason(socket_path: Path) -> None:
    context = zmq.asyncio.Context()
    try:
        async with engine_running(TensorQueue(), socket_path):
            socket = context.socket(zmq.DEALER)
            socket.connect(f"ipc://{socket_path}")
            await socket.send_multipart([b"7", b"hello"])
            number, body = await socket.recv_multipart()
    finally:
        context.destroy(linger=0)

    assert number == b"7"
    reply = msgspec.msgpack.decode(body, type=EngineReply)
    assert isinstance(reply, EngineFailure)
    assert reply.type_name == "ValidationError"


async def test_the_engine_leaves_no_socket_behind(socket_path: Path) -> None:
    async with engine_running(TensorQueue(), socket_path):
        assert await anyio.Path(socket_path).is_socket()

    assert not await anyio.Path(socket_path.parent).exists()


async def test_uploads_that_are_no_video_are_refused_and_the_others_are_answered(
    endpoint: TensorQueue | str, folder: Path, make_video: Callable[..., bytes]
) -> None:
    video = make_video([RED] * 10 + [BLUE] * 8)
    bodies = {"good": video, "empty": b"", "letter": b"dear friend " * 99, "half": video[: len(video) // 2]}
    async with services(endpoint, folder, max_concurrent_videos=2) as running_services:
        client = running_services.client
        posts = [client.post("/videos", files={"file": (name, body)}) for name, body in bodies.items()]
        good, empty, letter, half = await asyncio.gather(*posts)
        missing = await client.post("/videos")
        again = await client.post("/videos", files={"file": ("again", video)})
        statistics = await get_statistics(client)

    assert [good.status_code, empty.status_code, letter.status_code, half.status_code] == [200, 400, 422, 422]
    assert "empty" in empty.json()["detail"]
    assert "no video" in letter.json()["detail"]
    assert "no video stream" in half.json()["detail"]
    assert missing.status_code == 400
    assert "form field `file`" in missing.json()["detail"]
    for response in (good, again):
        answer = msgspec.json.decode(response.content, type=VideoAnswer)
        assert answer.sent == answer.received
        assert [cut.frame for cut in answer.cuts] == [10]
        assert answer.bytes == 18 * (48 * 64 * 3 + 8)
        assert answer.decode_seconds > 0
        assert answer.transport_seconds > 0
    assert statistics.in_flight == 0
    assert statistics.messages_sent == 2


async def test_a_client_that_goes_away_gives_back_its_permit(
    endpoint: TensorQueue | str, folder: Path, make_video: Callable[..., bytes], tmp_path: Path
) -> None:
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(make_video([RED] * 4))
    async with services(endpoint, folder, max_concurrent_videos=1) as running_services:
        client, engine = running_services.client, running_services.engine
        assert engine.pid
        os.kill(engine.pid, signal.SIGSTOP)  # nothing is taken any more, so the only permit stays away
        try:
            leaving = asyncio.create_task(
                client.post("/videos", files={"file": ("leaving", clip.read_bytes())})
            )
            await statistics_where(client, lambda now: now.messages_sent == 1)
            leaving.cancel()
            after = await statistics_where(client, lambda now: now.in_flight == 0)
        finally:
            os.kill(engine.pid, signal.SIGCONT)
        [upload] = await upload_all(client, [clip], concurrency=1, on_done=lambda _: None)

    assert after.messages_discarded == 1
    assert upload.outcome is Outcome.ANSWERED


async def test_every_worker_that_uvicorn_starts_serves_uploads_and_reports_what_it_did(
    folder: Path, make_video: Callable[..., bytes], tmp_path: Path
) -> None:
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(make_video([RED] * 4))
    served: set[int] = set()
    uploads: list[Upload] = []
    address = f"unix://{folder}/tensors.sock"
    async with services(address, folder, max_concurrent_videos=1, workers=2) as running_services:
        while served != set(running_services.pids):  # the kernel chooses which worker a connection goes to
            uploads += await upload_all(
                running_services.client, [clip] * 4, concurrency=4, on_done=lambda _: None
            )
            served = {upload.answer.worker for upload in uploads if upload.answer}
    reports = await running_services.workers.reports()

    assert {upload.outcome for upload in uploads} == {Outcome.ANSWERED}
    assert [report.pid for report in reports] == sorted(running_services.pids)
    assert sum(report.videos for report in reports) == len(uploads)
    for report in reports:
        assert report.videos == report.videos_in_place == report.sender.messages_sent
        assert report.sender.peak_in_flight <= 1
        assert report.sender.bytes_in_use == 0


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_request_that_the_engine_dies_under_fails_and_does_not_hang(
    folder: Path, workers: int, make_video: Callable[..., bytes]
) -> None:
    video = make_video([RED] * 4)
    address = f"unix://{folder}/tensors.sock"
    async with services(address, folder, max_concurrent_videos=1, workers=workers) as running_services:
        pid = running_services.engine.pid
        assert pid
        os.kill(pid, signal.SIGSTOP)
        posts = [running_services.client.post("/videos", files={"file": ("a", video)}) for _ in range(4)]
        uploads = [asyncio.create_task(post) for post in posts]
        # Those without a permit wait for the next engine, which never comes: they are cancelled below.
        await statistics_where(running_services.client, lambda now: now.messages_sent == 1)
        os.kill(pid, signal.SIGKILL)
        done, waiting = await asyncio.wait(uploads, return_when=asyncio.FIRST_COMPLETED)
        for upload in waiting:
            upload.cancel()

    for upload in done:
        response = upload.result()
        assert response.status_code in (502, 503)
        assert "the engine" in response.json()["detail"]


async def test_a_worker_that_is_killed_is_named(folder: Path) -> None:
    address = f"unix://{folder}/tensors.sock"
    async with services(address, folder, max_concurrent_videos=1, workers=2) as running_services:
        victim = running_services.pids[0]
        os.kill(victim, signal.SIGKILL)
        loss = await running_services.workers.loss()

    assert str(loss) == f"a worker of the API server (process {victim}) died before the work was done"
    with pytest.raises(ProcessDiedError, match=f"process {victim}"):
        await running_services.workers.reports()


async def get_statistics(client: httpx.AsyncClient) -> SenderStatistics:
    response = await client.get("/statistics")
    return msgspec.json.decode(response.raise_for_status().content, type=SenderStatistics)


async def statistics_where(
    client: httpx.AsyncClient, wanted: Callable[[SenderStatistics], bool]
) -> SenderStatistics:
    """Ask again and again until the answer is as wanted."""
    while not wanted(statistics := await get_statistics(client)):
        pass
    return statistics
