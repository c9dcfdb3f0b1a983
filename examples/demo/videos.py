"""Decode an uploaded video, and send it to the engine."""

import os
import time
from functools import partial
from typing import BinaryIO, NamedTuple

import numpy as np
import torch

from aiotensor import MessageClient, Permit
from aiotensor.channel import ClientStatistics
from demo.decode import (
    TIME_BYTES,
    DecodedVideo,
    VideoSize,
    decode,
    measure,
)
from demo.fingerprint import fingerprint
from demo.messages import (
    AnalyseVideo,
    Fingerprint,
    VideoAnalysis,
    VideoAnswer,
    WorkerReport,
)
from demo.threads import Checkpoint, in_thread

__all__ = ["Videos"]


class _Decoded(NamedTuple):
    video: DecodedVideo
    in_place: bool  # whether the frames are in shared memory
    decode_seconds: float
    memory_seconds: float


class _Facts(NamedTuple):
    """The measurements of a video before it is sent."""

    fingerprints: tuple[Fingerprint, Fingerprint]
    bytes: int
    bytes_in_place: int
    decode_seconds: float
    memory_seconds: float


class Videos:
    """Decode uploads, send them to the engine, and return its answers.

    Args:
        engine: an open client of the engine.
    """

    def __init__(self, engine: MessageClient[VideoAnalysis]) -> None:
        self._engine = engine
        self._videos = self._videos_in_place = self._bytes_in_place = 0

    def statistics(self) -> ClientStatistics:
        """Return the statistics of the client."""
        return self._engine.statistics()

    def report(self) -> WorkerReport:
        """Return the counts of this process, even after the client was closed."""
        return WorkerReport(
            pid=os.getpid(),
            videos=self._videos,
            videos_in_place=self._videos_in_place,
            bytes_in_place=self._bytes_in_place,
            client=self._engine.statistics(),
        )

    async def answer(self, name: str, file: BinaryIO) -> VideoAnswer:
        """Return the scene cuts of an upload.

        Waits for a permit, and then for the engine. Cancelling releases the permit and the memory, and the
        engine stops its analysis.

        Args:
            name: the name of the file.
            file: the file; the caller may close it after this call, even a cancelled one.

        Raises:
            VideoError: the file is not a video, or is too large.
            AioTensorError: the engine did not answer.
        """
        # The permit is acquired before decoding, so that `max_concurrent_videos` also limits the videos that
        # are decoded at once. It is released when the engine has taken the request.
        async with self._engine.permit() as permit:
            facts, request = await self._prepare(file, permit)
            analysis = await self._engine.request(request, inside=permit)
        self._videos += 1
        self._videos_in_place += facts.bytes_in_place > 0
        self._bytes_in_place += facts.bytes_in_place
        return VideoAnswer(
            name=name,
            worker=os.getpid(),
            bytes=facts.bytes,
            decode_seconds=facts.decode_seconds,
            memory_seconds=facts.memory_seconds,
            transport_seconds=analysis.transport_seconds,
            model_seconds=analysis.model_seconds,
            sent=facts.fingerprints,
            received=(analysis.times, analysis.frames),
            cuts=analysis.cuts,
        )

    async def _prepare(self, file: BinaryIO, permit: Permit) -> tuple[_Facts, AnalyseVideo]:
        decoded = await self._decode(file, permit)
        video = decoded.video
        facts = _Facts(
            fingerprints=await in_thread(partial(_fingerprints, video)),
            bytes=video.times.nbytes + video.frames.nbytes,
            bytes_in_place=video.frames.nbytes if decoded.in_place else 0,
            decode_seconds=decoded.decode_seconds,
            memory_seconds=decoded.memory_seconds,
        )
        times, frames = torch.from_numpy(video.times), torch.from_numpy(video.frames)
        return facts, AnalyseVideo(times=times, frames=frames, sent_at=time.monotonic())

    async def _decode(self, file: BinaryIO, permit: Permit) -> _Decoded:
        """Decode into shared memory, so that sending copies nothing.

        If there are more frames than the header states, they are decoded into other memory, and sending them
        copies them.
        """
        max_bytes = self._engine.statistics().arena_bytes
        began = time.monotonic()
        size = await in_thread(lambda _: measure(file))
        measured = time.monotonic()
        shared = await _allocate(permit, size, max_bytes)
        allocated = time.monotonic()
        video = await in_thread(
            lambda checkpoint: decode(file, max_bytes=max_bytes, into=shared, checkpoint=checkpoint)
        )
        return _Decoded(
            video=video,
            in_place=np.may_share_memory(video.frames, shared.frames),
            decode_seconds=measured - began + time.monotonic() - allocated,
            memory_seconds=allocated - measured,
        )


async def _allocate(permit: Permit, size: VideoSize, max_bytes: int) -> DecodedVideo:
    """Allocate shared memory for a video, within the limit."""
    count = min(size.frames, max_bytes // size.frame_bytes)
    # A single allocation: requests that hold memory and wait for more could wait for each other.
    memory = await permit.allocate((count * size.frame_bytes,), torch.uint8)
    times = memory[: count * TIME_BYTES].view(torch.float64)
    frames = memory[count * TIME_BYTES :].view(count, size.height, size.width, 3)
    return DecodedVideo(frames=frames.numpy(), times=times.numpy())


def _fingerprints(video: DecodedVideo, checkpoint: Checkpoint) -> tuple[Fingerprint, Fingerprint]:
    return fingerprint(video.times, checkpoint), fingerprint(video.frames, checkpoint)
