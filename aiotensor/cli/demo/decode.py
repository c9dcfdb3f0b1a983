"""Turn the bytes of a video file into two arrays. No asyncio: call it in a worker thread."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

import av
import av.container
import av.video.stream
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "DecodedVideo",
    "EmptyVideoError",
    "UnreadableVideoError",
    "VideoError",
    "VideoTooLargeError",
    "decode",
]


class VideoError(Exception):
    """This file cannot be turned into a video; the text says why."""


class EmptyVideoError(VideoError):
    """The file has no bytes."""


class UnreadableVideoError(VideoError):
    """The file is damaged, or no video."""


class VideoTooLargeError(VideoError):
    """The decoded frames would take more bytes than allowed."""


@dataclass(frozen=True, slots=True)
class DecodedVideo:
    """The frames and timestamps of one video.

    Attributes:
        frames: uint8, (frames, height, width, 3), red before green before blue.
        times: float64, (frames,), the presentation time of each frame in seconds.
    """

    frames: NDArray[np.uint8]
    times: NDArray[np.float64]


def decode(file: BinaryIO, *, max_bytes: int, checkpoint: Callable[[], None] = lambda: None) -> DecodedVideo:
    """Decode the first video stream of a file.

    Args:
        file: the file's bytes, readable and seekable; read from its start.
        max_bytes: the most bytes that the decoded frames may take.
        checkpoint: called before each frame, and may raise to give up.

    Raises:
        EmptyVideoError: the file has no bytes.
        UnreadableVideoError: the file is damaged, or has no video stream, or no frames.
        VideoTooLargeError: the frames need more than `max_bytes`.
    """
    if file.seek(0, io.SEEK_END) == 0:
        raise EmptyVideoError("the file is empty")
    file.seek(0)
    try:
        # A playlist may name other files and addresses: an upload never makes us open one.
        with av.open(file, mode="r", container_options={"protocol_whitelist": "none"}) as container:
            if not container.streams.video:
                raise UnreadableVideoError("the file has no video stream")
            return _decode_stream(container, container.streams.video[0], max_bytes, checkpoint)
    except av.FFmpegError as error:
        raise UnreadableVideoError(f"the file is damaged, or no video ({error.strerror})") from error


def _decode_stream(
    container: av.container.InputContainer,
    stream: av.video.stream.VideoStream,
    max_bytes: int,
    checkpoint: Callable[[], None],
) -> DecodedVideo:
    stream.thread_type = "AUTO"
    times: list[float] = []
    frames = np.empty((0, 0, 0, 3), np.uint8)
    room = 0
    for index, frame in enumerate(container.decode(stream)):
        checkpoint()
        if index == 0:
            room = max_bytes // (frame.height * frame.width * 3)
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
    return DecodedVideo(frames=frames[: len(times)], times=np.array(times, np.float64))


def _seconds(time: float | None, index: int, stream: av.video.stream.VideoStream) -> float:
    if time is not None:
        return time
    if not stream.average_rate:
        raise UnreadableVideoError("the video has neither timestamps nor a frame rate")
    return float(index / stream.average_rate)
