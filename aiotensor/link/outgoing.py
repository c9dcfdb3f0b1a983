"""A message with a body that is being sent: its tensors in shared memory, and its content."""

import abc
import asyncio
from collections.abc import Iterator
from typing import ClassVar

import msgspec
import numpy as np

from aiotensor.codec.cost import cost_of
from aiotensor.codec.payload import MAX_BODY_TENSOR_BYTES, Payload, check_body
from aiotensor.errors import WouldBlockError
from aiotensor.memory.arena import Block, whole_pages
from aiotensor.memory.copying import QUICK_BYTES, CopyAbandonedError
from aiotensor.memory.gates import StuckError
from aiotensor.memory.mappings import Forwardable, ForwardedBlock
from aiotensor.memory.memory import Memory
from aiotensor.memory.placement import Allocation, Plan, plan_placement, too_large
from aiotensor.memory.source import Source, as_source, attributes_of
from aiotensor.memory.tensors import DTYPE_NAMES, MAX_INLINE_BYTES
from aiotensor.protocol.frames import ARENA, INLINE, Content, Message, PlacedTensor, encode_content
from aiotensor.runtime import tracing
from aiotensor.runtime.affinity import LoopAffinity
from aiotensor.runtime.worker import in_thread
from aiotensor.types import TraceContext

# Longer content is placed in shared memory.
_MAX_RECORD_CONTENT_BYTES = 2 * MAX_INLINE_BYTES

# A body of this size fits into the record without a further check.
_QUICK_BODY_BYTES = _MAX_RECORD_CONTENT_BYTES - 64

# The maximum number of tensors placed and planned in one iteration of the event loop. Each takes a few
# microseconds.
_QUICK_TENSORS, _QUICK_PLANS = 64, 256


