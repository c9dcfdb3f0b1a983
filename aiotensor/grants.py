"""What a sender grants to its messages: a permit each, and shared memory.

Both are granted in the order of the calls. Waiting that could never end is refused: when everything in use is
held by messages that wait for more, one of them has to give way.
"""

import asyncio
from collections.abc import Callable

from aiotensor.errors import WouldBlockError
from aiotensor.gates import Gate, StuckError
from aiotensor.ledger import Ledger, Patience
from aiotensor.memory import Memory
from aiotensor.message import Message
from aiotensor.placements import Allocation, Arena, Block, Place
from aiotensor.protocol.credits import Ticket

__all__ = ["Grants"]


class Grants:
    """Permits and shared memory of one sender; belongs to the event loop's thread.

    Args:
        max_messages: the limit of permits.
        max_bytes: the limit of shared memory.
        patience: how long calls may wait.

    Attributes:
        messages: those in flight, the oldest first.
    """

    def __init__(self, max_messages: int, max_bytes: int, patience: Patience) -> None:
        self.max_bytes = max_bytes
        self.messages: dict[Message, None] = {}
        self.permits: Gate[None] = Gate(
            max_messages,
            stuck_elsewhere=None,
            long_wait_s=patience.long_wait_s,
            on_long_wait=lambda _: self.ledger.log_wait("a permit"),
            max_wait_s=patience.max_wait_s,
            overdue=lambda _: self.ledger.overdue("no permit was free", 1, 0),
        )
        self.memory: Memory  # from `open` on: they belong to a loop
        self.ledger: Ledger
        self._patience = patience
        self._by_task: dict[object, Message] = {}  # open, each in the block of a task
        self._parked = 0  # bytes of allocated blocks whose sends wait for a permit

    def open(
        self,
        on_freed: Callable[[int], None],
        keep_warm_s: float | None,
        receiver_pid: Callable[[], int | None],
    ) -> None:
        """Move into the running loop.

        Args:
            on_freed: called with each allocated block that was freed; from any thread.
            keep_warm_s: after how many seconds idle memory is returned to the system; None for never.
            receiver_pid: returns the process that would have to take the messages.
        """
        self.memory = Memory(
            self.max_bytes,
            self._gate_over,
            on_freed,
            keep_warm_s,
            self._patience.max_wait_s,
            lambda nbytes: self.ledger.overdue("other copies were under way", 0, nbytes),
        )
        self.ledger = Ledger(self.messages, self.permits, self.memory, self._patience, receiver_pid)

    def _gate_over(self, arena: Arena) -> Gate[Place]:
        return Gate(
            self.max_bytes,
            space=arena,
            stuck_elsewhere=self._parked_for_good,
            long_wait_s=self._patience.long_wait_s,
            on_long_wait=lambda nbytes: self.ledger.log_wait(f"{nbytes} bytes of shared memory"),
            max_wait_s=self._patience.max_wait_s,
            overdue=lambda nbytes: self.ledger.overdue("not enough shared memory was free", 0, nbytes),
        )

    # Messages in the blocks of tasks

    def enter(self, message: Message) -> None:
        """Note that the running task is in the block of a message from now on."""
        message.task = asyncio.current_task()
        self._by_task[message.task] = message

    def leave(self, message: Message) -> None:
        """Note that a message is not open any more: its task may allocate for another one."""
        if self._by_task.get(message.task) is message:
            del self._by_task[message.task]
        message.task = None

    # Permits

    async def permit_with(self, allocation: Allocation) -> Ticket[None]:
        """Wait for a permit with memory in hand, which is not released meanwhile."""
        parked = self.memory.size_of(allocation.block.number)
        self._parked += parked
        try:
            self.memory.gate.refuse_if_stuck()
            return await self.permits.acquire(1)
        finally:
            self._parked -= parked

    def _parked_for_good(self) -> int:
        """Count the bytes of blocks whose sends wait for a permit, if every permit waits for bytes."""
        waiting = sum(message.awaits_bytes > 0 for message in self.messages)
        return self._parked if waiting == self.permits.budget.in_use else 0

    # Memory

    async def block(self, nbytes: int, message: Message) -> Block:
        """Wait for a block of shared memory for a message, and pin it.

        Raises:
            WouldBlockError: waiting would never end, or lasted for too long.
            OSError: the machine has no descriptors or no addresses left.
        """
        message.awaits_bytes += 1
        message.has_bytes = True
        try:
            return await self.memory.acquire(nbytes, message)
        except StuckError:
            raise self.ledger.would_block(
                "all shared memory is held by messages that wait for more, this one among them, so that "
                "waiting would never end: raise arena_bytes or lower max_concurrent_videos",
                0,
                nbytes,
            ) from None
        finally:
            message.awaits_bytes -= 1

    async def block_to_allocate(self, nbytes: int, message: Message | None) -> Block:
        """Wait for a block that a caller will own, and pin it; errors are those of `block`.

        Args:
            nbytes: of the block.
            message: the open message that the memory is for, and accounted to. If there is none, the wait is
                accounted to the message in whose block this task is, since that message cannot end while
                the task waits; the memory is not, since another task may free it meanwhile.
        """
        block = self.memory.try_acquire(nbytes, message)
        if block is not None:
            if message is not None:
                message.has_bytes = True
            return block
        waiting = message or self._by_task.get(asyncio.current_task())
        block = await (self.memory.acquire(nbytes) if waiting is None else self.block(nbytes, waiting))
        self.memory.account(block.number, message)
        return block

    def check_moves(self, nbytes: int, block: Block) -> None:
        """Refuse to copy an allocated tensor that would wait for the memory that it holds itself.

        Raises:
            WouldBlockError: it would.
        """
        held = self.memory.size_of(block.number)
        if held + nbytes > self.max_bytes:
            raise self.ledger.would_block(
                "an earlier receiver may still read where this tensor lies, so it has to be copied, and "
                f"the {held} bytes that it holds leave no room for that: send a clone of it, and free it",
                0,
                nbytes,
            )

    def no_room(self, *, is_connected: bool) -> WouldBlockError:
        """Make the error of a message that waited too long for the receiver."""
        return self.ledger.overdue(
            "the receiver read nothing" if is_connected else "no receiver was here", 1, 0
        )
