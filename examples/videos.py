"""Decode videos, and ask the engine about them batch by batch.

A video of 2 GB never needs 2 GB of memory: its decoder holds one batch of frames, in shared memory, and one
chunk of the file. It asks for the next chunk when it has used up the last one, so a slow engine slows the
upload down.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, Self, TypeVar, TypeVarTuple

import anyio
import anyio.lowlevel
import anyio.to_thread
import av
import numpy as np
import torch

from aiotensor import MessageClient, WouldBlockError
from messages import Batch, Summary

MAX_BATCH_FRAMES = 32

# Before version 19, PyAV refuses a video whose metadata is not UTF-8, unless it may replace the characters.
LENIENT: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}

R = TypeVar("R")
Arguments = TypeVarTuple("Arguments")


class UnreadableVideoError(ValueError):
    """The file is no video, or is damaged."""


class Admission:
    """Admit a limited number of videos at once: ``async with admission:``.

    A video keeps a decoder, a thread and perhaps a temporary file until its end. The client's permits do not
    bound these: each batch is a request with its own permit, and videos that wait for one would keep their
    decoders. A video that waits for admission has none of these, and has not been read. With as many videos
    at once as the client has permits, a permit is free for each of their batches.

    Args:
        limit: the number of videos at once, such as the client's `max_concurrent_videos`.
        max_wait_s: seconds after which waiting raises `WouldBlockError`; servers answer it with 503.
    """

    def __init__(self, limit: int, max_wait_s: float) -> None:
        self._free = asyncio.Semaphore(limit)
        self._max_wait_s = max_wait_s

    async def __aenter__(self) -> None:
        try:
            async with asyncio.timeout(self._max_wait_s):
                await self._free.acquire()
        except TimeoutError:
            raise WouldBlockError(f"no other video ended within {self._max_wait_s:g} s") from None

    async def __aexit__(self, *_: object) -> None:
        self._free.release()


class Source(Protocol):
    """A file object that a decoder reads in a thread.

    Attributes:
        failure: the reason why the file ended too early, if it did.
    """

    failure: Exception | None

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes, and none at the end. Blocks."""

    def seekable(self) -> bool:
        """Return whether it has `seek` and `tell`."""

    def give_up(self) -> None:
        """End a `read` that waits in another thread."""

    def close(self) -> None:
        """Release the file."""


class Decoder:
    """Decode a video in a thread, and close its file at the end of an ``async with`` block."""

    def __init__(self, source: Source) -> None:
        # A thread waits for the client's next bytes. anyio's default limiter is for threads that end soon.
        self._limiter = anyio.CapacityLimiter(1)
        # A task that asyncio cancels does not wait for its thread, which uses what `__aexit__` closes.
        self._lock = threading.Lock()
        self._source = source
        self._container: av.container.InputContainer | None = None
        self._frames: Iterator[av.VideoFrame] = iter(())
        self._failure: Exception | None = None
        self.height = self.width = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._source.give_up()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._close, limiter=self._limiter)

    async def open(self) -> None:
        """Decode the first frame.

        Raises:
            UnreadableVideoError: the file is no video.
            Exception: the file could not be read, such as for a client that disconnected.
        """
        await self._in_thread(self._open)

    async def read(self, batch: np.ndarray) -> int:
        """Decode the next frames, and return their number, which is 0 at the end.

        Args:
            batch: an array for the frames, of shape (frames, height, width, 3).

        Raises:
            UnreadableVideoError: the video is damaged.
            Exception: the file could not be read, such as for a client that disconnected.
        """
        return await self._in_thread(self._read, batch)

    async def _in_thread(self, work: Callable[[*Arguments], R], *arguments: *Arguments) -> R:
        result = await anyio.to_thread.run_sync(work, *arguments, limiter=self._limiter)
        await anyio.lowlevel.checkpoint_if_cancelled()  # a cancelled upload ends too early, too
        # Errors are raised here for the reason that `Upload._next_chunk` states.
        failure = self._source.failure or self._failure
        self._source.failure = self._failure = None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback refers to this frame
        return result

    def _open(self) -> None:
        hint = "" if self._source.seekable() else "; without a known size, its index must be at the start"
        with self._lock, self._errors("this is no video", hint):
            self._container = av.open(
                self._source,
                "r",
                **LENIENT,
                container_options={"protocol_whitelist": "none"},  # a playlist must not open other files
            )
            if not self._container.streams.video:
                self._failure = UnreadableVideoError("the file has no video stream")
                return
            frames = self._container.decode(video=0)
            first = next(frames, None)
            if first is None:
                self._failure = UnreadableVideoError("the video ends before its first frame")
                return
            self.height, self.width = first.height, first.width
            self._frames = itertools.chain([first], frames)

    def _read(self, batch: np.ndarray) -> int:
        count = 0
        with self._lock, self._errors("the video is damaged"):
            for frame in itertools.islice(self._frames, len(batch)):
                fitted = frame.reformat(width=batch.shape[2], height=batch.shape[1], format="rgb24")
                batch[count] = fitted.to_ndarray()
                count += 1
        return count

    def _close(self) -> None:
        with self._lock:
            self._frames = iter(())
            if self._container is not None:
                self._container.close()
            self._source.close()

    @contextmanager
    def _errors(self, problem: str, hint: str = "") -> Iterator[None]:
        try:
            yield
        except av.FFmpegError as error:
            self._failure = UnreadableVideoError(f"{problem}: {error.strerror}{hint}")
        except OSError as error:  # such as for a full disk
            self._failure = error.with_traceback(None)


async def colours(source: Source, client: MessageClient[Summary]) -> list[list[float]]:
    """Return the mean colour of each frame of a video, as found by the engine.

    Call it for an admitted video. Cancelling stops the decoder and the engine, and releases the memory.

    Args:
        source: the file; this closes it.
        client: a client of the engine.

    Raises:
        UnreadableVideoError: the file is no video, or is damaged.
        Exception: the file could not be read, such as for a client that disconnected; and the errors of
            `MessageClient.request`.
    """
    found: list[list[float]] = []
    async with Decoder(source) as decoder:
        await decoder.open()
        while more := await _next_colours(decoder, client):
            found += more
    return found


async def _next_colours(decoder: Decoder, client: MessageClient[Summary]) -> list[list[float]]:
    """Return the colours of the next batch; none at the end of the video.

    A separate function, so that the memory of a batch is free before the next one is allocated.
    """
    limits = client.statistics()
    share = limits.arena_bytes // limits.max_concurrent_videos
    frame_bytes = decoder.height * decoder.width * 3
    batch_frames = min(max(share // frame_bytes, 1), MAX_BATCH_FRAMES)
    async with client.permit() as permit:
        frames = await permit.allocate((batch_frames, decoder.height, decoder.width, 3), torch.uint8)
        count = await decoder.read(frames.numpy())
        if not count:
            return []
        summary = await client.request(Batch(frames[:count]), inside=permit)
    return summary.colours.tolist()