class Outgoing(msgspec.Struct, eq=False):
    """A message with a body, from its placement in shared memory on; also the holder of its bytes.

    Each role derives its own class.

    Attributes:
        memory: the memory of the role.
        forwards: whether peers share memory, so that received tensors are forwarded.
        affinity: the state of the role: a message is sent only while it is open.
        max_body_bytes: the maximum size of the body in bytes that a peer accepts; None for no limit.
        body_bytes: the size of the body in bytes.
        content: the encoded content.
        content_block: its block; None if it is sent in the record.
        tensors: the tensors beside the body.
        blocks: the numbers and the sizes in bytes of the blocks, once for each use.
        segments: the numbers of their segments.
        owned: the blocks that were filled or forwarded for this message.
        sources: the tensors in allocated blocks, which they keep until the message is released.
        trace: the trace context of the call that has placed the message; None without tracing.
    """

    # A Struct, whose creation calls no Python function.

    memory: Memory
    forwards: bool
    affinity: LoopAffinity
    max_body_bytes: int | None = None
    body_bytes: int = 0
    content: bytes = b""
    content_block: Block | None = None
    tensors: list[PlacedTensor] = []
    blocks: list[tuple[int, int]] = []
    segments: dict[int, None] = {}
    owned: set[Block | ForwardedBlock] = msgspec.field(default_factory=set)
    sources: list[Source] = []
    trace: TraceContext | None = None

    # The maximum number of bytes of small tensors in the body.
    max_inline_bytes: ClassVar[int] = MAX_BODY_TENSOR_BYTES

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    # Overridden by the roles

    @abc.abstractmethod
    def no_space(self, nbytes: int, *, is_stuck: bool) -> WouldBlockError:
        """Return the error of a call that gets no block: the wait would never end, or it must not wait."""

    def check_fits(self, new_bytes: int, other_bytes: int) -> None:
        """Raise `TooLargeError` if a message can never be sent.

        Args:
            new_bytes: the number of bytes to be copied to new blocks.
            other_bytes: the number of bytes in other blocks of the message.
        """
        if new_bytes > self.memory.gate.limit:
            raise too_large(new_bytes, self.memory.gate.limit)

    def make_space(self, nbytes: int) -> None:
        """Prepare for a new block, perhaps of a tensor that cannot be forwarded after all.

        Raises:
            TooLargeError: the arena is smaller.
        """
        if nbytes > self.memory.gate.limit:
            raise too_large(nbytes, self.memory.gate.limit)

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
            OSError: the machine has no memory, threads or descriptors left.
        """
        if (tracer := tracing.tracer) is not None:
            self.trace = tracer.context()
        payload = Payload(room=self.max_inline_bytes)
        takes_long, nbytes = cost_of(message[0])
        if takes_long:
            check_body(nbytes, self.max_body_bytes)
            await in_thread(payload.encode_body, message)
            self.affinity.check_open()
        else:
            payload.encode_body(message)
        body = payload.body
        if not payload.tensors and len(body) <= _QUICK_BODY_BYTES:  # most messages, without further calls
            if self.max_body_bytes is not None and len(body) > self.max_body_bytes:
                check_body(len(body), self.max_body_bytes)
            self.body_bytes = len(body)
            self.content = encode_content(Content(memoryview(body)))
            return
        check_body(len(body), self.max_body_bytes)
        if payload.tensors:
            await self._place_tensors(payload)
        self._encode(payload)
        if len(self.blocks) > _QUICK_PLANS:  # encoding and announcing them take milliseconds each
            await asyncio.sleep(0)
            self.affinity.check_open()
        if len(self.content) > _MAX_RECORD_CONTENT_BYTES:
            self.content_block = await self._copy(as_source(np.frombuffer(self.content, np.uint8)))
            self._use(self.content_block)

    def place_now(self, message: list[object]) -> None:
        """Do the same on this thread; raise `WouldBlockError` if that requires a wait."""
        if (tracer := tracing.tracer) is not None:
            self.trace = tracer.context()
        payload = Payload(room=self.max_inline_bytes)
        payload.encode_body(message)
        check_body(len(payload.body), self.max_body_bytes)
        for source, plan in list(self._plan(payload)):
            if not self._place_allocated(source, plan.allocation):
                forwardable = self._forwardable(plan)
                forwarded = forwardable and self.memory.forward_now(source, forwardable)
                self._add(source, 0, forwarded or self._copy_now(source))
        self._encode(payload)
        if len(self.content) > _MAX_RECORD_CONTENT_BYTES:
            self.content_block = self._copy_now(as_source(np.frombuffer(self.content, np.uint8)))
            self._use(self.content_block)

    def frame(self, number: int, *, asks: bool = False, answers: int | None = None) -> Message:
        """Return the frame that announces the message with a number; see `Message` for the arguments."""
        content, block, trace = self.content, self.content_block, self.trace
        if block is None:
            return Message(number, INLINE, content, len(content), None, trace, asks, answers)
        where = block.place.describe(0)
        return Message(number, ARENA, where, len(content), block.number, trace, asks, answers)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the message: of its blocks, and of content in the record."""
        in_record = len(self.content) if self.content_block is None else 0
        return in_record + sum(size for _, size in self.blocks)

    def release(self) -> None:
        """Release the memory that no announcement of the message pins."""
        self.memory.gate.settle(self)
        for block in self.owned:
            self.memory.unpin_owner(block)
        self.sources.clear()
        self.owned.clear()  # ends the reference cycle with their holder

    def _plan(self, payload: Payload) -> Iterator[tuple[Source, Plan]]:
        """Plan the placement of each tensor; at the end, reject a message that can never be sent."""
        used: dict[int, int] = {}
        forwarded_bytes = 0
        body_bytes = len(payload.body)
        new_bytes = whole_pages(body_bytes) if body_bytes > _MAX_RECORD_CONTENT_BYTES else 0
        for value in payload.tensors:
            source = as_source(value)
            plan = plan_placement(source, self.memory.allocations)
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
                self.affinity.check_open()
        tensors = nbytes = 0  # placed in this iteration of the event loop, unless a copy has waited
        for source, plan in planned:
            if tensors == _QUICK_TENSORS or nbytes > QUICK_BYTES:
                tensors = nbytes = 0
                await asyncio.sleep(0)
                self.affinity.check_open()
            tensors += 1
            if not self._place_allocated(source, plan.allocation):
                nbytes += source.nbytes
                forwardable = self._forwardable(plan)
                forwarded = forwardable and await self.memory.forward(source, forwardable)
                self.affinity.check_open()
                self._add(source, 0, forwarded or await self._copy(source))
                self.affinity.check_open()

    def _place_allocated(self, source: Source, allocation: Allocation | None) -> bool:
        """Place an allocated tensor in its own block; return whether that was possible."""
        if allocation is None or not self.can_carry(allocation, source):
            return False
        self._add(source, source.data_ptr() - allocation.start, allocation.block)
        self.sources.append(source)
        return True

    def _forwardable(self, plan: Plan) -> Forwardable | None:
        return plan.forwardable if self.forwards else None

    async def _copy(self, source: Source) -> Block:
        """Copy a source to a new block."""
        nbytes = whole_pages(source.nbytes)
        self.make_space(nbytes)
        memory = self.memory
        try:
            block = memory.try_acquire(nbytes, self) or await memory.acquire(nbytes, self)
            await memory.copy(source, block, self)
        except StuckError:
            raise self.no_space(nbytes, is_stuck=True) from None
        except CopyAbandonedError:
            self.affinity.check_open()  # the memory was closed with its owner
            raise
        self.owned.add(block)
        self.affinity.check_open()
        return block

    def _copy_now(self, source: Source) -> Block:
        """Copy a source to a new block on this thread."""
        nbytes = whole_pages(source.nbytes)
        self.make_space(nbytes)
        block = self.memory.try_acquire(nbytes, self)
        if block is None:
            raise self.no_space(nbytes, is_stuck=False)
        self.owned.add(block)
        self.memory.copy_now(source, block)
        return block

    def _add(self, source: Source, offset: int, block: Block | ForwardedBlock) -> None:
        """Add a tensor whose bytes are in a block, at an offset."""
        if isinstance(block, ForwardedBlock):
            self.owned.add(block)
        self._use(block)
        dtype, shape = DTYPE_NAMES[source.dtype], tuple(source.shape)
        payload = block.place.describe(offset)
        self.tensors.append(PlacedTensor(dtype, shape, ARENA, payload, block.number, attributes_of(source)))

    def _use(self, block: Block | ForwardedBlock) -> None:
        self.blocks.append((block.number, block.place.nbytes))
        self.segments[block.place.segment.number] = None

    def _encode(self, payload: Payload) -> None:
        """Encode the content of the message, and check that it fits into memory together with its tensors."""
        content = encode_content(Content(memoryview(payload.body), tuple(self.tensors)))
        if len(content) > _MAX_RECORD_CONTENT_BYTES:  # many tensors make it longer than its body
            owned_bytes = sum(block.place.nbytes for block in self.owned)
            all_bytes = sum(dict(self.blocks).values())
            self.check_fits(whole_pages(len(content)) + owned_bytes, all_bytes - owned_bytes)
        self.content, self.body_bytes = content, len(payload.body)
