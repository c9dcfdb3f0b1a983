"""A worker handles videos between both ends of a real channel in one process."""

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import anyio
import pytest

from aiotensor import (
    PeerLostError,
    ProtocolError,
    RemoteError,
    SenderStatistics,
    TensorReceiver,
    TensorSender,
)
from aiotensor.channel import MessageClient, MessageServer
from demo import videos as module
from demo.decode import VideoSize, VideoTooLargeError, decode, measure
from demo.fingerprint import fingerprint
from demo.messages import AnalyseVideo, VideoAnalysis, VideoAnswer
from demo.videos import Videos

RED, BLUE = (220, 20, 20), (20, 20, 220)


async def analyse(request: AnalyseVideo) -> VideoAnalysis:
    """Answer with the fingerprints of the received tensors."""
    return VideoAnalysis(
        times=fingerprint(request.times.numpy()),
        frames=fingerprint(request.frames.numpy()),
        cuts=[],
        transport_seconds=0.5,
        model_seconds=0.25,
    )


@dataclass
class Ends:
    videos: Videos
    sender: TensorSender
    server: MessageServer[AnalyseVideo]
    serving: asyncio.Task[None]


@asynccontextmanager
async def ends(
    folder: Path,
    *,
    arena_bytes: int = 1 << 20,
    max_concurrent_videos: int = 3,
    engine: Callable[[AnalyseVideo], Awaitable[object]] = analyse,
) -> AsyncIterator[Ends]:
    tensors, requests = f"unix://{folder}/tensors.sock", f"ipc://{folder}/engine.sock"
    async with (
        TensorReceiver(tensors) as receiver,
        TensorSender(tensors, max_concurrent_videos, arena_bytes) as sender,
        MessageServer(requests, AnalyseVideo, receiver=receiver) as server,
        MessageClient(requests, sender=sender, reply_type=VideoAnalysis) as client,
    ):
        serving = asyncio.create_task(server.serve(engine))
        yield Ends(Videos(client), sender, server, serving)
        serving.cancel()
        await asyncio.wait([serving])


async def cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


async def sender_where(sender: TensorSender, wanted: Callable[[SenderStatistics], bool]) -> None:
    while not wanted(sender.statistics()):
        await asyncio.sleep(0)


def assert_arrived(answer: VideoAnswer, file: bytes) -> None:
    video = decode(io.BytesIO(file), max_bytes=1 << 30)
    assert answer.sent == answer.received == (fingerprint(video.times), fingerprint(video.frames))
    assert answer.bytes == video.times.nbytes + video.frames.nbytes


async def test_a_video_is_decoded_directly_into_shared_memory(
    tmp_path: Path, make_video: Callable[..., bytes]
) -> None:
    file = make_video([RED] * 10 + [BLUE] * 8)
    nbytes = measure(io.BytesIO(file)).nbytes

    async with ends(tmp_path, arena_bytes=nbytes) as here:
        answer = await here.videos.answer("clip", io.BytesIO(file))
        report = here.videos.report()

    assert_arrived(answer, file)
    assert (answer.transport_seconds, answer.model_seconds) == (0.5, 0.25)
    frame_bytes = 18 * 48 * 64 * 3
    assert (report.videos, report.videos_in_place, report.bytes_in_place) == (1, 1, frame_bytes)
    assert (
        report.sender.bytes_sent == frame_bytes
    )  # the timestamps are small, and were sent inside the request
    assert report.sender.peak_bytes_in_use == nbytes


async def test_concurrent_videos_take_turns_if_the_arena_holds_only_one(
    tmp_path: Path, make_video: Callable[..., bytes]
) -> None:
    file = make_video([RED] * 6)
    nbytes = measure(io.BytesIO(file)).nbytes

    async with ends(tmp_path, arena_bytes=nbytes) as here:
        answers = await asyncio.gather(*(here.videos.answer("clip", io.BytesIO(file)) for _ in range(6)))
        report = here.videos.report()

    for answer in answers:
        assert_arrived(answer, file)
    assert report.videos_in_place == 6
    assert report.sender.peak_in_flight == 3
    assert report.sender.peak_bytes_in_use == nbytes


