"""The resources of a sender's messages: a permit for each, and shared memory.

Both are granted in the order of the calls. Waiting that could never end is refused: when everything in use is
held by messages that wait for more, one of them has to give way.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiotensor.protocol.credits import Ticket
from aiotensor.sending.gates import Gate, StuckError
from aiotensor.sending.holders import Holders
from aiotensor.sending.memory import Memory
from aiotensor.sending.message import Message, innermost_block
from aiotensor.sending.settings import Settings
from aiotensor.tensors.allocations import Allocation, Block
from aiotensor.tensors.arena import Arena, Extent

__all__ = ["Grants"]

_STUCK = (
    "all shared memory is held by messages that wait for more, this one among them, so that waiting would "
    "never end: raise arena_bytes or lower max_concurrent_videos"
)
_STUCK_IN_COPY = (
    "this tensor from allocate() has to be copied, because it is not contiguous or not aligned, or an "
    "earlier receiver may still read it, and its own memory leaves no room for the copy: send a clone of it, "
    "and free it"
)


class Grants:
    """Permits and shared memory of one sender; belongs to the running loop.

    Args:
        settings: the limits of the sender.
        counts: counts the tensors that are copied.
        receiver_pid: returns the process id of the receiver, if it is known.

    Attributes:
        messages: the messages in flight, the oldest first.
    """

    def __init__(
        self,
        settings: Settings,
        counts: dict[str, int],
        receiver_pid: Callable[[], int | None],
    ) -> None:
        limits = settings.wait_limits
        self.max_bytes = settings.max_bytes
        self.messages: dict[Message, None] = {}
        self._limits = limits
        # Allocated blocks whose tensors are being sent, and are not freed before that goes on or ends.
        self._await_permits: Counter[int] = Counter()
        self._await_bytes: Counter[int] = Counter()
        self.permits: Gate[None] = Gate(
            settings.max_messages,
            stuck_elsewhere=None,
            long_wait_s=limits.long_wait_s,
            on_long_wait=lambda _: self.holders.log_wait("a permit"),
            max_wait_s=limits.max_wait_s,
            overdue=lambda _: self.holders.overdue("no permit was free", 1, 0),
        )
        self.memory = Memory(
            settings.max_bytes,
            self._gate_over,
            settings.keep_warm_s,
            counts,
            limits.max_wait_s,
            lambda nbytes: self.holders.overdue("other copies were under way", 0, nbytes),
        )
        self.holders = Holders(self.messages, self.permits, self.memory, limits, receiver_pid)

    def _gate_over(self, arena: Arena) -> Gate[Extent]:
        return Gate(
            self.max_bytes,
            space=arena,
            stuck_elsewhere=self._stuck_in_sends,
            long_wait_s=self._limits.long_wait_s,
            on_long_wait=lambda nbytes: self.holders.log_wait(f"{nbytes} bytes of shared memory"),
            max_wait_s=self._limits.max_wait_s,
            overdue=lambda nbytes: self.holders.overdue("not enough shared memory was free", 0, nbytes),
        )

    # Permits

    async def permit_with(self, allocation: Allocation) -> Ticket[None]:
        """Wait for a permit to send allocated memory, which is not released meanwhile."""
        with _counted(self._await_permits, allocation):
            self.memory.gate.refuse_if_stuck()
            return await self.permits.acquire(1)

    def _stuck_in_sends(self) -> int:
        """Count the bytes of allocated blocks whose sends go on only when other sends have got bytes."""
        blocks = set(self._await_bytes)
        waiting = sum(message.awaits_bytes > 0 for message in self.messages)
        if waiting == self.permits.budget.in_use:
            blocks.update(self._await_permits)
        return self.memory.unaccounted_bytes(blocks)

    # Memory

    async def block(self, nbytes: int, message: Message, allocation: Allocation | None = None) -> Block:
        """Wait for a block of shared memory for a message, and pin it.

        Args:
            nbytes: of the block.
            message: what it is for.
            allocation: the allocated block that is to be copied into it; None if it is another tensor.

        Raises:
            WouldBlockError: waiting would never end, or lasted for too long.
            OSError: the machine has no descriptors or no addresses left.
        """
        message.awaits_bytes += 1
        message.has_bytes = True
        try:
            if allocation is None:
                return await self.memory.acquire(nbytes, message)
            with _counted(self._await_bytes, allocation):
                return await self.memory.acquire(nbytes, message)
        except StuckError:
            raise self.holders.would_block(
                _STUCK if allocation is None else _STUCK_IN_COPY, 0, nbytes
            ) from None
        finally:
            message.awaits_bytes -= 1

    async def block_to_allocate(self, nbytes: int, message: Message | None) -> Block:
        """Wait for a block that a caller will own, and pin it; errors are those of `block`.

        Args:
            nbytes: of the block.
            message: the open message that the memory is for, and accounted to. If there is none, the wait is
                accounted to the message in whose block the task or thread is, since the block does not end
                before; the memory is not, since another task may free it meanwhile.
        """
        block = self.memory.try_acquire(nbytes, message)
        if block is not None:
            if message is not None:
                message.has_bytes = True
            return block
        waiting = message or innermost_block(self.messages)
        block = await (self.memory.acquire(nbytes) if waiting is None else self.block(nbytes, waiting))
        self.memory.account(block.number, message)
        return block


@contextmanager
def _counted(blocks: Counter[int], allocation: Allocation) -> Iterator[None]:
    """Count an allocated block as one whose send waits."""
    number = allocation.block.number
    blocks[number] += 1
    try:
        yield
    finally:
        blocks[number] -= 1
        if not blocks[number]:
            del blocks[number]
