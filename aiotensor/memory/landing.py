"""Landing segments: memory of this process, in which the bytes of a peer on another machine arrive.

The peer chooses the place of each block, as a sender on the same machine does in its own segment. When the
first bytes of a block arrive, the worker allocates its memory, one piece at a time. After the peer has freed
the block, the memory stays warm for the next block. Memory that was idle for `_KEEP_WARM_S` is returned to
the system.
"""

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from aiotensor.errors import ProtocolError
from aiotensor.memory.arena import Extent, Segment, whole_pages
from aiotensor.memory.pages import Range
from aiotensor.protocol.network import WINDOW_BYTES
from aiotensor.runtime.worker import Worker

_PIECE_BYTES = 2 * WINDOW_BYTES  # the memory that a block gets at a time, before its bytes arrive
_KEEP_WARM_S = 30.0  # the default of `keep_warm_s` of a sender


class _Block(msgspec.Struct, eq=False):
    """A block of the peer.

    Attributes:
        nbytes: the size of the block in bytes.
        requested: the position in the segment up to which the block has memory, or has requested it.
        failure: the reason why the block gets no memory; "" if there is none.
    """

    nbytes: int
    requested: int
    failure: str = ""


class LandingSegment:
    """Store the bytes that a peer moves to one segment (a `Landing`); belongs to the running loop.

    Args:
        number: the number of the segment.
        nbytes: the size of the address range of the segment in bytes.
        limit: the maximum number of bytes of all blocks together.
        worker: allocates the memory and returns it to the system.

    Attributes:
        mapped: the mapped segment, over which tensors can be opened.

    Raises:
        OSError: this process has no descriptors or no addresses left.
    """

    def __init__(self, number: int, nbytes: int, limit: int, worker: Worker) -> None:
        self._segment = Segment(number, nbytes)
        self.mapped = self._segment.open()
        self._limit = whole_pages(limit)
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._blocks: dict[int, _Block] = {}
        self._nbytes = 0  # of all blocks together
        # The range of bytes that wait for memory, their block, and the callback that resumes the transport.
        self._waiting: tuple[Range, _Block, Callable[[str], None]] | None = None
        self._trimming: asyncio.TimerHandle | None = None
        self._is_closed = False

    def store(
        self, block: int, nbytes: int, start: int, data: memoryview, resume: Callable[[str], None]
    ) -> bool:
        """Store bytes of a block, as `Landing.store` does."""
        if self._is_closed:
            return True  # the peer is gone
        known = self._blocks.get(block)
        if known is None:
            known = self._add(block, nbytes)
        elif known.nbytes != nbytes:
            raise ProtocolError(f"it moved bytes to a block at {block} of {nbytes} bytes, not {known.nbytes}")
        stop = start + len(data)
        if known.requested < min(stop + WINDOW_BYTES, block + nbytes):
            self._request(block, known, stop)
        if not self._segment.warm.has(start, len(data)):
            if known.failure:
                self._loop.call_soon(resume, known.failure)
            else:
                self._waiting = (start, len(data)), known, resume
            return False
        target = np.frombuffer(self._segment.memory[start:stop], np.uint8)
        np.copyto(target, np.frombuffer(data, np.uint8))  # unlike a memoryview, it lets other threads run
        return True

    def free(self, block: int) -> None:
        """Free a block, as `Landing.free` does."""
        if self._is_closed:
            return  # the block may be unknown, since its bytes were not stored
        known = self._blocks.pop(block, None)
        if known is None:
            raise ProtocolError(f"it freed a block at {block}, where no block is allocated")
        self._nbytes -= known.nbytes
        self._segment.free(Extent(self._segment, block, known.nbytes))
        if self._trimming is None:
            self._trimming = self._loop.call_later(_KEEP_WARM_S, self._trim)

    def close(self) -> None:
        """Store no more bytes; the segment stays mapped while tensors over it exist."""
        if self._is_closed:
            return
        self._is_closed = True
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            # The bytes need no memory any more. The transport must continue, because it reports the end of
            # the connection only after it has read the messages behind these bytes.
            self._loop.call_soon(waiting[2], "")
        if self._trimming is not None:
            self._trimming.cancel()
        self._segment.close()

    def _add(self, block: int, nbytes: int) -> _Block:
        if self._nbytes + nbytes > self._limit:
            raise ProtocolError(
                f"it uses {self._nbytes + nbytes} bytes, more than its stated limit of {self._limit}"
            )
        try:
            self._segment.blocks.reserve(block, nbytes)
        except ValueError as error:
            raise ProtocolError(f"it placed a block at an invalid position: {error}") from None
        self._nbytes += nbytes
        known = self._blocks[block] = _Block(nbytes, block)
        return known

    def _request(self, block: int, known: _Block, stop: int) -> None:
        """Request memory for the next piece of a block, which extends at least a window beyond `stop`."""
        start = known.requested
        known.requested = min(max(start + _PIECE_BYTES, stop + WINDOW_BYTES), block + known.nbytes)
        length = known.requested - start
        if self._segment.warm.has(start, length):
            return
        cold = self._segment.prepare(start, length, self._limit)
        filled: list[Range] = []
        try:
            fill = partial(self._segment.provide, cold, filled, lambda: self._is_closed)
            work = self._worker.submit(fill)
        except OSError as error:
            self._filled(cold, filled, error)
        else:
            work.add_done_callback(
                lambda work: self._filled(cold, filled, None if work.cancelled() else work.exception())
            )

    def _filled(self, cold: list[Range], filled: list[Range], error: BaseException | None) -> None:
        self._segment.filled(cold, filled)
        if error is not None:
            # Other blocks may wait for the same pages, so all of them fail. A later block requests the pages
            # again.
            for known in self._blocks.values():
                known.failure = f"no memory is left in this process for its tensors: {error}"
        if self._waiting is not None:
            (start, length), known, resume = self._waiting
            if known.failure or self._segment.warm.has(start, length):
                self._waiting = None
                resume(known.failure)

    def _trim(self) -> None:
        """Return memory that was idle for `_KEEP_WARM_S` to the system; check again later if more is idle."""
        self._trimming = None
        self._segment.take_idle(_KEEP_WARM_S)
        if self._segment.taken:
            self._worker.begin("returning memory", self._segment.return_memory)
        if self._segment.has_idle:
            self._trimming = self._loop.call_later(_KEEP_WARM_S, self._trim)
