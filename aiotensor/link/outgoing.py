"""A message with a body that is being sent: its tensors in shared memory, and its content."""

import abc
import asyncio
import sys
from collections.abc import Iterator

import msgspec
import numpy as np

from aiotensor.codec.payload import Payload, pack
from aiotensor.errors import WouldBlockError
from aiotensor.memory.allocations import Allocation
from aiotensor.memory.arena import Block
from aiotensor.memory.copying import QUICK_BYTES
from aiotensor.memory.dtypes import DTYPE_NAMES
from aiotensor.memory.gates import StuckError
from aiotensor.memory.inline import MAX_INLINE_BYTES
from aiotensor.memory.leased import Forwardable, ForwardedBlock
from aiotensor.memory.memory import Memory
from aiotensor.memory.placement import Plan, plan_placement
from aiotensor.memory.segments import whole_pages
from aiotensor.memory.sizes import too_large
from aiotensor.memory.source import Source, as_source, attributes_of
from aiotensor.protocol.frames import ARENA, INLINE, Content, Message, PlacedTensor
from aiotensor.types import TraceContext

__all__ = ["Outgoing"]

# Longer content is placed in shared memory.
_MAX_RECORD_CONTENT_BYTES = 2 * MAX_INLINE_BYTES

# The maximum number of tensors placed and planned in one iteration of the event loop. Each takes a few
# microseconds.
_QUICK_TENSORS, _QUICK_PLANS = 64, 256


