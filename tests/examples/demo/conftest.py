import io
from collections.abc import Callable, Sequence

import av
import numpy as np
import pytest

Colour = tuple[int, int, int]


@pytest.fixture
def make_video() -> Callable[..., bytes]:
    """Encode a video of plain frames, each of the colour given."""

    def make(colours: Sequence[Colour], *, size: tuple[int, int] = (64, 48), container: str = "mp4") -> bytes:
        width, height = size
        file = io.BytesIO()
        with av.open(file, mode="w", format=container) as output:
            stream = output.add_stream("mpeg4", rate=25)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for colour in colours:
                pixels = np.full((height, width, 3), colour, np.uint8)
                output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            output.mux(stream.encode())
        return file.getvalue()

    return make
