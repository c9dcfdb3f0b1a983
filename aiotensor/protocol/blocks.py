"""The allocated ranges of one memory range, as offsets, without access to the memory.

    |<- large ->|<------------------------- free ------------------------->|<- small ->|<- small ->|

Every byte is in exactly one block or in exactly one free run, and two free runs never touch: a freed block is
merged with the adjacent runs, so that a single run remains after the last block.

A block is cut from the smallest free run that is long enough, which leaves the long runs whole. Large
blocks are cut from the low end of their run and small blocks from its high end: otherwise long-lived small
blocks would lie between large blocks, and fragment the space for further large blocks.

Runs are stored sorted by (length, start), to find the best fit by bisection, and sorted by their offsets, to
find the neighbours of a block. A call that allocates whole pages skips runs without a suitable page boundary;
otherwise, no call iterates over the runs.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

ALIGNMENT = 64  # bytes: a cache line, enough for the widest vector loads; a power of two
ADDRESSES_PER_BYTE = 4  # bytes of address range of a segment, for each byte of memory that it may use
LARGE_BYTES = 1 << 20  # the size from which a block is cut from the low end of its run


class Blocks:
    """Allocate ranges that do not overlap, and free them in any order.

    Every offset and every length is a multiple of `ALIGNMENT`. A block of at least a page consists of whole
    pages, so that the readers of a block can unlock its pages, or drop their copies of them, without effects
    on other blocks. The object must be used in one thread, and never in a finalizer: a garbage collection may
    start in the middle of any of its methods.

    Args:
        size: the size of the memory range in bytes.
        page: the size of a page in bytes.

    Attributes:
        size: the size of the memory range in bytes, rounded down to `ALIGNMENT`.
        in_use: the number of allocated bytes, with each block rounded up.
        lengths: the lengths of the allocated blocks in bytes, rounded up, by their offsets.

    Raises:
        ValueError: the size is less than `ALIGNMENT`.
    """

    __slots__ = ("_by_length", "_page", "_starts", "_stops", "in_use", "lengths", "size")

    def __init__(self, size: int, page: int = 4096) -> None:
        if size < ALIGNMENT:
            raise ValueError(f"size must be at least {ALIGNMENT} bytes, got {size}")
        self.size = size & -ALIGNMENT
        self.in_use = 0
        self.lengths: dict[int, int] = {}
        self._page = page
        self._by_length = [(self.size, 0)]  # (length, start) of the free runs, sorted
        self._starts, self._stops = [0], [self.size]  # of the free runs, sorted

    @property
    def largest_free(self) -> int:
        """The length in bytes of the longest free run, and so of the largest possible block."""
        return self._by_length[-1][0] if self._by_length else 0

    def allocate(self, nbytes: int) -> int | None:
        """Allocate a block, and return its offset; None if no free run is long enough.

        Args:
            nbytes: the size of the block, which is rounded up.

        Raises:
            ValueError: `nbytes` is less than 1.
        """
        if nbytes < 1:
            raise ValueError(f"a block must have at least 1 byte, got {nbytes}")
        alignment = self._page if nbytes >= self._page else ALIGNMENT
        length = (nbytes + alignment - 1) & -alignment
        index = bisect_left(self._by_length, (length, 0))
        while True:
            if index == len(self._by_length):
                return None
            found, start = self._by_length[index]
            stop = start + found
            offset = (stop - length) & -alignment  # the highest one
            if offset >= start:
                break
            index += 1
        if length >= LARGE_BYTES:
            offset = (start + alignment - 1) & -alignment
        self._cut(bisect_left(self._starts, start), offset, length)
        return offset

    def reserve(self, offset: int, nbytes: int) -> None:
        """Allocate a block at an offset that a peer has chosen.

        Raises:
            ValueError: the block is empty, misaligned, not within the memory range, or overlaps another one.
        """
        length = (nbytes + ALIGNMENT - 1) & -ALIGNMENT
        run = bisect_right(self._starts, offset) - 1
        if nbytes < 1 or offset % ALIGNMENT or run < 0 or offset + length > self._stops[run]:
            raise ValueError(f"{nbytes} bytes are not free at offset {offset}")
        self._cut(run, offset, length)

    def _cut(self, run: int, offset: int, length: int) -> None:
        """Allocate a block in a free run."""
        start, stop = self._starts[run], self._stops[run]
        end = offset + length
        del self._by_length[bisect_left(self._by_length, (stop - start, start))]
        if start < offset:
            insort(self._by_length, (offset - start, start))
            self._stops[run] = offset
            run += 1
        else:
            del self._starts[run], self._stops[run]
        if end < stop:
            insort(self._by_length, (stop - end, end))
            self._starts.insert(run, end)
            self._stops.insert(run, stop)
        self.lengths[offset] = length
        self.in_use += length

    def free(self, offset: int) -> None:
        """Free the block at an offset, and merge it with the adjacent free runs.

        Raises:
            ValueError: no allocated block begins at this offset.
        """
        length = self.lengths.pop(offset, None)
        if length is None:
            raise ValueError(f"no block is allocated at offset {offset}")
        self.in_use -= length
        start, stop = offset, offset + length
        first = last = bisect_left(self._starts, start)  # the first run above the block
        if first and self._stops[first - 1] == start:
            first -= 1
            start = self._starts[first]
            del self._by_length[bisect_left(self._by_length, (offset - start, start))]
        if last < len(self._starts) and self._starts[last] == stop:
            end, stop = stop, self._stops[last]
            del self._by_length[bisect_left(self._by_length, (stop - end, end))]
            last += 1
        self._starts[first:last], self._stops[first:last] = [start], [stop]
        insort(self._by_length, (stop - start, start))

    def free_runs(self) -> list[tuple[int, int]]:
        """List the free runs as (start, one past the last byte), in order of offset."""
        return list(zip(self._starts, self._stops, strict=True))

    def longest_free_runs(self) -> Iterator[tuple[int, int]]:
        """Iterate over the free runs as (start, one past the last byte), the longest first."""
        return ((start, start + length) for length, start in reversed(self._by_length))
