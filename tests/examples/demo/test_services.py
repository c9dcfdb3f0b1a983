"""The engine and the API server in separate processes, without the command line."""

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
import pytest
import torch

from aiotensor import RemoteError, SenderStatistics, TensorQueue, TensorSender
from aiotensor.channel import MessageClient
from demo.engine import run_engine
from demo.fingerprint import fingerprint
from demo.messages import AnalyseVideo, VideoAnalysis, VideoAnswer
from demo.processes import Child, Process, ProcessDiedError, running
from demo.server import run_server, server_command
from demo.settings import Settings
from demo.uploads import Outcome, Upload, http_client, upload_all
from demo.workers import Workers

RED, BLUE = (220, 20, 20), (20, 20, 220)
FRAMES = torch.zeros(8, 48, 64, 3, dtype=torch.uint8)
TIMES = torch.arange(8, dtype=torch.float64) / 25


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "sockets"  # the engine removes it
    folder.mkdir()
    return folder


@pytest.fixture(params=["unix", "queue"])
def endpoint(request: pytest.FixtureRequest, folder: Path) -> TensorQueue | str:
    return TensorQueue() if request.param == "queue" else f"unix://{folder}/tensors.sock"


@asynccontextmanager
async def engine_running(endpoint: TensorQueue | str, folder: Path) -> AsyncIterator[str]:
    """Start an engine, and return the address at which it receives requests."""
    address = f"ipc://{folder}/engine.sock"
    engine = Child("engine", run_engine, endpoint, address, folder, 1)
    async with running(engine):
        await engine.ready()
        yield address


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
    engine_address, workers_socket = f"ipc://{folder}/engine.sock", folder.with_name("workers.sock")
    settings = Settings(
        address=endpoint if isinstance(endpoint, str) else None,
        engine_address=engine_address,
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
        engine = Child("engine", run_engine, endpoint, engine_address, folder, 1)
        async with Workers(workers_socket, workers) as registered, running(server, engine):
            await engine.ready()
            pids = await registered.started()
            await server.ready()
            async with http_client(f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
                yield Services(client, server, engine, registered, pids)


def ask(frames: torch.Tensor, times: torch.Tensor = TIMES) -> AnalyseVideo:
    return AnalyseVideo(times=times, frames=frames, sent_at=0.0)


async def test_failed_and_cancelled_requests_do_not_affect_others(
    endpoint: TensorQueue | str, folder: Path
) -> None:
    async with (
        engine_running(endpoint, folder) as address,
        TensorSender(endpoint) as sender,
        MessageClient(address, sender=sender, reply_type=VideoAnalysis) as engine,
    ):
        given_up = asyncio.create_task(engine.request(ask(FRAMES)))
        while engine.statistics().messages_sent == 0:
            await asyncio.sleep(0)
        given_up.cancel()
        requests = [ask(FRAMES, TIMES[:3]), ask(FRAMES), ask(TIMES), ask(FRAMES + 1)]
        too_short, good, no_frames, also_good = await asyncio.gather(
            *(engine.request(request) for request in requests), return_exceptions=True
        )
        await sender.drain()

    assert given_up.cancelled()
    assert isinstance(too_short, RemoteError)
    assert str(too_short).startswith("ValueError: expected one time for each of 8 frames")
    assert isinstance(no_frames, RemoteError)
    assert no_frames.type_name == "ProtocolError"
    assert "`$.frames` does not match its annotation" in str(no_frames)
    assert isinstance(good, VideoAnalysis)
    assert good.cuts == []
    assert good.times == fingerprint(TIMES.numpy())
    assert good.frames == fingerprint(FRAMES.numpy())
    assert isinstance(also_good, VideoAnalysis)
    assert also_good.frames == fingerprint(FRAMES.numpy() + 1)


async def test_an_invalid_request_is_answered_with_an_error(folder: Path) -> None:
    async with (
        engine_running(TensorQueue(), folder) as address,
        MessageClient(address, reply_type=VideoAnalysis) as engine,
    ):
        with pytest.raises(RemoteError, match="missing required field `times`") as raised:
            await engine.request({"hello": "world"})

    assert raised.value.type_name == "ProtocolError"


async def test_the_engine_leaves_no_socket_behind(folder: Path) -> None:
    async with engine_running(TensorQueue(), folder) as address:
        assert await anyio.Path(address.removeprefix("ipc://")).is_socket()

    assert not await anyio.Path(folder).exists()


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

    assert [good.status_code, empty.status_code, letter.status_code, half.status_code] == [200, 400, 400, 400]
    assert "empty" in empty.json()["detail"]
    assert "not a video" in letter.json()["detail"]
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


@pytest.mark.parametrize("endpoint", ["unix"], indirect=True)
async def test_a_client_that_disconnects_releases_its_permit(
    endpoint: TensorQueue | str, folder: Path, make_video: Callable[..., bytes], tmp_path: Path
) -> None:
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(make_video([RED] * 4))
    async with services(endpoint, folder, max_concurrent_videos=1) as running_services:
        client, engine = running_services.client, running_services.engine
        await upload_to_every_worker(running_services, clip)
        assert engine.pid
        os.kill(engine.pid, signal.SIGSTOP)  # nothing is taken any more, so the only permit stays away
        try:
            leaving = asyncio.create_task(
                client.post("/videos", files={"file": ("leaving", clip.read_bytes())})
            )
            await statistics_where(client, has_sent_a_video)
            leaving.cancel()
            after = await statistics_where(client, lambda now: now.in_flight == 0)
        finally:
            os.kill(engine.pid, signal.SIGCONT)
        [upload] = await upload_all(client, [clip], concurrency=1, on_done=lambda _: None)

    assert after.messages_discarded == 1
    assert upload.outcome is Outcome.ANSWERED


async def test_every_worker_of_uvicorn_serves_uploads_and_writes_a_report(
    folder: Path, make_video: Callable[..., bytes], tmp_path: Path
) -> None:
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(make_video([RED] * 4))
    address = f"unix://{folder}/tensors.sock"
    async with services(address, folder, max_concurrent_videos=1, workers=2) as running_services:
        uploads = await upload_to_every_worker(running_services, clip)
    reports = await running_services.workers.reports()

    assert {upload.outcome for upload in uploads} == {Outcome.ANSWERED}
    assert [report.pid for report in reports] == sorted(running_services.pids)
    assert sum(report.videos for report in reports) == len(uploads)
    for report in reports:
        assert report.videos == report.videos_in_place == report.sender.messages_sent
        assert report.sender.peak_in_flight <= 1
        assert report.sender.bytes_in_use == 0


async def test_killing_the_engine_fails_its_requests_with_502_or_503(
    folder: Path, make_video: Callable[..., bytes], tmp_path: Path
) -> None:
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(make_video([RED] * 4))
    address = f"unix://{folder}/tensors.sock"
    async with services(address, folder, max_concurrent_videos=1) as running_services:
        await upload_to_every_worker(running_services, clip)
        pid = running_services.engine.pid
        assert pid
        os.kill(pid, signal.SIGSTOP)
        files = {"file": ("a", clip.read_bytes())}
        posts = [running_services.client.post("/videos", files=files) for _ in range(4)]
        uploads = [asyncio.create_task(post) for post in posts]
        # Those without a permit wait for the next engine, which never comes: they are cancelled below.
        await statistics_where(running_services.client, has_sent_a_video)
        os.kill(pid, signal.SIGKILL)
        done, waiting = await asyncio.wait(uploads, return_when=asyncio.FIRST_COMPLETED)
        for upload in waiting:
            upload.cancel()

    for upload in done:
        response = upload.result()
        assert response.status_code in (502, 503)
        assert "the engine" in response.json()["detail"]


async def test_a_killed_worker_is_reported_with_its_pid(folder: Path) -> None:
    address = f"unix://{folder}/tensors.sock"
    async with services(address, folder, max_concurrent_videos=1, workers=2) as running_services:
        victim = running_services.pids[0]
        os.kill(victim, signal.SIGKILL)
        loss = await running_services.workers.loss()

    assert str(loss) == f"a worker of the API server (process {victim}) died before the work was done"
    with pytest.raises(ProcessDiedError, match=f"process {victim}"):
        await running_services.workers.reports()


async def upload_to_every_worker(running_services: Services, clip: Path) -> list[Upload]:
    """Upload a clip until every worker has served one, and so is connected to the engine."""
    served: set[int] = set()
    uploads: list[Upload] = []
    while served != set(running_services.pids):  # the kernel chooses which worker a connection goes to
        uploads += await upload_all(
            running_services.client, [clip] * 4, concurrency=4, on_done=lambda _: None
        )
        served = {upload.answer.worker for upload in uploads if upload.answer}
    return uploads


def has_sent_a_video(now: SenderStatistics) -> bool:
    return any(holder.state == "waiting to be taken" for holder in now.holders)


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
