"""The sending pipeline: permit, memory, placement, announcement and rollback.

    permit -> a receiver that reads -> bytes -> placement -> announcement    a failure rolls back all steps

A block of shared memory is pinned by the tensor announced over it until the receiver releases it.
"""

import math
import operator
import sys
from collections.abc import Sequence

import torch
from torch.nn import Parameter

from aiotensor.errors import TooLargeError
from aiotensor.protocol.frames import Put
from aiotensor.sending.in_flight import FEW_MESSAGES, MessagesInFlight
from aiotensor.sending.message import Message
from aiotensor.tensors.allocations import Allocation, Block
from aiotensor.tensors.copying import CopyAbandonedError
from aiotensor.tensors.dtypes import DTYPE_NAMES
from aiotensor.tensors.placement import (
    Placed,
    Plan,
    place_allocated,
    place_copy,
    place_inline,
    plan_placement,
)
from aiotensor.tensors.raw import is_addressable, new_tensor
from aiotensor.tensors.source import Sendable, Source, as_source, check_dtype
from aiotensor.types import TensorHandle

__all__ = ["Pipeline"]


class Pipeline:
    """Extent the tensors of one sender, and announce them; belongs to the event loop's thread.

    Args:
        sender: the id of the sender.
        messages: the messages in flight.
    """

    def __init__(self, sender: str, messages: MessagesInFlight) -> None:
        self.messages = messages
        self._sender = sender
        self._memory = messages.grants.memory
        self._max_bytes = messages.grants.max_bytes

    def prepare(self, value: Sendable) -> tuple[Source, Plan]:
        """Reject a value that can never be sent, before any resources are taken for it."""
        source = as_source(value)
        plan = plan_placement(source, self._memory.allocations)
        if plan.new_bytes > self._max_bytes:
            raise self._too_large(plan.new_bytes)
        return source, plan

    async def put(self, message: Message, source: Source, plan: Plan, *, last: bool) -> TensorHandle:
        """Acquire bytes for a tensor, place the tensor, and announce it."""
        # Only this check bounds the transport's queue: no call adds to the queue while it is not empty.
        session = self.messages.sessions.current
        if session is None or not session.transport.is_writable or self.messages.sessions.needs_admission:
            await self.messages.receiver_reads(message)
        self.messages.check_open(message)
        allocation = plan.allocation
        if allocation is None:
            if not plan.new_bytes:
                return self._announce(message, source, place_inline(source), None, last=last)
        elif allocation.can_carry(source):
            return self._announce_allocated(message, source, allocation, last=last)
        return await self._put_copy(message, source, allocation, last=last)

    def put_nowait(self, message: Message, source: Source, plan: Plan) -> TensorHandle:
        """Send the only tensor of a message without waiting, on this thread, or raise `WouldBlockError`."""
        allocation = plan.allocation
        if allocation is not None and allocation.can_carry(source):
            return self._announce_allocated(message, source, allocation, last=True)
        if not plan.new_bytes:
            return self._announce(message, source, place_inline(source), None, last=True)
        message.has_bytes = True
        block = self._memory.try_acquire(plan.new_bytes, message)
        if block is None:
            raise self.messages.grants.holders.would_block(
                "not enough shared memory is free", 1, plan.new_bytes
            )
        try:
            self._memory.copy_now(source, block)
            return self._announce(message, source, place_copy(block.place), block, last=True)
        finally:
            self._memory.unpin_owner(block.number)

    async def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, message: Message | None = None
    ) -> torch.Tensor:
        """Wait for a block that the caller owns, and return a tensor over it.

        Args:
            shape: the sizes of the tensor's dimensions, in elements.
            dtype: the type of its elements.
            message: the open message that the memory is for; None if it is for no particular message.
        """
        sizes = tuple(map(operator.index, shape))
        if min(sizes, default=0) < 0:
            raise ValueError(f"the sizes of a shape are not negative, got {sizes}")
        check_dtype(dtype)
        nbytes = math.prod(sizes) * dtype.itemsize
        if nbytes > self._max_bytes:
            raise self._too_large(nbytes)
        if nbytes == 0:
            return _new_empty(sizes, dtype)
        block = await self.messages.grants.block_to_allocate(nbytes, message)
        try:
            if message is not None:
                self.messages.check_open(message)  # it may have ended while waiting
        except BaseException:
            self._memory.unpin_owner(block.number)
            raise
        try:
            tensor = await self._memory.tensor_over(block, dtype, sizes, message)
        except CopyAbandonedError:
            raise self.messages.error(message) from None
        if self.messages.is_closed:
            raise self.messages.error()
        return tensor

    # Steps

    async def _put_copy(
        self, message: Message, source: Source, allocation: Allocation | None, *, last: bool
    ) -> TensorHandle:
        block = await self.messages.grants.block(source.nbytes, message, allocation)
        try:
            self.messages.check_open(message)  # it may have ended while waiting
        except BaseException:
            self._memory.unpin_owner(block.number)
            raise
        try:
            await self._memory.copy(source, block, message)
        except CopyAbandonedError:
            raise self.messages.error(message) from None
        try:
            if not self.messages.sessions.is_ready:
                await self.messages.receiver_reads(message)
            self.messages.check_open(message)
            return self._announce(message, source, place_copy(block.place), block, last=last)
        finally:
            self._memory.unpin_owner(block.number)

    def _announce_allocated(
        self, message: Message, source: Source, allocation: Allocation, *, last: bool
    ) -> TensorHandle:
        """Announce a tensor in place. From this point its memory is charged to the message."""
        placed = place_allocated(source, allocation)
        self._memory.announced(allocation.block.number, message, is_whole=last)
        message.has_bytes = True
        return self._announce(message, source, placed, allocation.block, last=last)

    def _announce(
        self, message: Message, source: Source, placed: Placed, block: Block | None, *, last: bool
    ) -> TensorHandle:
        """Send the frame of a tensor. From this point the receiver owns the tensor."""
        session = self.messages.sessions.current
        if session is None:
            raise AssertionError("an open message is announced without a receiver")
        block_number: int | None = None
        if block is not None:
            block_number = block.number
            if not block.place.segment.is_attached:
                session.attach(block.place.segment)
                self.messages.check_open(message)
            self._memory.pin(block_number)
        number = message.number
        if number is None:
            number = message.number = session.connection.next_message
        tensor, shape, dtype = message.count, tuple(source.shape), DTYPE_NAMES[source.dtype]
        put = Put(
            number,
            tensor,
            dtype,
            shape,
            "cpu" if source.is_cpu else str(source.device),
            placed.placement,
            placed.payload,
            block_number,
            last,
            source.requires_grad,
            type(source) is Parameter,
        )
        session.put(message, put, flush=last and len(self.messages.grants.messages) <= FEW_MESSAGES)
        self.messages.check_open(message)
        message.count += 1
        self.messages.counts["tensors_sent"] += 1
        self.messages.counts["bytes_sent"] += source.nbytes
        if last:
            self.messages.make_whole(message)
        return TensorHandle(self._sender, number, tensor, dtype, shape, put.device)

    def _too_large(self, nbytes: int) -> TooLargeError:
        return TooLargeError(
            f"{nbytes} bytes can never fit into arena_bytes={self._max_bytes}: "
            "send smaller parts, or raise arena_bytes",
            limit=self._max_bytes,
            requested=nbytes,
        )


def _new_empty(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without elements."""
    if not is_addressable(sizes, dtype.itemsize):
        raise TooLargeError(
            f"an empty tensor of shape {sizes} has strides that cannot be computed: choose smaller sizes",
            limit=sys.maxsize,
            requested=math.prod(size for size in sizes if size) * dtype.itemsize,
        )
    return new_tensor(sizes, dtype)
