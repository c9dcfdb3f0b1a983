"""The pages of a memory range for which the system has provided memory, as offsets.

The system provides memory in pages. It is requested in *chunks* of many pages, so that the next small block
finds warm memory, or in single pages if memory is scarce. A chunk is recorded as full, as empty, or page by
page. This module does not access the memory itself.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

__all__ = ["CHUNK_BYTES", "Range", "WarmPages", "gaps"]

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

    __slots__ = ("_full", "_page", "_pages", "_size", "_some", "nbytes")

    def __init__(self, size: int, page: int) -> None:
        chunks = -(-size // CHUNK_BYTES)
        self.nbytes = 0
        self._size = size
        self._page = page
        self._full = bytearray(chunks)  # a 1 for each chunk whose pages all have memory
        self._some = bytearray(chunks)  # a 1 for each chunk with at least one page that has memory
        self._pages: dict[int, bytearray] = {}  # of partly full chunks: a 1 for each page with memory

    def has(self, offset: int, nbytes: int) -> bool:
        """Return whether every page of a range has memory."""
        first, last = offset // CHUNK_BYTES, (offset + nbytes - 1) // CHUNK_BYTES
        if self._full.find(0, first, last + 1) < 0:
            return True
        return all(self._has_part(chunk, offset, offset + nbytes) for chunk in range(first, last + 1))

    def missing(self, offset: int, nbytes: int, *, whole_chunks: bool) -> list[Range]:
        """List the ranges to request from the system so that a range has memory, each within one chunk.

        Args:
            offset: the offset of the range in bytes.
            nbytes: the size of the range in bytes.
            whole_chunks: whether to request all pages of an empty chunk, and not only those in the range.
        """
        ranges = []
        for chunk in range(offset // CHUNK_BYTES, (offset + nbytes - 1) // CHUNK_BYTES + 1):
            if self._has_part(chunk, offset, offset + nbytes):
                continue
            start, stop = self._bounds(chunk)
            if self._some[chunk] or not whole_chunks:
                start, stop = max(start, self._down(offset)), min(stop, self._up(offset + nbytes))
            ranges.append((start, stop - start))
        return ranges

    def add(self, ranges: Iterable[Range]) -> None:
        """Record that ranges have memory; each range lies within one chunk."""
        for start, length in ranges:
            chunk = start // CHUNK_BYTES
            low = chunk * CHUNK_BYTES
            pages = self._pages_of(chunk)
            first, last = (start - low) // self._page, (start + length - low) // self._page
            self.nbytes += pages.count(0, first, last) * self._page
            pages[first:last] = b"\1" * (last - first)
            self._note(chunk, pages)

    def take(self, start: int, stop: int, most: int | None = None) -> list[Range]:
        """Record that the pages within a range no longer have memory, and list ranges that cover these pages.

        Pages that are only partly in the range are not taken.

        Args:
            start: the offset of the first byte of the range.
            stop: one past the offset of its last byte.
            most: the number of bytes after which no further chunk is taken; None for no limit.
        """
        start, stop = self._up(start), self._down(stop)
        taken, before = [], self.nbytes
        for chunk in self.chunks(start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)):
            if most is not None and before - self.nbytes >= most:
                break
            low, high = self._bounds(chunk)
            pages = self._pages_of(chunk)
            first, last = max(start - low, 0) // self._page, (min(stop, high) - low) // self._page
            count = pages.count(1, first, last)
            if not count:
                continue
            self.nbytes -= count * self._page
            pages[first:last] = bytes(last - first)
            self._note(chunk, pages)
            taken.append((low + first * self._page, (last - first) * self._page))
        return taken

    def chunks(self, first: int, last: int) -> Iterator[int]:
        """Iterate over the chunks from `first` to before `last` that have any memory."""
        chunk = self._some.find(1, first, last)
        while chunk >= 0:
            yield chunk
            chunk = self._some.find(1, chunk + 1, last)

    def _has_part(self, chunk: int, start: int, stop: int) -> bool:
        if self._full[chunk]:
            return True
        pages = self._pages.get(chunk)
        if pages is None:
            return False
        low = chunk * CHUNK_BYTES
        return pages.find(0, max(start - low, 0) // self._page, -(-(stop - low) // self._page)) < 0

    def _pages_of(self, chunk: int) -> bytearray:
        pages = self._pages.get(chunk)
        if pages is None:
            low, high = self._bounds(chunk)
            pages = bytearray((b"\1" if self._full[chunk] else b"\0") * ((high - low) // self._page))
        return pages

    def _note(self, chunk: int, pages: bytearray) -> None:
        self._full[chunk] = 0 not in pages
        self._some[chunk] = 1 in pages
        if self._full[chunk] or not self._some[chunk]:
            self._pages.pop(chunk, None)
        else:
            self._pages[chunk] = pages

    def _bounds(self, chunk: int) -> tuple[int, int]:
        start = chunk * CHUNK_BYTES
        return start, min(start + CHUNK_BYTES, self._size)

    def _down(self, offset: int) -> int:
        return offset - offset % self._page

    def _up(self, offset: int) -> int:
        return -(-offset // self._page) * self._page


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
