"""The decoder of the examples releases the memory of a batch that it could not fill."""

import io
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tests.examples.films import film
from videos import Decoder


class BrokenDisk(io.FileIO):
    """A file of which only the beginning can be read."""

    failure: Exception | None = None

    def read(self, size: int | None = -1, /) -> bytes:
        if self.tell() > 1 << 18:
            raise OSError("the disk is broken")
        return super().read(size)

    def give_up(self) -> None:
        """Do nothing."""


@pytest.mark.usefixtures("no_collections")
async def test_a_file_that_cannot_be_read_keeps_no_batch_in_memory(folder: Path) -> None:
    path = folder / "long.mkv"
    film(path, 150)
    async with Decoder(BrokenDisk(path)) as decoder:
        await decoder.open()
        batch = np.empty((150, 360, 640, 3), np.uint8)
        kept = weakref.ref(batch)
        with suppress(OSError):
            await decoder.read(batch)
            pytest.fail("the file could be read")
        del batch
    assert kept() is None
