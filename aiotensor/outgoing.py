"""The send gate: one place that takes, places, announces, and rolls back.

    permit -> room on the link -> bytes -> place -> announce      any step fails: all of it back

A message holds its permit until the receiver has taken all its tensors or either side discarded it. A
block of shared memory is pinned by the tensor announced over it until the receiver gives it back. A
message gets its number with its first announcement, so the receiver hears of every number once and of
nothing that was given up before.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Iterable

import torch

from aiotensor import placements
from aiotensor.descriptors import close_all
from aiotensor.errors import (
    AioTensorError,
    ClosedError,
    DiscardedError,
    PeerLostError,
    ProtocolError,
    WouldBlockError,
)
from aiotensor.gates import Gate, StuckError, Waiters
from aiotensor.links.base import SenderLink
from aiotensor.message import Job, Message
from aiotensor.placements import Plan
from aiotensor.protocol.frames import (
    VERSION,
    Bye,
    Discard,
    Discarded,
    End,
    Hello,
    Release,
    Taken,
    Welcome,
    decode_to_sender,
    encode,
)
from aiotensor.protocol.leases import Freed, Leases
from aiotensor.types import TensorHandle, Usage
from aiotensor.worker import Worker

__all__ = ["Outgoing"]

logger = logging.getLogger("aiotensor.sender")


class Outgoing:
    """Everything of one sender that is on its way.

    Belongs to the event loop's thread, but for `_place_and_announce`, which may run in the worker.

    Args:
        sender: the sender's id.
        link: the road to the receiver.
        max_messages: the limit of permits.
        max_bytes: the limit of shared memory.
    """

    def __init__(self, sender: str, link: SenderLink, max_messages: int, max_bytes: int) -> None:
        self.sender = sender
        self.permits = Gate(max_messages)
        self.bytes = Gate(max_bytes, self._parked_for_good)
        self.failure: PeerLostError | None = None
        self.messages_sent = self.messages_discarded = self.tensors_sent = self.bytes_sent = 0
        self._link = link
        self._is_closed = False
        self._leases = Leases()
        self._messages: set[Message] = set()
        self._announced: dict[int, Message] = {}
        self._next_number = 0
        # Announcing a tensor and ending its message exclude each other: without this the worker could
        # announce a tensor of a message that the loop has just discarded.
        self._announcing = threading.Lock()
        self._jobs: set[Job] = set()
        self._parked = 0
        self._drainers = Waiters()
        self._receiver_pid: int | None = None

    async def open(self) -> None:
        """Introduce the sender, and start the worker."""
        hello = Hello(VERSION, os.getpid(), self.permits.budget.limit, self.bytes.budget.limit)
        self._worker = Worker("aiotensor-sender")
        await self._link.open(encode(hello), self)

    async def close(self) -> None:
        """End what waits, say goodbye, and close the link; cancelling skips the goodbye."""
        self._is_closed = True
        self.permits.fail(self.why_not)
        self.bytes.fail(self.why_not)
        try:
            for message in [message for message in self._messages if not message.is_whole]:
                self.abandon(message)
            await self._worker.settle()
            if self.failure is None:
                self._link.write(encode(Bye()))
                await self._link.flush()
        finally:
            for job in self._jobs:
                job.abandoned.set()
            self._link.close()
            self._worker.close()
            self._drainers.wake()

    # One message

    async def begin(self, block: int | None = None) -> Message:
        """Wait for a permit, and give it to a new message.

        Args:
            block: the block that will be sent in it, whose bytes cannot come back while this waits.
        """
        if not self.permits.try_acquire(1):
            parked = 0 if block is None else self._leases.size_of(block)
            self._parked += parked
            try:
                if parked:
                    self.bytes.refuse_if_stuck()
                await self.permits.acquire(1)
            finally:
                self._parked -= parked
        elif self.failure is not None or self._is_closed:
            self.permits.release(1)
            raise self.why_not()
        return self._new_message()

    def begin_nowait(self, nbytes: int) -> Message:
        """Give a permit to a new message, or raise `WouldBlockError`."""
        if not self._link.is_flushed:
            raise self._would_block("the receiver is slow to read the link", 1, nbytes)
        if not self.permits.try_acquire(1):
            raise self._would_block("no permit is free", 1, nbytes)
        return self._new_message()

    async def put(self, message: Message, source: torch.Tensor, plan: Plan, *, last: bool) -> TensorHandle:
        """Take a tensor from its bytes to its announcement."""
        message.sending += 1
        try:
            # The link's queue is bounded only by this: nobody adds to it while it is behind.
            await self._link.flush()
            if plan.new_bytes:
                await self._acquire_bytes(plan.new_bytes, message)
            if message.has_ended:  # while waiting
                if plan.new_bytes:
                    self.bytes.release(plan.new_bytes, message)
                raise self.why_not()
            job = self._new_job(message, source, plan, last=last)
            try:
                handle = self._run_here(job) if plan.is_quick else await self._run_in_worker(job)
                await self._link.flush()
                if not self._is_wanted(message, last=last):
                    raise self.why_not()
            except BaseException:
                if self._give_up(job):
                    self.abandon(message)  # it would have a tensor that nobody can name
                raise
            return handle
        finally:
            message.sending -= 1

    def _is_wanted(self, message: Message, *, last: bool) -> bool:
        # With its last tensor announced, a message may have ended because it was taken.
        return not (message.is_lost if last else message.has_ended)

    def put_nowait(self, message: Message, source: torch.Tensor, plan: Plan) -> TensorHandle:
        """Do the same for the one tensor of a message, on this thread, or raise `WouldBlockError`."""
        if plan.new_bytes and not self.bytes.try_acquire(plan.new_bytes, message):
            raise self._would_block("not enough shared memory is free", 1, plan.new_bytes)
        return self._run_here(self._new_job(message, source, plan, last=True))

    def complete(self, message: Message) -> None:
        """Make a message whole, whose tensors are all announced."""
        if message.number is None:
            self._end(message)  # an empty one: nobody has heard of it
            return
        message.is_whole = True
        self._link.write(encode(End(message.number, message.count)))
        self._count_whole(message)

    def abandon(self, message: Message) -> None:
        """Discard a message, whatever of it was announced."""
        if message.has_ended:
            return
        self._end(message)
        self.messages_discarded += 1
        if message.number is not None and self.failure is None:
            self._link.write(encode(Discard(message.number)))

    def abandon_number(self, number: int) -> None:
        """Discard a message by its number, if it has not ended."""
        message = self._announced.get(number)
        if message is not None:
            self.abandon(message)

    async def drain(self) -> None:
        """Wait until the messages of this moment have ended."""
        sent = set(self._messages)
        while any(not message.has_ended for message in sent):
            await self._drainers.wait()
            if self._is_closed:
                break
        # The receiver may have taken them all and closed since: that is no loss.
        if any(message.is_lost or not message.has_ended for message in sent):
            raise self.why_not()

    # Blocks that callers own

    async def own_block(self, nbytes: int) -> tuple[placements.Block, int]:
        """Wait for bytes, and allocate a block in the worker; returns it and its number."""
        await self.bytes.acquire(nbytes)
        try:
            making = self._worker.submit(placements.new_shared, nbytes)
        except BaseException:
            self.bytes.release(nbytes)
            raise
        try:
            block = await asyncio.wrap_future(making)
            if self.failure is not None or self._is_closed:
                raise self.why_not()
        except BaseException:
            self._worker.when_done(making, self.bytes.release, nbytes)
            raise
        return block, self._leases.own(nbytes)

    def disown_blocks(self, blocks: Iterable[int]) -> None:
        """Note that the owners of these blocks have let go of them."""
        self._give_back(self._leases.disown(block) for block in blocks)

    # The gate's last steps

    def _parked_for_good(self) -> int:
        """Count the bytes of blocks whose sends wait for a permit, if every permit waits for bytes."""
        waiting = sum(message.awaits_bytes > 0 for message in self._messages)
        return self._parked if waiting == self.permits.budget.in_use else 0

    async def _acquire_bytes(self, nbytes: int, message: Message) -> None:
        message.awaits_bytes += 1
        try:
            await self.bytes.acquire(nbytes, message)
        except StuckError:
            raise self._would_block(
                "all shared memory is held by messages that wait for more, this one among them, so that "
                "waiting would never end: raise arena_bytes or lower max_concurrent_videos",
                0,
                nbytes,
            ) from None
        finally:
            message.awaits_bytes -= 1

    def _new_message(self) -> Message:
        message = Message()
        self._messages.add(message)
        return message

    def _new_job(self, message: Message, source: torch.Tensor, plan: Plan, *, last: bool) -> Job:
        """Pin the block that the tensor is in or will be in; `_finish` unpins it if nothing comes of it."""
        block = plan.block
        if block is not None:
            self._leases.pin(block)
        elif plan.new_bytes:
            block = self._leases.open(plan.new_bytes, message)
        job = Job(message, source, plan, block, last=last)
        self._jobs.add(job)
        return job

    def _run_here(self, job: Job) -> TensorHandle:
        try:
            return self._place_and_announce(job)
        finally:
            self._finish(job)

    async def _run_in_worker(self, job: Job) -> TensorHandle:
        running = self._worker.submit(self._place_and_announce, job)
        self._worker.when_done(running, self._finish, job)  # given back by the time that this wakes
        try:
            return await asyncio.wrap_future(running)
        except placements.CopyAbandonedError:
            raise self.why_not() from None

    def _give_up(self, job: Job) -> bool:
        """Stop a job; say whether it was announced already. If not, it never will be."""
        with self._announcing:
            job.abandoned.set()
            return job.handle is not None

    def _place_and_announce(self, job: Job) -> TensorHandle:
        """Write the bytes, and put the frame on the link; may run in the worker thread."""
        if job.abandoned.is_set():
            raise placements.CopyAbandonedError
        placed = job.plan.place(job.abandoned)
        message = job.message
        with self._announcing:
            try:
                if job.abandoned.is_set():
                    raise placements.CopyAbandonedError
                number = self._next_number if message.number is None else message.number
                handle, put = job.announcement(self.sender, number, placed)
                frame = encode(put)
            except BaseException:
                close_all(placed.descriptors)
                raise
            self._link.write(frame, placed.descriptors)
            # The answer may arrive before this thread goes on: the loop looks these up under the lock.
            if message.number is None:
                message.number = number
                self._next_number += 1
                self._announced[number] = message
            message.count += 1
            message.is_whole = job.last
            job.handle = handle
        return handle

    def _finish(self, job: Job) -> None:
        """Note in the loop that a job is over: count what it announced, or give back what it had."""
        self._jobs.discard(job)
        if job.handle is not None:
            self.tensors_sent += 1
            self.bytes_sent += job.source.nbytes
            if job.last:
                self._count_whole(job.message)
        elif job.block is not None and self.failure is None:
            self._give_back([self._leases.unpin(job.block)])

    def _count_whole(self, message: Message) -> None:
        self.messages_sent += 1
        # What it holds comes back whatever else waits.
        self.bytes.budget.settle(message)

    def _end(self, message: Message) -> None:
        """Give the permit back, and stop whatever of the message is still being sent."""
        with self._announcing:
            message.has_ended = True
            for job in self._jobs:
                if job.message is message:
                    job.abandoned.set()
        self._messages.discard(message)
        if message.number is not None:
            self._announced.pop(message.number, None)
        self.bytes.budget.settle(message)
        self.permits.release(1)
        self._drainers.wake()

    def _give_back(self, freed: Iterable[Freed | None]) -> None:
        for one in freed:
            if one is not None:
                self.bytes.release(one.nbytes, one.holder)

    # What the receiver says

    def frame_arrived(self, data: bytes) -> None:
        """Take a frame from the receiver."""
        try:
            self._handle_frame(data)
        except ProtocolError as error:
            logger.error("the receiver (pid %s) broke the protocol: %s", self._receiver_pid, str(error))
            self._link.close()
            self._fail(f"it broke the protocol: {error}", error)

    def link_lost(self, reason: str) -> None:
        """Note that the receiver is gone."""
        self._fail(reason)

    def _handle_frame(self, data: bytes) -> None:
        frame = decode_to_sender(data)
        match frame:
            case Welcome():
                self._receiver_pid = frame.pid
                if frame.version != VERSION:
                    raise ProtocolError(f"it speaks version {frame.version}, this sender speaks {VERSION}")
            case Taken():
                for number in frame.messages:
                    message = self._answered(number)
                    if message is not None:
                        if not message.is_whole:
                            raise ProtocolError(f"it took message {number}, which was not whole")
                        self._end(message)
            case Discarded():
                for number in frame.messages:
                    message = self._answered(number)
                    if message is not None:
                        self.messages_discarded += 1
                        self._end(message)
            case Release():
                self._give_back([self._leases.unpin(block) for block in frame.blocks])
            case Bye():
                self._link.close()
                self._fail("it closed")

    def _answered(self, number: int) -> Message | None:
        """Find the message of an answer, or None if it was discarded here in the meantime."""
        with self._announcing:
            if number >= self._next_number:
                raise ProtocolError(f"it answered message {number}, which was never sent")
            return self._announced.get(number)

    def _fail(self, reason: str, cause: ProtocolError | None = None) -> None:
        pid = self._receiver_pid
        self.failure = PeerLostError(f"the receiver (pid {pid}) is gone: {reason}", pid=pid)
        self.failure.__cause__ = cause
        self.permits.fail(self.why_not)
        self.bytes.fail(self.why_not)
        for message in list(self._messages):
            message.is_lost = True
            self._end(message)
        self._give_back(self._leases.unpin_all())
        self._drainers.wake()

    # Small things

    def why_not(self) -> AioTensorError:
        """Make the error that tells why nothing can be sent, for whoever was waiting."""
        if self.failure is not None:
            error = PeerLostError(str(self.failure), pid=self.failure.pid)
            error.__cause__ = self.failure.__cause__
            return error
        if self._is_closed:
            return ClosedError("this TensorSender was closed")
        return DiscardedError("this message was discarded: begin a new one")

    def _would_block(self, reason: str, messages: int, nbytes: int) -> WouldBlockError:
        permits, memory = self.permits.budget, self.bytes.budget
        return WouldBlockError(
            f"{reason} ({permits.in_use} of {permits.limit} messages and {memory.in_use} of {memory.limit} "
            f"bytes in use, {nbytes} bytes requested)",
            messages=Usage(permits.limit, permits.in_use, messages),
            bytes=Usage(memory.limit, memory.in_use, nbytes),
        )
