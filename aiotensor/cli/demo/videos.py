"""What the API server does with one uploaded video, apart from HTTP."""

import os
import time
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import BinaryIO, NamedTuple

import anyio.from_thread
import anyio.to_thread
import numpy as np
import torch

from aiotensor import (
    ClosedError,
    DiscardedError,
    PeerLostError,
    SenderStatistics,
    TensorSender,
    TooLargeError,
    WouldBlockError,
)
from aiotensor.cli.demo.decode import (
    TIME_BYTES,
    DecodedVideo,
    EmptyVideoError,
    VideoError,
    VideoSize,
    VideoTooLargeError,
    decode,
    measure,
)
from aiotensor.cli.demo.engine_client import EngineClient, EngineError
from aiotensor.cli.demo.fingerprint import fingerprint
from aiotensor.cli.demo.messages import AnalyseVideo, Fingerprint, VideoAnswer, WorkerReport

__all__ = ["Refusal", "Videos"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an upload gets no answer, and with which HTTP status."""

    status: HTTPStatus
    reason: str


@dataclass(frozen=True, slots=True)
class _Sent:
    request: AnalyseVideo
    fingerprints: tuple[Fingerprint, Fingerprint]
    bytes: int
    decode_seconds: float
    memory_seconds: float
    send_began: float


class _Decoded(NamedTuple):
    video: DecodedVideo
    in_place: bool  # it lies in shared memory already
    decode_seconds: float
    memory_seconds: float


class Videos:
    """Decode uploads, hand them to the engine, and pass its answers on.

    Args:
        sender: an open sender to the engine.
        engine: an open client of the engine.
    """

    def __init__(self, sender: TensorSender, engine: EngineClient) -> None:
        self._sender = sender
        self._engine = engine
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

    async def answer(self, name: str, file: BinaryIO) -> VideoAnswer | Refusal:
        """Find the scene cuts of one upload.

        Waits for a permit, then for the engine. Cancelling gives both back.

        Args:
            name: the file's name, for the answer.
            file: its bytes.
        """
        try:
            sent = await self._hand_over(file)
            try:
                analysis = await self._engine.analyse(sent.request)
            except BaseException:  # also when cancelled: then nobody wants the tensors any more
                self._sender.discard(sent.request.frames)
                raise
        except EmptyVideoError as error:
            return Refusal(HTTPStatus.BAD_REQUEST, str(error))
        except (VideoTooLargeError, TooLargeError) as error:
            return Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error))
        except VideoError as error:
            return Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        except EngineError as error:
            return Refusal(HTTPStatus.BAD_GATEWAY, f"the engine failed: {error}")
        except (PeerLostError, DiscardedError, ClosedError) as error:
            return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, f"the engine cannot be reached: {error}")
        except WouldBlockError as error:
            return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, f"too many videos at once: {error}")
        return VideoAnswer(
            name=name,
            worker=os.getpid(),
            bytes=sent.bytes,
            decode_seconds=sent.decode_seconds,
            memory_seconds=sent.memory_seconds,
            transport_seconds=analysis.received_at - sent.send_began - analysis.queued_seconds,
            model_seconds=analysis.model_seconds,
            sent=sent.fingerprints,
            received=(analysis.times, analysis.frames),
            cuts=analysis.cuts,
        )

    async def _hand_over(self, file: BinaryIO) -> _Sent:
        # The permit is taken before decoding, so that `max_concurrent_videos` bounds the decoded videos
        # in memory, and not only those on their way. The arrays are gone when this returns.
        async with self._sender.message() as message:
            decoded = await self._decode(file)
            video = decoded.video
            fingerprints = await anyio.to_thread.run_sync(_fingerprints, video)
            send_began = time.monotonic()
            times = await message.send(video.times)
            frames = await message.send(video.frames)
        # The message is on its way only now, at the end of the block.
        nbytes = video.times.nbytes + video.frames.nbytes
        self._videos += 1
        if decoded.in_place:
            self._videos_in_place += 1
            self._bytes_in_place += nbytes
        return _Sent(
            request=AnalyseVideo(times=times, frames=frames),
            fingerprints=fingerprints,
            bytes=nbytes,
            decode_seconds=decoded.decode_seconds,
            memory_seconds=decoded.memory_seconds,
            send_began=send_began,
        )

    async def _decode(self, file: BinaryIO) -> _Decoded:
        """Decode into shared memory, so that nothing is left to copy.

        If there are more frames than the file said, they come in memory of their own, and sending them
        makes a copy.
        """
        max_bytes = self._sender.statistics().arena_bytes
        began = time.monotonic()
        size = await anyio.to_thread.run_sync(measure, file)
        measured = time.monotonic()
        room = await self._room(size, max_bytes)
        allocated = time.monotonic()
        checkpoint = anyio.from_thread.check_cancelled
        work = partial(decode, file, max_bytes=max_bytes, into=room, checkpoint=checkpoint)
        video = await anyio.to_thread.run_sync(work)
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
