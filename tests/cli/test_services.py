"""The engine and the API server as real processes, without the command around them."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
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
from aiotensor.cli.demo.processes import Child, running
from aiotensor.cli.demo.server import run_server
from aiotensor.cli.demo.uploads import Outcome, get_statistics, http_client, upload_all

RED, BLUE = (220, 20, 20), (20, 20, 220)
FRAMES = np.zeros((8, 12, 16, 3), np.uint8)
TIMES = np.arange(8) / 25


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    folder = tmp_path / "engine"  # the engine removes it
    folder.mkdir()
    return folder / "socket"


@asynccontextmanager
async def engine_running(queue: TensorQueue, socket_path: Path) -> AsyncIterator[Child]:
    engine = Child("engine", run_engine, queue, socket_path)
    async with running(engine):
        await engine.ready()
        yield engine


@asynccontextmanager
async def services(
    socket_path: Path, *, max_concurrent_videos: int
) -> AsyncIterator[tuple[httpx.AsyncClient, Child]]:
    queue = TensorQueue()
    engine = Child("engine", run_engine, queue, socket_path)
    server = Child("API server", run_server, queue, socket_path, max_concurrent_videos)
    async with running(server, engine):
        await engine.ready()
        async with http_client(await server.ready()) as client:
            yield client, engine


async def test_the_engine_answers_requests_as_they_are_done_and_not_as_they_came(socket_path: Path) -> None:
    queue = TensorQueue()
    async with (
        engine_running(queue, socket_path),
        TensorSender(queue) as sender,
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


async def test_a_request_that_cannot_be_answered_leaves_the_others_alone(socket_path: Path) -> None:
    queue = TensorQueue()
    async with (
        engine_running(queue, socket_path),
        TensorSender(queue) as sender,
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

        with pytest.raises(EngineError, match="DiscardedError"):
            await engine.analyse(discarded)
        with pytest.raises(EngineError, match="ValueError: expected one time for each of 8 frames"):
            await engine.analyse(too_short)
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
    socket_path: Path, make_video: Callable[..., bytes]
) -> None:
    video = make_video([RED] * 10 + [BLUE] * 8)
    bodies = {"good": video, "empty": b"", "letter": b"dear friend " * 99, "half": video[: len(video) // 2]}
    async with services(socket_path, max_concurrent_videos=2) as (client, _):
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
    socket_path: Path, make_video: Callable[..., bytes], tmp_path: Path
) -> None:
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(make_video([RED] * 4))
    async with services(socket_path, max_concurrent_videos=1) as (client, engine):
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


async def statistics_where(
    client: httpx.AsyncClient, wanted: Callable[[SenderStatistics], bool]
) -> SenderStatistics:
    """Ask again and again until the answer is as wanted."""
    while not wanted(statistics := await get_statistics(client)):
        pass
    return statistics
