"""The messages of a sender, and the blocks of code in which they are sent.

    OPEN --last tensor--> WHOLE --taken--> TAKEN
      |                     |
      +---------------------+--discarded, by either side--> DISCARDED
      |                     |
      '---------------------'--the receiver is gone--> LOST

A message holds a permit while it is OPEN or WHOLE.
"""

import asyncio
import enum
import weakref
from collections.abc import Collection
from contextvars import ContextVar
from typing import TypeAlias

import msgspec

from aiotensor.errors import AioTensorError
from aiotensor.protocol.credits import Ticket
from aiotensor.protocol.frames import Put
from aiotensor.tensors.dtypes import DTYPE_NAMES
from aiotensor.tensors.placement import Placed
from aiotensor.tensors.source import Source, attributes_of
from aiotensor.types import TraceContext

__all__ = [
    "DISCARDED",
    "LOST",
    "OPEN",
    "TAKEN",
    "WHOLE",
    "Message",
    "MessageState",
    "enter_block",
    "innermost_block",
    "put_of",
]


class MessageState(enum.Enum):
    """The state of a message; the value is its text in statistics."""

    OPEN = "being sent"
    WHOLE = "waiting to be taken"
    TAKEN = "taken, its tensors still in use"
    DISCARDED = "discarded"
    LOST = "lost"


# Names of the module, because each step of a message checks its state, and looking up a member of an enum is
# slow.
OPEN, WHOLE, TAKEN, DISCARDED, LOST = MessageState


class Message(msgspec.Struct, eq=False):
    """A message of a sender.

    Attributes:
        permit: its permit, which is released when the message ends.
        state: its state.
        loss: the reason why it is LOST; None in other states.
        number: its number; None before it is announced.
        count: the number of its announced tensors.
        awaits_bytes: the number of its sends that wait for shared memory.
        awaits_receiver: the number of its sends that wait until the receiver reads.
        is_finished: whether all its tensors were posted, so that it becomes whole once they are announced.
    """

    permit: Ticket[None]
    state: MessageState = OPEN
    loss: AioTensorError | None = None
    number: int | None = None
    count: int = 0
    awaits_bytes: int = 0
    awaits_receiver: int = 0
    is_finished: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether its permit was released."""
        return self.state is not OPEN and self.state is not WHOLE


def put_of(
    message: int,
    tensor: int,
    source: Source,
    placed: Placed,
    block: int | None,
    *,
    last: bool,
    trace: TraceContext | None = None,
) -> Put:
    """Return the `Put` frame of a tensor.

    Args:
        message: the number of its message.
        tensor: its number in the message.
        source: the tensor.
        placed: the position of its bytes.
        block: the number of its block; None for a tensor without one.
        last: whether it is the last tensor of the message.
        trace: the trace context of the call; None without tracing.
    """
    return Put(
        message,
        tensor,
        DTYPE_NAMES[source.dtype],
        tuple(source.shape),
        "cpu" if source.is_cpu else str(source.device),
        placed.placement,
        placed.payload,
        block,
        last,
        attributes_of(source),
        trace,
    )


# The `async with` blocks of messages that surround the running code, the innermost one last. Each has a weak
# reference to its task, or None for a thread. A task that was started in the block inherits this context, but
# is not in the block.
_CodeBlock: TypeAlias = "tuple[weakref.ref[asyncio.Task[object]] | None, Message]"
_code_blocks: ContextVar[tuple[_CodeBlock, ...]] = ContextVar("aiotensor_blocks", default=())


def enter_block(message: Message, task: "asyncio.Task[object] | None") -> None:
    """Record that a task or a thread is in the `async with` block of a message.

    Args:
        message: the message.
        task: the running task; None for a thread, whose calls in the loop run in copies of its context.
    """
    outer = [block for block in _code_blocks.get() if block[1].state is OPEN]
    _code_blocks.set((*outer, (None if task is None else weakref.ref(task), message)))


def innermost_block(messages: Collection[Message]) -> Message | None:
    """Return the open message among `messages` whose block surrounds the running task; None if there is none.

    The block does not surround tasks that were started in it, because it may end before they do.
    """
    for task, message in reversed(_code_blocks.get()):
        is_inside = task is None or task() is asyncio.current_task()
        if is_inside and message.state is OPEN and message in messages:
            return message
    return None
