"""What is on its way: a message, and what can become of it.

    OPEN --last tensor--> WHOLE --taken--> TAKEN
      |                     |
      +---------------------+--discarded, by either side--> DISCARDED
      |                     |
      '---------------------'--the receiver is gone--> LOST

It holds a permit while it is OPEN or WHOLE.
"""

import asyncio
import enum
import weakref
from collections.abc import Collection
from contextvars import ContextVar
from typing import TypeAlias

from aiotensor.errors import AioTensorError
from aiotensor.protocol.credits import Ticket

__all__ = ["Message", "State", "enter_block", "innermost_block"]


class State(enum.Enum):
    """Where a message is."""

    OPEN = "being sent"
    WHOLE = "waiting to be taken"
    TAKEN = "taken, its tensors still in use"
    DISCARDED = "discarded"
    LOST = "lost"


class Message:
    """A message that holds a permit, or did.

    Args:
        permit: to give back when it ends.
    """

    __slots__ = (
        "awaits_bytes",
        "awaits_room",
        "count",
        "has_bytes",
        "loss",
        "number",
        "permit",
        "since",
        "state",
    )

    def __init__(self, permit: Ticket[None]) -> None:
        self.permit = permit
        self.since = permit.since  # it began then, by the clock of the loop
        self.state = State.OPEN
        self.loss: AioTensorError | None = None  # why it is LOST
        self.number: int | None = None  # known with the first announcement
        self.count = 0  # tensors announced
        self.awaits_bytes = 0  # sends that wait for bytes
        self.awaits_room = 0  # sends that wait for the link
        self.has_bytes = False  # of shared memory, or had

    @property
    def has_ended(self) -> bool:
        """Say whether it gave its permit back."""
        return self.state is not State.OPEN and self.state is not State.WHOLE


# The messages in whose blocks the running code is, the innermost last. Each has a weak reference to its task,
# since the context belongs to that; None for a thread.
_Block: TypeAlias = "tuple[weakref.ref[asyncio.Task[object]] | None, Message]"
_blocks: ContextVar[tuple[_Block, ...]] = ContextVar("aiotensor_blocks", default=())


def enter_block(message: Message, task: "asyncio.Task[object] | None") -> None:
    """Note that a task is in the block of a message, or a thread, whose calls then run with its context.

    Args:
        message: in whose block.
        task: the running one; None if a thread is in the block.
    """
    outer = [block for block in _blocks.get() if block[1].state is State.OPEN]
    _blocks.set((*outer, (None if task is None else weakref.ref(task), message)))


def innermost_block(messages: Collection[Message]) -> Message | None:
    """Return the open message in whose block the running task is, of several messages; None for none.

    Tasks that were started in the block are not in it: it may end before they do.
    """
    for task, message in reversed(_blocks.get()):
        is_inside = task is None or task() is asyncio.current_task()
        if is_inside and message.state is State.OPEN and message in messages:
            return message
    return None
