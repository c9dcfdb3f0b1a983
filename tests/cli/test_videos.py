"""What a worker does with a video, between a real sender and a real receiver in one process."""

import asyncio
import io
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path

import pytest

from aiotensor import TensorReceiver, TensorSender
from aiotensor.cli.demo import videos as room
from aiotensor.cli.demo.decode import VideoSize, decode, measure
from aiotensor.cli.demo.engine_client import EngineClient
from aiotensor.cli.demo.fingerprint import fingerprint
from aiotensor.cli.demo.messages import AnalyseVideo, VideoAnalysis, VideoAnswer
from aiotensor.cli.demo.videos import Refusal, Videos

RED, BLUE = (220, 20, 20), (20, 20, 220)


class Engine(EngineClient):
    """Answers in this process, with what arrived."""

    def __init__(self, receiver: TensorReceiver) -> None:
        self._receiver = receiver

    async def analyse(self, request: AnalyseVideo) -> VideoAnalysis:
        times = await self._receiver.receive(request.times)
        frames = await self._receiver.receive(request.frames)
        return VideoAnalysis(
            times=fingerprint(times.numpy()),
            frames=fingerprint(frames.numpy()),
            cuts=[],
            received_at=time.monotonic(),
            queued_seconds=0.0,
            model_seconds=0.0,
        )


@asynccontextmanager
async def worker(folder: Path, arena_bytes: int) -> AsyncIterator[Videos]:
    address = f"unix://{folder}/tensors.sock"
    async with (
        TensorReceiver(address) as receiver,
        TensorSender(address, max_concurrent_videos=3, arena_bytes=arena_bytes) as sender,
    ):
        yield Videos(sender, Engine(receiver))


def assert_arrived(answer: VideoAnswer | Refusal, file: bytes) -> None:
    assert isinstance(answer, VideoAnswer)
    video = decode(io.BytesIO(file), max_bytes=1 << 30)
    assert answer.sent == answer.received == (fingerprint(video.times), fingerprint(video.frames))
    assert answer.bytes == video.times.nbytes + video.frames.nbytes


async def test_a_video_is_decoded_where_the_engine_reads_it_with_no_room_for_a_copy(
    tmp_path: Path, make_video: Callable[..., bytes]
) -> None:
    file = make_video([RED] * 10 + [BLUE] * 8)
    nbytes = measure(io.BytesIO(file)).nbytes

    async with worker(tmp_path, arena_bytes=nbytes) as videos:
        answer = await videos.answer("clip", io.BytesIO(file))
        report = videos.report()

    assert_arrived(answer, file)
    assert (report.videos, report.videos_in_place, report.bytes_in_place) == (1, 1, nbytes)
    assert report.sender.bytes_sent == nbytes
    assert report.sender.peak_bytes_in_use == nbytes


async def test_videos_take_turns_in_memory_that_holds_one(
    tmp_path: Path, make_video: Callable[..., bytes]
) -> None:
    file = make_video([RED] * 6)
    nbytes = measure(io.BytesIO(file)).nbytes

    async with worker(tmp_path, arena_bytes=nbytes) as videos:
        answers = await asyncio.gather(*(videos.answer("clip", io.BytesIO(file)) for _ in range(6)))
        report = videos.report()

    for answer in answers:
        assert_arrived(answer, file)
    assert report.videos_in_place == 6
    assert report.sender.peak_in_flight == 3
    assert report.sender.peak_bytes_in_use == nbytes


@pytest.mark.parametrize(("announced", "in_place"), [(3, 0), (7, 1), (1_000_000, 1)])
async def test_a_header_that_names_another_number_of_frames_does_no_harm(
    announced: int,
    in_place: int,
    tmp_path: Path,
    make_video: Callable[..., bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = make_video([RED] * 3 + [BLUE] * 4)
    monkeypatch.setattr(room, "measure", lambda _: VideoSize(frames=announced, height=48, width=64))

    async with worker(tmp_path, arena_bytes=1 << 20) as videos:
        answer = await videos.answer("clip", io.BytesIO(file))
        again = await videos.answer("clip", io.BytesIO(file))
        report = videos.report()

    assert_arrived(answer, file)
    assert_arrived(again, file)
    assert (report.videos, report.videos_in_place) == (2, 2 * in_place)


async def test_a_video_that_can_never_fit_is_refused_as_too_large_and_holds_nothing(
    tmp_path: Path, make_video: Callable[..., bytes]
) -> None:
    file = make_video([RED] * 10)

    for limit in (measure(io.BytesIO(file)).nbytes - 1, 1000):
        async with worker(tmp_path, arena_bytes=limit) as videos:
            answer = await videos.answer("clip", io.BytesIO(file))
            await asyncio.sleep(0)
            report = videos.report()

        assert isinstance(answer, Refusal)
        assert answer.status is HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        assert "takes more than" in answer.reason
        assert (report.videos, report.sender.in_flight) == (0, 0)
