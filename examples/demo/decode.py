"""Decode the bytes of a video file into two arrays. The functions block: call them in a thread.

`measure` returns the size of the decoded video, so that the caller can allocate the memory that `decode`
writes to, for example memory that it shares with another process.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

import av
import av.container
import av.video.stream
import numpy as np
from numpy.typing import NDArray

from demo.threads import Checkpoint, no_checkpoint

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

TIME_BYTES = 8  # the size of a timestamp


class VideoError(Exception):
    """The file cannot be decoded; the text states the reason."""


class EmptyVideoError(VideoError):
    """The file has no bytes."""


class UnreadableVideoError(VideoError):
    """The file is damaged, or is not a video."""


class VideoTooLargeError(VideoError):
    """The decoded frames would take more bytes than allowed."""


@dataclass(frozen=True, slots=True)
class VideoSize:
    """The size of a video, before it is decoded.

    Attributes:
        frames: the number of frames in the header. Decoding may find more or fewer.
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
        frames: uint8, (frames, height, width, 3), in RGB order.
        times: float64, (frames,), the presentation time of each frame in seconds.
    """

    frames: NDArray[np.uint8]
    times: NDArray[np.float64]


def measure(file: BinaryIO) -> VideoSize:
    """Return the size of a video, from its header and its first frame.

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
            packets += bool(packet.size)  # the last one is empty: it flushes the decoder
            if first is None:
                first = next(iter(packet.decode()), None)
            elif stream.frames:
                break
        if first is None:
            raise UnreadableVideoError("the video stream has no frames")
        # Some containers lack the number of frames. Nearly always each frame has its own packet.
        return VideoSize(frames=stream.frames or packets, height=first.height, width=first.width)


def decode(
    file: BinaryIO,
    *,
    max_bytes: int,
    into: DecodedVideo | None = None,
    checkpoint: Checkpoint = no_checkpoint,
) -> DecodedVideo:
    """Decode the first video stream of a file.

    Args:
        file: the file's bytes, readable and seekable; read from its start.
        max_bytes: the maximum size of the frames and timestamps together.
        into: arrays to decode into. The result is a view of them if they are long enough, and new arrays
            otherwise; new arrays by default.
        checkpoint: called before each frame.

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
        # A playlist may refer to other files and addresses, which an upload must not open.
        with av.open(file, mode="r", container_options={"protocol_whitelist": "none"}) as container:
            if not container.streams.video:
                raise UnreadableVideoError("the file has no video stream")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            yield container, stream
    except av.FFmpegError as error:
        raise UnreadableVideoError(f"the file is damaged, or is not a video ({error.strerror})") from error


def _decode_stream(
    container: av.container.InputContainer,
    stream: av.video.stream.VideoStream,
    max_bytes: int,
    into: DecodedVideo | None,
    checkpoint: Checkpoint,
) -> DecodedVideo:
    times: list[float] = []
    frames = np.empty((0, 0, 0, 3), np.uint8) if into is None else into.frames
    max_frames = 0
    for index, frame in enumerate(container.decode(stream)):
        checkpoint()
        if index == 0:
            max_frames = max_bytes // VideoSize(1, frame.height, frame.width).frame_bytes
            if into is None:
                # Only an estimate, since the number in the header may be missing or wrong.
                count = min(max(stream.frames, 1), max_frames)
                frames = np.empty((count, frame.height, frame.width, 3), np.uint8)
        if index == max_frames:
            raise VideoTooLargeError(
                f"with {index + 1} frames of {frame.width} x {frame.height} "
                f"the video exceeds the limit of {max_bytes} bytes"
            )
        if index == len(frames):
            frames = np.concatenate([frames, np.empty_like(frames[: max_frames - index])])
        # The size may change within a stream: all frames are scaled to the size of the first one.
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
