"""Decode a video while it still arrives, and ask the engine about it batch by batch.

A video of 2 GB never needs 2 GB of memory: there are one batch of frames, in shared memory, and the piece of
the file that has just come. The decoder asks for the next piece when it has used up the last one, so a slow
engine makes the client upload more slowly.
"""

import asyncio
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, TypeVarTuple

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import av
import numpy as np
import torch
from messages import Batch, Summary

from aiotensor import TensorSender
from aiotensor.channel import MessageClient

BATCH_FRAMES = 32

# Of this process. Threads that decode wait for their clients, so they must not be those of FastAPI's `def`
# endpoints, which share anyio's default limiter, nor those that free what a decoder held.
_DECODING = anyio.CapacityLimiter(64)
_CLOSING = anyio.CapacityLimiter(4)

R = TypeVar("R")
Arguments = TypeVarTuple("Arguments")


class UnreadableVideoError(ValueError):
    """The file is no video, or is damaged."""


class Upload:
    """A file that is read while it arrives; in a thread of anyio.

    What has come stands in a temporary file, for formats that go back, or whose index is at the end: of such
    a file the last bytes are waited for first. Have the folder for temporary files on a disk, not in memory.

    Args:
        pieces: of the file, as they come.
        size: of the whole file, in bytes; None if nobody knows yet.
    """

    def __init__(self, pieces: AsyncIterator[bytes], size: int | None) -> None:
        self.failure: Exception | None = None  # the client hung up, or another error while it arrived
        self._pieces = pieces
        self._size = size
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it has no name, and `close` ends it
        self._here = self._position = 0
        self._is_whole = self._is_given_up = False
        self._waiting: anyio.CancelScope | None = None

    def read(self, size: int) -> bytes:
        """Return the next bytes, at most so many; none at the end, or after a failure."""
        while self._here <= self._position and not self._is_whole:
            self._wait_for_more()
        if self._is_given_up:
            return b""
        self._file.seek(self._position)
        part = self._file.read(size)
        self._position += len(part)
        return part

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a position, which may not be here yet."""
        if whence == os.SEEK_END:
            while self._size is None:
                self._wait_for_more()
            offset += self._size
        elif whence == os.SEEK_CUR:
            offset += self._position
        self._position = offset
        return offset

    def tell(self) -> int:
        """Say which byte is next."""
        return self._position

    def give_up(self) -> None:
        """Have the file end here, since nobody wants it any more; on the event loop."""
        self._is_given_up = True
        if self._waiting is not None:
            self._waiting.cancel()

    def close(self) -> None:
        """Let go of what has come."""
        self._file.close()

    def _wait_for_more(self) -> None:
        piece = anyio.from_thread.run(self._next_piece)
        if piece is None:
            self._is_whole, self._size = True, self._here
        else:
            self._file.seek(self._here)
            self._file.write(piece)
            self._here += len(piece)

    async def _next_piece(self) -> bytes | None:
        """Wait for the next piece; there is none at the end, after an error, and when this is cancelled.

        Nothing is raised here: the decoder could not pass it on, and what anyio raises in a thread leads to
        itself, so that the batch there would be kept until the garbage collector runs.
        """
        try:
            if not self._is_given_up:
                with anyio.CancelScope() as self._waiting:
                    return await anext(self._pieces, None)
        except asyncio.CancelledError:
            pass  # whoever waits for the thread is cancelled, too
        except Exception as error:  # noqa: BLE001 - `Decoder.check` raises it
            self.failure = error
        return None


class Decoder:
    """Decode an upload, a batch at a time. What blocks is to be called in a thread, by `_in_thread`."""

    def __init__(self, upload: Upload) -> None:
        # A task that asyncio cancels leaves its thread at work, and what that reads must not be closed yet.
        self._lock = threading.Lock()
        self._upload = upload
        self._video: av.container.InputContainer | None = None
        self._frames: Iterator[av.VideoFrame] = iter(())
        self._first: av.VideoFrame | None = None
        self._failure: Exception | None = None
        self.size = (0, 0)  # height and width, when it is open

    def open(self) -> None:
        """Read as far as the first frame. Blocks."""
        with self._lock, self._errors("this is no video"):
            # A playlist may name other files and addresses: an upload never makes us open one.
            self._video = av.open(self._upload, "r", container_options={"protocol_whitelist": "none"})
            self._frames = self._video.decode(video=0)
            self._first = next(self._frames)
            self.size = self._first.height, self._first.width

    def read(self, batch: np.ndarray) -> int:
        """Decode into a batch of shape (frames, height, width, 3), and return how many there were. Blocks."""
        count = 0
        with self._lock, self._errors("the video is damaged"):
            while count < len(batch) and (frame := self._next()) is not None:
                fitted = frame.reformat(width=batch.shape[2], height=batch.shape[1], format="rgb24")
                batch[count] = fitted.to_ndarray()
                count += 1
        return count

    def check(self) -> None:
        """Raise what was wrong with the upload or the video, once; on the event loop.

        Not in the thread, for the reason that `Upload._next_piece` has.
        """
        failure = self._upload.failure or self._failure
        self._upload.failure = self._failure = None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # it has this frame

    def close(self) -> None:
        """Let go of the decoder, and of the upload. Blocks."""
        with self._lock:
            self._frames, self._first = iter(()), None
            if self._video is not None:
                self._video.close()
            self._upload.close()

    def _next(self) -> av.VideoFrame | None:
        first, self._first = self._first, None
        return first or next(self._frames, None)

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except (av.FFmpegError, IndexError, StopIteration) as error:
            self._failure = UnreadableVideoError(f"{what}: {error}")


async def colours(upload: Upload, sender: TensorSender, client: MessageClient[Summary]) -> list[list[float]]:
    """Ask the engine for the mean colour of each frame of a video.

    Cancelling gives everything back; the engine stops working on it, too.

    Args:
        upload: the file; it is closed in the end.
        sender: to the engine.
        client: of the engine, with that sender.
    """
    decoder = Decoder(upload)
    found: list[list[float]] = []
    try:
        await _in_thread(decoder, decoder.open)
        while more := await _next_colours(decoder, sender, client):
            found += more
    finally:
        upload.give_up()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(decoder.close, limiter=_CLOSING)
    return found


async def _in_thread(decoder: Decoder, work: Callable[[*Arguments], R], *arguments: *Arguments) -> R:
    """Have the decoder do something in a thread, and raise what was wrong."""
    result = await anyio.to_thread.run_sync(work, *arguments, limiter=_DECODING)
    await anyio.lowlevel.checkpoint_if_cancelled()  # or what had come by then would be taken for all
    decoder.check()
    return result


async def _next_colours(
    decoder: Decoder, sender: TensorSender, client: MessageClient[Summary]
) -> list[list[float]]:
    """Ask for those of the next batch; there are none at the end of the video.

    A function of its own, so that the memory of a batch is free before somebody waits for the next one:
    videos that hold one and wait for another would wait for each other.
    """
    # First a permit, then memory, then the frames: what is decoded is bounded, and not only what is sent.
    async with sender.message() as permit:
        frames = await permit.allocate((BATCH_FRAMES, *decoder.size, 3), torch.uint8)
        count = await _in_thread(decoder, decoder.read, frames.numpy())
        if not count:
            return []
        summary = await client.request(Batch(frames[:count]), inside=permit)
    return summary.colours.tolist()
