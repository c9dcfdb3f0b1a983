"""Generated videos for the examples, and their frames."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np


def film(
    path: Path,
    frames: int,
    *,
    height: int = 360,
    width: int = 640,
    container: str = "matroska",
    codec: str = "mpeg4",
    noisy_rows: int = 0,
    **options: str,
) -> None:
    """Make a video; rows that are noise make the file large. The options are those of the container."""
    rows, columns = np.mgrid[0:height, 0:width].astype(np.uint8)
    first = np.stack([rows, columns, rows + columns], axis=2)
    random = np.random.default_rng(0)
    with av.open(str(path), "w", format=container, options=options) as video:
        stream = video.add_stream(codec, rate=30, options={"preset": "ultrafast"})
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = width, height, "yuv420p", 8_000_000
        stream.time_base = Fraction(1, 30)
        for number in range(frames):
            picture = first + np.uint8(number % 256)
            picture[:noisy_rows] = random.integers(0, 256, (noisy_rows, width, 3), np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                video.mux(packet)
        for packet in stream.encode(None):
            video.mux(packet)


def is_right(path: Path, answer: list[list[float]]) -> bool:
    """Return whether an answer has the mean colour of each frame of a file."""
    with av.open(str(path)) as video:
        means = [frame.to_ndarray(format="rgb24").mean(axis=(0, 1)) for frame in video.decode(video=0)]
    return np.shape(answer) == np.shape(means) and np.allclose(answer, means, atol=0.01)
