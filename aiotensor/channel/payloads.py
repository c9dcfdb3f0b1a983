"""Encode and decode messages: their bodies, and their tensors beside the body or sent by a sender."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from aiotensor.channel.encoding_cost import QUICK_CODED_TENSORS, takes_long
from aiotensor.channel.memory import MessageMemory
from aiotensor.codec import PACKED, SourceEncoder, TensorDecoder
from aiotensor.errors import ClosedError, ProtocolError
from aiotensor.receiver import TensorReceiver
from aiotensor.runtime.worker import in_thread
from aiotensor.sender import OpenMessage, TensorSender
from aiotensor.tensors.copying import QUICK_BYTES
from aiotensor.tensors.inline import MAX_INLINE_BYTES
from aiotensor.tensors.source import ArraySource, Source
from aiotensor.types import TensorHandle

__all__ = [
    "QUICK_BODY_BYTES",
    "QUICK_TENSORS",
    "Handles",
    "Payload",
    "ReceivedAnswer",
    "discard",
    "drop_answer",
    "pack",
    "unpack",
]

# The most bytes of tensors in the body of a message. A sender sends the others. Without a sender, small ones
# are packed into one buffer beside the body, so that tensors alone do not make the body too large.
_MAX_INLINE_BYTES = 8 * MAX_INLINE_BYTES

# The most tensors that are sent or taken in one iteration of the event loop, each in 3 to 30 microseconds.
QUICK_TENSORS = 64

# Decoding a larger body may take a millisecond, and is done in a thread. Beside one tensor of the largest
# size in a body there is space for two thousand values, or for many tiny tensors, so tensors are counted.
QUICK_BODY_BYTES = MAX_INLINE_BYTES + 2 * 1024
_MANY_TENSORS_BYTES = 2 * 1024
_INLINE_TAG = msgspec.msgpack.encode("in")  # the tag of a tensor in a body

Handles = tuple[TensorHandle, ...]


class ReceivedAnswer(NamedTuple):
    """An answer: the handles of tensors that a sender has sent, the body, and the buffers beside it."""

    handles: Handles
    parts: list[memoryview]


class Payload:
    """An encoded message.

    Attributes:
        parts: the body, and the buffers beside it.
        tensors: the tensors for the sender, in the order of their numbers in the body.
    """

    def __init__(self, *, has_sender: bool) -> None:
        self.parts: list[bytes | memoryview] = []
        self.tensors: list[torch.Tensor | npt.NDArray[np.generic]] = []
        self._has_sender = has_sender
        self._inline_bytes = 0

    def encode(self, box: list[object]) -> None:
        """Remove a message from its box and encode it; this frees it if nothing else refers to it."""
        try:
            encoder = SourceEncoder(self._place, max_inline_bytes=_MAX_INLINE_BYTES)
            self.parts = encoder.encode(box.pop())
        except BaseException:
            self.tensors.clear()
            raise

    def _place(self, source: Source) -> int | None:
        """Return the number of a tensor that the sender sends, or None to encode it in the message."""
        if not self._has_sender:
            return None
        nbytes = source.nbytes
        if nbytes <= MAX_INLINE_BYTES and self._inline_bytes + nbytes <= _MAX_INLINE_BYTES:
            self._inline_bytes += nbytes
            return None
        self.tensors.append(source.array if isinstance(source, ArraySource) else source)
        return len(self.tensors) - 1

    async def send_tensors(self, sender: TensorSender, inside: OpenMessage | None = None) -> Handles:
        """Send the tensors as one message.

        Args:
            sender: the sender of the tensors.
            inside: an open message of the sender, which this completes; None to begin a new one.

        Yields to the loop between many tensors, even if no send has to wait. Cancelling discards the tensors
        that were sent.
        """
        handles: list[TensorHandle] = []
        if inside is not None:
            try:
                await self._send_all(inside, handles)
            except BaseException:
                # The receiver would never take these tensors, and a retry needs the message without them.
                discard(sender, handles)
                raise
            inside.finish()
        elif len(self.tensors) == 1:
            return (await sender.send(self.tensors[0]),)
        else:
            async with sender.message() as message:
                await self._send_all(message, handles)
        return tuple(handles)

    async def _send_all(self, message: OpenMessage, handles: list[TensorHandle]) -> None:
        """Send every tensor, and append its handle."""
        tensors = nbytes = 0  # in this iteration of the loop, if no send has to wait
        for tensor in self.tensors:
            if tensors == QUICK_TENSORS or nbytes > QUICK_BYTES:
                tensors = nbytes = 0
                await asyncio.sleep(0)
            handles.append(await message.send(tensor))
            tensors += 1
            nbytes += tensor.nbytes


async def pack(box: list[object], *, has_sender: bool) -> Payload:
    """Encode a message, in a thread if that may take long.

    The message must not change until this returns: other threads run between two of its tensors. The thread
    continues after this is cancelled.

    Args:
        box: holds the message, and is empty afterwards, so that a large message can be freed in the thread.
        has_sender: whether a sender sends the large tensors.

    Raises:
        TypeError: part of the message cannot be encoded.
        UnsupportedTensorError: a tensor in it would arrive changed.
        OSError: no thread can be started.
    """
    payload = Payload(has_sender=has_sender)
    if takes_long(box[0], has_sender=has_sender):
        await in_thread(payload.encode, box)
    else:
        payload.encode(box)
    return payload


async def unpack(decoder: TensorDecoder[Any], parts: Sequence[memoryview], found: list[torch.Tensor]) -> Any:
    """Decode a message, in a thread if that may take long.

    Args:
        decoder: the decoder for its type.
        parts: the body, and the buffers beside it.
        found: the tensors that a sender has sent, in the order of their numbers.

    Raises:
        ProtocolError: it cannot be decoded, is not of its type, or does not use each of its tensors once.
        OSError: no thread can be started.
    """
    if _decodes_quickly(parts, len(found)):
        return _decode(decoder, parts, found)
    return await in_thread(_decode, decoder, parts, found)


def _decodes_quickly(parts: Sequence[memoryview], tensors: int) -> bool:
    body = parts[0]
    if len(body) > QUICK_BODY_BYTES or sum(map(len, parts)) > QUICK_BYTES:
        return False
    tensors += len(parts)
    if len(body) > _MANY_TENSORS_BYTES or len(parts) > 1:  # the placeholder of a packed tensor is short
        tensors += bytes(body).count(_INLINE_TAG) + bytes(body).count(PACKED)
    return tensors <= QUICK_CODED_TENSORS


def _decode(decoder: TensorDecoder[Any], parts: Sequence[memoryview], found: list[torch.Tensor]) -> Any:
    used: set[int] = set()

    def find(handle: object) -> torch.Tensor:
        if not isinstance(handle, int) or not 0 <= handle < len(found) or handle in used:
            raise ProtocolError(f"the peer named tensor {handle!r:.64} of {len(found)}, or named it twice")
        used.add(handle)
        return found[handle]

    message = decoder.decode(parts, find)
    if len(used) != len(found):
        raise ProtocolError(
            f"the peer sent {len(found)} tensors, and the message uses {len(used)} of them: one is too many, "
            "or is in a field that the type here does not have"
        )
    return message


def discard(sender: TensorSender | None, handles: Sequence[TensorHandle]) -> None:
    """Discard tensors that were sent for a message."""
    if sender is not None and handles:
        with suppress(ClosedError):  # closing has discarded them already
            sender.discard(handles[0])


def drop_answer(memory: MessageMemory, receiver: TensorReceiver | None, answer: ReceivedAnswer) -> None:
    """Drop an answer that no request waits for, and its tensors; the client may be closed."""
    # Not now: the caller may be reading the message, and would free it here after all.
    asyncio.get_running_loop().call_soon(memory.free_parts, answer.parts)
    if receiver is not None and answer.handles:
        with suppress(ClosedError, ValueError):  # it may be the handle of no sender
            receiver.discard(answer.handles[0])
