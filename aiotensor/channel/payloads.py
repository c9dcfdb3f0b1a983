"""The tensors of messages, which senders send separately from the bodies."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from aiotensor.channel.memory import MessageMemory
from aiotensor.codec.payload import Payload
from aiotensor.errors import ClosedError
from aiotensor.memory.copying import QUICK_BYTES
from aiotensor.receiver import TensorReceiver
from aiotensor.sender import OpenMessage, TensorSender
from aiotensor.types import TensorHandle

__all__ = ["QUICK_TENSORS", "Handles", "ReceivedAnswer", "discard", "drop_answer", "send_tensors"]

# The maximum number of tensors that are sent or taken in one iteration of the event loop, each in 3 to 30
# microseconds.
QUICK_TENSORS = 64

Handles = tuple[TensorHandle, ...]


class ReceivedAnswer(msgspec.Struct, eq=False):
    """An answer: the handles of tensors that a sender has sent, the body, and the buffers beside it."""

    handles: Handles
    parts: list[memoryview]


async def send_tensors(payload: Payload, sender: TensorSender, inside: OpenMessage | None = None) -> Handles:
    """Send the tensors of a payload as one message.

    Args:
        payload: the encoded message.
        sender: the sender of the tensors.
        inside: an open message of the sender, which this call completes; None to begin a new one.

    Yields to the loop at intervals, even if no send has to wait. Cancellation discards the tensors that were
    sent.
    """
    handles: list[TensorHandle] = []
    if inside is not None:
        try:
            await _send_all(payload, inside, handles)
        except BaseException:
            # The receiver would never take these tensors, and a retry needs the message without them.
            discard(sender, handles)
            raise
        inside.finish()
    elif len(payload.tensors) == 1:
        return (await sender.send(payload.tensors[0]),)
    else:
        async with sender.message() as message:
            await _send_all(payload, message, handles)
    return tuple(handles)


async def _send_all(payload: Payload, message: OpenMessage, handles: list[TensorHandle]) -> None:
    """Send every tensor of a payload in a message, and append its handle to `handles`."""
    tensors = nbytes = 0  # in this iteration of the loop, if no send has to wait
    for tensor in payload.tensors:
        if tensors == QUICK_TENSORS or nbytes > QUICK_BYTES:
            tensors = nbytes = 0
            await asyncio.sleep(0)
        handles.append(await message.send(tensor))
        tensors += 1
        nbytes += tensor.nbytes


def discard(sender: TensorSender | None, handles: Sequence[TensorHandle]) -> None:
    """Discard tensors that were sent for a message."""
    if sender is not None and handles:
        with suppress(ClosedError):  # closing has discarded them already
            sender.discard(handles[0])


def drop_answer(memory: MessageMemory, receiver: TensorReceiver | None, answer: ReceivedAnswer) -> None:
    """Drop an answer that no request waits for, and its tensors; the client may be closed."""
    # Deferred: while the caller still refers to the message, emptying the list in the thread frees nothing.
    asyncio.get_running_loop().call_soon(memory.free_parts, answer.parts)
    if receiver is not None and answer.handles:
        with suppress(ClosedError, ValueError):  # the peer may have sent an invalid handle
            receiver.discard(answer.handles[0])