@pytest.mark.parametrize(("announced", "in_place"), [(3, 0), (7, 1), (1_000_000, 1)])
async def test_a_wrong_number_of_frames_in_the_header_is_tolerated(
    announced: int,
    in_place: int,
    tmp_path: Path,
    make_video: Callable[..., bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = make_video([RED] * 3 + [BLUE] * 4)
    monkeypatch.setattr(module, "measure", lambda _: VideoSize(frames=announced, height=48, width=64))

    async with ends(tmp_path, arena_bytes=1 << 20) as here:
        answer = await here.videos.answer("clip", io.BytesIO(file))
        again = await here.videos.answer("clip", io.BytesIO(file))
        report = here.videos.report()

    assert_arrived(answer, file)
    assert_arrived(again, file)
    assert (report.videos, report.videos_in_place) == (2, 2 * in_place)


async def test_a_video_that_exceeds_the_arena_is_too_large_and_holds_no_permit(
    tmp_path: Path, make_video: Callable[..., bytes]
) -> None:
    file = make_video([RED] * 10)

    for limit in (measure(io.BytesIO(file)).nbytes - 1, 1000):
        async with ends(tmp_path, arena_bytes=limit) as here:
            with pytest.raises(VideoTooLargeError, match="exceeds the limit"):
                await here.videos.answer("clip", io.BytesIO(file))
            await asyncio.sleep(0)
            report = here.videos.report()

        assert (report.videos, report.sender.in_flight) == (0, 0)


async def test_the_permit_is_acquired_before_the_video_is_measured(
    tmp_path: Path, make_video: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_video([RED] * 4)
    looked_at: list[BinaryIO] = []

    def look(upload: BinaryIO) -> VideoSize:
        looked_at.append(upload)
        return measure(upload)

    monkeypatch.setattr(module, "measure", look)
    async with ends(tmp_path, max_concurrent_videos=1) as here:
        async with here.sender.message():
            answering = asyncio.create_task(here.videos.answer("clip", io.BytesIO(file)))
            await sender_where(here.sender, lambda now: now.waiting == 1)
            assert looked_at == []
        assert_arrived(await answering, file)

    assert len(looked_at) == 1


async def test_an_error_of_the_engine_propagates_and_releases_the_permit(
    tmp_path: Path, make_video: Callable[..., bytes]
) -> None:
    async def fail(request: AnalyseVideo) -> VideoAnalysis:
        raise ValueError("no frames")

    async with ends(tmp_path, engine=fail) as here:
        with pytest.raises(RemoteError, match="ValueError: no frames"):
            await here.videos.answer("clip", io.BytesIO(make_video([RED] * 4)))
        await sender_where(here.sender, lambda now: now.in_flight == 0)
        report = here.videos.report()

    assert (report.videos, report.bytes_in_place) == (0, 0)


async def test_an_answer_that_is_not_an_analysis_raises_protocol_error(
    tmp_path: Path, make_video: Callable[..., bytes]
) -> None:
    async def babble(request: AnalyseVideo) -> str:
        return "bla"

    async with ends(tmp_path, engine=babble) as here:
        with pytest.raises(ProtocolError, match="Expected `object`, got `str`"):
            await here.videos.answer("clip", io.BytesIO(make_video([RED] * 4)))


@pytest.mark.parametrize(
    ("stop", "error", "reason"),
    [
        (
            lambda here: here.server.aclose(),
            PeerLostError,
            r"the server \(pid \d+\) at .* was lost: it closed",
        ),
        (
            lambda here: cancel(here.serving),
            PeerLostError,
            "CancelledError: the server's handler was cancelled",
        ),
    ],
    ids=["closed", "cancelled"],
)
async def test_stopping_the_engine_ends_the_wait_for_an_answer(
    stop: Callable[[Ends], Awaitable[None]],
    error: type[Exception],
    reason: str,
    tmp_path: Path,
    make_video: Callable[..., bytes],
) -> None:
    taken = asyncio.Event()

    async def keep(request: AnalyseVideo) -> VideoAnalysis:
        taken.set()
        await anyio.sleep_forever()
        raise AssertionError("it waits until it is cancelled")

    async with ends(tmp_path, engine=keep) as here:
        answering = asyncio.create_task(here.videos.answer("clip", io.BytesIO(make_video([RED] * 4))))
        await taken.wait()
        await stop(here)
        with pytest.raises(error, match=reason):
            await answering


async def test_cancelling_an_upload_cancels_its_work_in_the_engine(
    tmp_path: Path, make_video: Callable[..., bytes]
) -> None:
    taken, ended = asyncio.Event(), asyncio.Event()

    async def keep(request: AnalyseVideo) -> VideoAnalysis:
        taken.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()
        raise AssertionError("it waits until it is cancelled")

    async with ends(tmp_path, engine=keep) as here:
        answering = asyncio.create_task(here.videos.answer("clip", io.BytesIO(make_video([RED] * 4))))
        await taken.wait()
        answering.cancel()
        await ended.wait()
        with pytest.raises(asyncio.CancelledError):
            await answering
        await sender_where(here.sender, lambda now: now.in_flight == now.bytes_in_use == 0)
