"""Checksums, taken on both sides, that show whether a tensor arrived as it was sent."""

import zlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from aiotensor.cli.demo.messages import Fingerprint

__all__ = ["fingerprint"]

STRIDE = 1 << 24  # bytes between two checkpoints: a few milliseconds of work


def fingerprint(array: NDArray[np.generic], checkpoint: Callable[[], None] = lambda: None) -> Fingerprint:
    """Describe an array and the bytes in it. Takes a while: call it in a worker thread.

    CRC-32 rather than a cryptographic hash: it is several times faster, so that the demo times the
    transport and not its own proof, and nobody here forges videos.

    Args:
        array: any shape and dtype; copied only if it is not contiguous.
        checkpoint: called now and then, and may raise to give up.
    """
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    checksum = 0
    for start in range(0, len(data), STRIDE):
        checkpoint()
        checksum = zlib.crc32(data[start : start + STRIDE], checksum)
    return Fingerprint(dtype=array.dtype.name, shape=array.shape, crc32=checksum)
