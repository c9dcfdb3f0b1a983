"""The pages of a memory range for which the system has provided memory, as offsets.

The system provides memory in pages. It is requested in *chunks* of many pages, so that the next small block
finds warm memory, or in single pages if memory is scarce. This module does not access the memory itself.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

# The size of a chunk.
CHUNK_BYTES = 1 << 20

# The offset and the length of adjacent pages, in bytes.
Range: TypeAlias = tuple[int, int]


class WarmPages:
    """Record which pages have memory.

    Args:
        size: the size of the memory range in bytes; a multiple of `page`.
        page: the size of a page in bytes.

    Attributes:
        nbytes: the total size in bytes of the pages that have memory.
    """

    __slots__ = ("_in_chunk", "_page", "_pages", "_some", "nbytes")

    def __init__(self, size: int, page: int) -> None:
        self.nbytes = 0
        self._page = page
        self._in_chunk = CHUNK_BYTES // page
        # A 1 for each page that has memory. Unlike those of a bytearray, its zeros take no memory themselves.
        self._pages = np.zeros(size // page, np.uint8)
        self._some = bytearray(-(-size // CHUNK_BYTES))  # a 1 for each chunk with such pages

    def has(self, offset: int, nbytes: int) -> bool:
        """Return whether every page of a range has memory."""
        pages = self._pages[offset // self._page : (offset + nbytes - 1) // self._page + 1]
        return 0 not in pages.tobytes()

    def missing(self, offset: int, nbytes: int, *, whole_chunks: bool) -> list[Range]:
        """List the ranges to request from the system so that a range has memory, each within one chunk.

        Args:
            offset: the offset of the range in bytes.
            nbytes: the size of the range in bytes.
            whole_chunks: whether to request all pages of an empty chunk, and not only those in the range.
        """
        ranges = []
        first, last = offset // self._page, (offset + nbytes - 1) // self._page + 1
        for chunk in range(offset // CHUNK_BYTES, (offset + nbytes - 1) // CHUNK_BYTES + 1):
            low, high = self._bounds(chunk)
            if self._some[chunk] or not whole_chunks:
                low, high = max(low, first), min(high, last)
            if 0 in self._pages[max(low, first) : min(high, last)].tobytes():
                ranges.append((low * self._page, (high - low) * self._page))
        return ranges

    def add(self, ranges: Iterable[Range]) -> None:
        """Record that ranges have memory; each range lies within one chunk."""
        for start, length in ranges:
            first, last = start // self._page, (start + length) // self._page
            self.nbytes += self._pages[first:last].tobytes().count(0) * self._page
            self._pages[first:last] = 1
            self._some[start // CHUNK_BYTES] = 1

    def take(self, start: int, stop: int, most: int | None = None) -> list[Range]:
        """Record that the pages within a range no longer have memory, and list ranges that cover these pages.

        Pages that are only partly in the range are not taken.

        Args:
            start: the offset of the first byte of the range.
            stop: one past the offset of its last byte.
            most: the number of bytes after which no further chunk is taken; None for no limit.
        """
        taken, before = [], self.nbytes
        for chunk in self.chunks(start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)):
            if most is not None and before - self.nbytes >= most:
                break
            low, high = self._bounds(chunk)
            first, last = max(low, -(-start // self._page)), min(high, stop // self._page)
            if count := self._pages[first:last].tobytes().count(1):
                self.nbytes -= count * self._page
                self._pages[first:last] = 0
                self._some[chunk] = 1 in self._pages[low:high].tobytes()
                taken.append((first * self._page, (last - first) * self._page))
        return taken

    def chunks(self, first: int, last: int) -> Iterator[int]:
        """Iterate over the chunks from `first` to before `last` that have any memory."""
        chunk = self._some.find(1, first, last)
        while chunk >= 0:
            yield chunk
            chunk = self._some.find(1, chunk + 1, last)

    def _bounds(self, chunk: int) -> tuple[int, int]:
        """Return the first page of a chunk, and one past its last page."""
        return chunk * self._in_chunk, min((chunk + 1) * self._in_chunk, len(self._pages))


def gaps(start: int, stop: int, kept: Sequence[tuple[int, int]], page: int) -> list[Range]:
    """List the pages between two offsets that overlap no kept range.

    Args:
        start: the first offset; rounded down to a page.
        stop: one past the last offset; rounded up to a page.
        kept: the kept ranges as (start, one past the last byte), in any order; they may overlap.
        page: the size of a page in bytes.
    """
    begin, end = start - start % page, -(-stop // page) * page
    found = []
    for low, high in sorted(kept):
        low, high = low - low % page, -(-high // page) * page
        if high <= begin:
            continue
        if low >= end:
            break
        if low > begin:
            found.append((begin, low - begin))
        begin = high
    if begin < end:
        found.append((begin, end - begin))
    return found
