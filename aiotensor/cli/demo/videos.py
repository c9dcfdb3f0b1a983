"""What the API server does with one uploaded video, apart from HTTP."""

import os
import time
from functools import partial
from typing import BinaryIO, NamedTuple

import anyio
import anyio.from_thread
import numpy as np
import torch

from aiotensor import SenderStatistics, TensorSender
from aiotensor.channel import MessageClient
from aiotensor.cli.demo.decode import (
    TIME_BYTES,
    DecodedVideo,
    VideoSize,
    decode,
    measure,
)
from aiotensor.cli.demo.fingerprint import fingerprint
from aiotensor.cli.demo.messages import (
    AnalyseVideo,
    Fingerprint,
    VideoAnalysis,
    VideoAnswer,
    WorkerReport,
)
from aiotensor.runtime.worker import in_thread

__all__ = ["Videos"]


class _Decoded(NamedTuple):
    video: DecodedVideo
    in_place: bool  # it lies in shared memory already
    decode_seconds: float
    memory_seconds: float


class _Facts(NamedTuple):
    """What is known of a video when it is sent."""

    fingerprints: tuple[Fingerprint, Fingerprint]
    bytes: int
    bytes_in_place: int
    decode_seconds: float
    memory_seconds: float


class Videos:
    """Decode uploads, hand them to the engine, and pass its answers on.

    Args:
        sender: an open sender to the engine.
        engine: an open client of the engine, with that sender.
    """

    def __init__(self, sender: TensorSender, engine: MessageClient[VideoAnalysis]) -> None:
        self._sender = sender
        self._engine = engine
        # Each request that has a permit uses one thread at most, so none of them waits for a thread.
        self._threads = anyio.CapacityLimiter(sender.statistics().max_concurrent_videos)
        self._videos = self._videos_in_place = self._bytes_in_place = 0

    def statistics(self) -> SenderStatistics:
        """Say what the sender holds now, and what it has done."""
        return self._sender.statistics()

    def report(self) -> WorkerReport:
        """Say what this process has done; also after the sender was closed."""
        return WorkerReport(
            pid=os.getpid(),
            videos=self._videos,
            videos_in_place=self._videos_in_place,
            bytes_in_place=self._bytes_in_place,
            sender=self._sender.statistics(),
        )

    async def answer(self, name: str, file: BinaryIO) -> VideoAnswer:
        """Find the scene cuts of one upload.

        Waits for a permit, then for the engine. Cancelling gives both back.

        Args:
            name: the file's name, for the answer.
            file: its bytes.

        Raises:
            VideoError: the file is no video, or is too large.
            AioTensorError: the engine did not answer.
        """
        # The permit is taken before decoding, so that `max_concurrent_videos` bounds the decoded videos
        # in memory, and not only those on their way. It is free again when the engine has the tensors.
        async with self._sender.message() as message:
            facts, request = await self._prepare(file)
            analysis = await self._engine.request(request, inside=message)
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

    async def _prepare(self, file: BinaryIO) -> tuple[_Facts, AnalyseVideo]:
        decoded = await self._decode(file)
        video = decoded.video
        facts = _Facts(
            fingerprints=await in_thread(_fingerprints, video, limiter=self._threads),
            bytes=video.times.nbytes + video.frames.nbytes,
            bytes_in_place=video.frames.nbytes if decoded.in_place else 0,
            decode_seconds=decoded.decode_seconds,
            memory_seconds=decoded.memory_seconds,
        )
        times, frames = torch.from_numpy(video.times), torch.from_numpy(video.frames)
        return facts, AnalyseVideo(times=times, frames=frames, sent_at=time.monotonic())

    async def _decode(self, file: BinaryIO) -> _Decoded:
        """Decode into shared memory, so that nothing is left to copy.

        If there are more frames than the file said, they come in memory of their own, and sending them
        makes a copy.
        """
        max_bytes = self._sender.statistics().arena_bytes
        began = time.monotonic()
        size = await in_thread(measure, file, limiter=self._threads)
        measured = time.monotonic()
        room = await self._room(size, max_bytes)
        allocated = time.monotonic()
        checkpoint = anyio.from_thread.check_cancelled
        work = partial(decode, file, max_bytes=max_bytes, into=room, checkpoint=checkpoint)
        video = await in_thread(work, limiter=self._threads)
        return _Decoded(
            video=video,
            in_place=np.may_share_memory(video.frames, room.frames),
            decode_seconds=measured - began + time.monotonic() - allocated,
            memory_seconds=allocated - measured,
        )

    async def _room(self, size: VideoSize, max_bytes: int) -> DecodedVideo:
        """Get shared memory for a video, as far as it may take any."""
        count = min(size.frames, max_bytes // size.frame_bytes)
        # Both in one piece: who has some memory and waits for more may wait for somebody who does the same.
        memory = await self._sender.allocate((count * size.frame_bytes,), torch.uint8)
        times = memory[: count * TIME_BYTES].view(torch.float64)
        frames = memory[count * TIME_BYTES :].view(count, size.height, size.width, 3)
        return DecodedVideo(frames=frames.numpy(), times=times.numpy())


def _fingerprints(video: DecodedVideo) -> tuple[Fingerprint, Fingerprint]:
    checkpoint = anyio.from_thread.check_cancelled
    return fingerprint(video.times, checkpoint), fingerprint(video.frames, checkpoint)
