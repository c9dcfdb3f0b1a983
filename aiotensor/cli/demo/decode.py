"""Turn the bytes of a video file into two arrays. No asyncio: call it in a worker thread.

`measure` says how much room the frames need, so that the caller can give `decode` memory to put them
into, for example memory that it shares with another process.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

import av
import av.container
import av.video.stream
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "TIME_BYTES",
    "DecodedVideo",
    "EmptyVideoError",
    "UnreadableVideoError",
    "VideoError",
    "VideoSize",
    "VideoTooLargeError",
    "decode",
    "measure",
]

TIME_BYTES = 8  # of one timestamp


class VideoError(Exception):
    """This file cannot be turned into a video; the text says why."""


class EmptyVideoError(VideoError):
    """The file has no bytes."""


class UnreadableVideoError(VideoError):
    """The file is damaged, or no video."""


class VideoTooLargeError(VideoError):
    """The decoded frames would take more bytes than allowed."""


@dataclass(frozen=True, slots=True)
class VideoSize:
    """How large a video is, before it is decoded.

    Attributes:
        frames: how many frames there seem to be. Decoding may find more or fewer.
        height: of each frame, in pixels.
        width: of each frame, in pixels.
    """

    frames: int
    height: int
    width: int

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame and its timestamp."""
        return self.height * self.width * 3 + TIME_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of all frames and timestamps."""
        return self.frames * self.frame_bytes


@dataclass(frozen=True, slots=True)
class DecodedVideo:
    """The frames and timestamps of one video.

    Attributes:
        frames: uint8, (frames, height, width, 3), red before green before blue.
        times: float64, (frames,), the presentation time of each frame in seconds.
    """

    frames: NDArray[np.uint8]
    times: NDArray[np.float64]


def measure(file: BinaryIO) -> VideoSize:
    """Find out how large a video is, by its header and its first frame.

    Args:
        file: the file's bytes, readable and seekable; read from its start.

    Raises:
        EmptyVideoError: the file has no bytes.
        UnreadableVideoError: the file is damaged, or has no video stream, or no frames.
    """
    with _opened(file) as (container, stream):
        first: av.VideoFrame | None = None
        packets = 0
        for packet in container.demux(stream):
            packets += bool(packet.size)  # the last packet is empty: it asks for what was held back
            if first is None:
                first = next(iter(packet.decode()), None)
            elif stream.frames:
                break
        if first is None:
            raise UnreadableVideoError("the video stream has no frames")
        # Not every container says how many frames there are. Nearly always each has its own packet.
        return VideoSize(frames=stream.frames or packets, height=first.height, width=first.width)


def decode(
    file: BinaryIO,
    *,
    max_bytes: int,
    into: DecodedVideo | None = None,
    checkpoint: Callable[[], None] = lambda: None,
) -> DecodedVideo:
    """Decode the first video stream of a file.

    Args:
        file: the file's bytes, readable and seekable; read from its start.
        max_bytes: the most bytes that frames and timestamps may take.
        into: arrays to decode into. If they are long enough, the result is the beginning of them; else
            it has memory of its own, as without them.
        checkpoint: called before each frame, and may raise to give up.

    Raises:
        EmptyVideoError: the file has no bytes.
        UnreadableVideoError: the file is damaged, or has no video stream, or no frames.
        VideoTooLargeError: the video needs more than `max_bytes`.
    """
    with _opened(file) as (container, stream):
        return _decode_stream(container, stream, max_bytes, into, checkpoint)


@contextmanager
def _opened(
    file: BinaryIO,
) -> Iterator[tuple[av.container.InputContainer, av.video.stream.VideoStream]]:
    if file.seek(0, io.SEEK_END) == 0:
        raise EmptyVideoError("the file is empty")
    file.seek(0)
    try:
        # A playlist may name other files and addresses: an upload never makes us open one.
        with av.open(file, mode="r", container_options={"protocol_whitelist": "none"}) as container:
            if not container.streams.video:
                raise UnreadableVideoError("the file has no video stream")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            yield container, stream
    except av.FFmpegError as error:
        raise UnreadableVideoError(f"the file is damaged, or no video ({error.strerror})") from error


def _decode_stream(
    container: av.container.InputContainer,
    stream: av.video.stream.VideoStream,
    max_bytes: int,
    into: DecodedVideo | None,
    checkpoint: Callable[[], None],
) -> DecodedVideo:
    times: list[float] = []
    frames = np.empty((0, 0, 0, 3), np.uint8) if into is None else into.frames
    room = 0
    for index, frame in enumerate(container.decode(stream)):
        checkpoint()
        if index == 0:
            room = max_bytes // VideoSize(1, frame.height, frame.width).frame_bytes
            if into is None:
                # What the header says is only a hint: it may be missing, or a lie.
                frames = np.empty((min(max(stream.frames, 1), room), frame.height, frame.width, 3), np.uint8)
        if index == room:
            raise VideoTooLargeError(
                f"with {index + 1} frames of {frame.width} x {frame.height} "
                f"the video takes more than the {max_bytes} bytes allowed"
            )
        if index == len(frames):
            frames = np.concatenate([frames, np.empty_like(frames[: room - index])])
        # A stream may change its size on the way: every frame takes the size of the first one.
        same_size = frame.reformat(width=frames.shape[2], height=frames.shape[1], format="rgb24")
        frames[index] = same_size.to_ndarray()
        times.append(_seconds(frame.time, index, stream))
    if not times:
        raise UnreadableVideoError("the video stream has no frames")
    if into is None or len(times) > len(into.frames):
        return DecodedVideo(frames=frames[: len(times)], times=np.array(times, np.float64))
    into.times[: len(times)] = times
    return DecodedVideo(frames=frames[: len(times)], times=into.times[: len(times)])


def _seconds(time: float | None, index: int, stream: av.video.stream.VideoStream) -> float:
    if time is not None:
        return time
    if not stream.average_rate:
        raise UnreadableVideoError("the video has neither timestamps nor a frame rate")
    return float(index / stream.average_rate)