class Outgoing(abc.ABC):
    """A message with a body, from its placement in shared memory on; also the holder of its bytes.

    Each role derives its own class.

    Args:
        memory: the memory of the role.
        arena_bytes: the size of its arena in bytes.
        forwards: whether peers share memory, so that received tensors are forwarded.

    Attributes:
        blocks: the numbers and the sizes in bytes of the blocks, once for each use.
        segments: the numbers of their segments.
    """

    def __init__(self, memory: Memory, arena_bytes: int, *, forwards: bool) -> None:
        self.blocks: list[tuple[int, int]] = []
        self.segments: dict[int, None] = {}
        self._memory = memory
        self._arena_bytes = arena_bytes
        self._forwards = forwards
        self._tensors: list[PlacedTensor] = []
        self._owned: set[Block | ForwardedBlock] = set()  # filled or forwarded for this message
        self._content = b""
        self._nbytes = 0
        self._block: Block | None = None  # of the content

    # Overridden by the roles

    @abc.abstractmethod
    def check(self) -> None:
        """Raise an error if the message can no longer be sent; called after each wait."""

    @abc.abstractmethod
    def no_space(self, nbytes: int, *, is_stuck: bool) -> WouldBlockError:
        """Return the error of a call that gets no block: the wait would never end, or it must not wait."""

    def check_fits(self, new_bytes: int, other_bytes: int) -> None:
        """Raise `TooLargeError` if a message can never be sent.

        Args:
            new_bytes: the number of bytes to be copied to new blocks.
            other_bytes: the number of bytes in other blocks of the message.
        """
        if new_bytes > self._arena_bytes:
            raise too_large(new_bytes, self._arena_bytes)

    def make_space(self, nbytes: int) -> None:
        """Prepare for a new block, perhaps of a tensor that cannot be forwarded after all.

        Raises:
            TooLargeError: the arena is smaller.
        """
        if nbytes > self._arena_bytes:
            raise too_large(nbytes, self._arena_bytes)

    def can_carry(self, allocation: Allocation, source: Source) -> bool:
        """Return whether an allocated tensor can be announced without a copy."""
        return allocation.can_carry(source)

    # Placing

    async def place(self, message: list[object]) -> None:
        """Encode the message that a list contains, and place it in shared memory.

        Waits for memory and for copies. Call `release` in any case. Keep the tensors of the message alive
        until it is announced, because its announcement is the first pin of a block from `allocate`.

        Raises:
            TypeError: a value in the message cannot be encoded.
            UnsupportedTensorError: a tensor cannot be sent unchanged.
            TooLargeError: the message can never be sent.
            WouldBlockError: the wait for memory would never end.
            CopyAbandonedError: the memory was closed.
            OSError: the machine has no memory, threads or descriptors left.
        """
        payload = await pack(message, has_sender=True, max_inline_bytes=sys.maxsize)
        self.check()
        if payload.tensors:
            await self._place_tensors(payload)
        self._encode(payload)
        if len(self.blocks) > _QUICK_PLANS:  # encoding and announcing them take milliseconds each
            await asyncio.sleep(0)
            self.check()
        if len(self._content) > _MAX_RECORD_CONTENT_BYTES:
            self._block = await self._copy(as_source(np.frombuffer(self._content, np.uint8)))
            self._use(self._block)

    def place_now(self, message: list[object]) -> None:
        """Do the same on this thread; raise `WouldBlockError` if that requires a wait."""
        payload = Payload(has_sender=True, max_inline_bytes=sys.maxsize)
        payload.encode(message)
        for source, plan in list(self._plan(payload)):
            if not self._place_allocated(source, plan.allocation):
                forwardable = self._forwardable(plan)
                forwarded = forwardable and self._memory.forward_now(source, forwardable)
                self._add(source, 0, forwarded or self._copy_now(source))
        self._encode(payload)
        if len(self._content) > _MAX_RECORD_CONTENT_BYTES:
            self._block = self._copy_now(as_source(np.frombuffer(self._content, np.uint8)))
            self._use(self._block)

    def frame(self, number: int, trace: TraceContext | None) -> Message:
        """Return the frame that announces the message with a number."""
        block = self._block
        if block is None:
            return Message(number, INLINE, self._content, self._nbytes, None, trace)
        return Message(number, ARENA, block.place.describe(0), self._nbytes, block.number, trace)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the message: of its blocks, and of content in the record."""
        return (0 if self._block is not None else self._nbytes) + sum(size for _, size in self.blocks)

    def release(self) -> None:
        """Release the memory that no announcement of the message pins."""
        self._memory.gate.settle(self)
        for block in self._owned:
            self._memory.unpin_owner(block)
        self._owned.clear()  # ends the reference cycle with the holder of their bytes

    def _plan(self, payload: Payload) -> Iterator[tuple[Source, Plan]]:
        """Plan the placement of each tensor; at the end, reject a message that can never be sent."""
        used: dict[int, int] = {}
        forwarded_bytes = 0
        body_bytes = len(payload.parts[0])
        new_bytes = whole_pages(body_bytes) if body_bytes > _MAX_RECORD_CONTENT_BYTES else 0
        for value in payload.tensors:
            source = as_source(value)
            plan = plan_placement(source, self._memory.allocations)
            allocation = plan.allocation
            if allocation is not None and self.can_carry(allocation, source):
                used[allocation.block.number] = allocation.block.place.nbytes
            elif self._forwardable(plan) is None:
                new_bytes += whole_pages(source.nbytes)
            else:
                forwarded_bytes += source.nbytes
            yield source, plan
        self.check_fits(new_bytes, sum(used.values()) + forwarded_bytes)

    async def _place_tensors(self, payload: Payload) -> None:
        planned = []
        for one in self._plan(payload):
            planned.append(one)
            if len(planned) % _QUICK_PLANS == 0:
                await asyncio.sleep(0)
                self.check()
        tensors = nbytes = 0  # placed in this iteration of the event loop, unless a copy has waited
        for source, plan in planned:
            if tensors == _QUICK_TENSORS or nbytes > QUICK_BYTES:
                tensors = nbytes = 0
                await asyncio.sleep(0)
                self.check()
            tensors += 1
            if not self._place_allocated(source, plan.allocation):
                nbytes += source.nbytes
                forwardable = self._forwardable(plan)
                forwarded = forwardable and await self._memory.forward(source, forwardable)
                self._add(source, 0, forwarded or await self._copy(source))
                self.check()

    def _place_allocated(self, source: Source, allocation: Allocation | None) -> bool:
        """Place an allocated tensor in its own block; return whether that was possible."""
        if allocation is None or not self.can_carry(allocation, source):
            return False
        self._add(source, source.data_ptr() - allocation.start, allocation.block)
        return True

    def _forwardable(self, plan: Plan) -> Forwardable | None:
        return plan.forwardable if self._forwards else None

    async def _copy(self, source: Source) -> Block:
        """Copy a source to a new block."""
        nbytes = whole_pages(source.nbytes)
        self.make_space(nbytes)
        try:
            block = self._memory.try_acquire(nbytes, self) or await self._memory.acquire(nbytes, self)
        except StuckError:
            raise self.no_space(nbytes, is_stuck=True) from None
        await self._memory.copy(source, block, self)
        self._owned.add(block)
        self.check()
        return block

    def _copy_now(self, source: Source) -> Block:
        """Copy a source to a new block on this thread."""
        nbytes = whole_pages(source.nbytes)
        self.make_space(nbytes)
        block = self._memory.try_acquire(nbytes, self)
        if block is None:
            raise self.no_space(nbytes, is_stuck=False)
        self._owned.add(block)
        self._memory.copy_now(source, block)
        return block

    def _add(self, source: Source, offset: int, block: Block | ForwardedBlock) -> None:
        """Add a tensor whose bytes are in a block, at an offset."""
        if isinstance(block, ForwardedBlock):
            self._owned.add(block)
        self._use(block)
        dtype, shape = DTYPE_NAMES[source.dtype], tuple(source.shape)
        payload = block.place.describe(offset)
        self._tensors.append(PlacedTensor(dtype, shape, ARENA, payload, block.number, attributes_of(source)))

    def _use(self, block: Block | ForwardedBlock) -> None:
        self.blocks.append((block.number, block.place.nbytes))
        self.segments[block.place.segment.number] = None

    def _encode(self, payload: Payload) -> None:
        """Encode the content of the message, and check that it fits into memory together with its tensors."""
        content = msgspec.msgpack.encode(Content(memoryview(payload.parts[0]), tuple(self._tensors)))
        if len(content) > _MAX_RECORD_CONTENT_BYTES:  # many tensors make it longer than its body
            owned_bytes = sum(block.place.nbytes for block in self._owned)
            all_bytes = sum(dict(self.blocks).values())
            self.check_fits(whole_pages(len(content)) + owned_bytes, all_bytes - owned_bytes)
        self._content, self._nbytes = content, len(content)
