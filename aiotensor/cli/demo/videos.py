"""What the API server does with one uploaded video, apart from HTTP."""

import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import BinaryIO

import anyio.from_thread
import anyio.to_thread

from aiotensor import (
    ClosedError,
    DiscardedError,
    PeerLostError,
    SenderStatistics,
    TensorSender,
    TooLargeError,
)
from aiotensor.cli.demo.decode import DecodedVideo, EmptyVideoError, VideoError, VideoTooLargeError, decode
from aiotensor.cli.demo.engine_client import EngineClient, EngineError
from aiotensor.cli.demo.fingerprint import fingerprint
from aiotensor.cli.demo.messages import AnalyseVideo, Fingerprint, VideoAnswer

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
    send_began: float


class Videos:
    """Decode uploads, hand them to the engine, and pass its answers on.

    Args:
        sender: an open sender to the engine.
        engine: an open client of the engine.
    """

    def __init__(self, sender: TensorSender, engine: EngineClient) -> None:
        self._sender = sender
        self._engine = engine

    def statistics(self) -> SenderStatistics:
        """Say what the sender holds now, and what it has done."""
        return self._sender.statistics()

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
        return VideoAnswer(
            name=name,
            bytes=sent.bytes,
            decode_seconds=sent.decode_seconds,
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
            began = time.monotonic()
            video = await anyio.to_thread.run_sync(_decode, file, self._sender.statistics().arena_bytes)
            decoded = time.monotonic()
            fingerprints = await anyio.to_thread.run_sync(_fingerprints, video)
            send_began = time.monotonic()
            times = await message.send(video.times)
            frames = await message.send(video.frames)
        # The message is on its way only now, at the end of the block.
        return _Sent(
            request=AnalyseVideo(times=times, frames=frames),
            fingerprints=fingerprints,
            bytes=video.times.nbytes + video.frames.nbytes,
            decode_seconds=decoded - began,
            send_began=send_began,
        )


def _decode(file: BinaryIO, max_bytes: int) -> DecodedVideo:
    return decode(file, max_bytes=max_bytes, checkpoint=anyio.from_thread.check_cancelled)


def _fingerprints(video: DecodedVideo) -> tuple[Fingerprint, Fingerprint]:
    checkpoint = anyio.from_thread.check_cancelled
    return fingerprint(video.times, checkpoint), fingerprint(video.frames, checkpoint)
