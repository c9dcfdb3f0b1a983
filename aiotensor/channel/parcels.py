"""Encode and decode messages: their bodies, and their tensors in ZeroMQ parts or sent by a sender."""

import asyncio
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import zmq

from aiotensor.channel.sizes import QUICK_CODED_TENSORS, takes_long
from aiotensor.codec import PACKED, SourceEncoder, TensorDecoder
from aiotensor.errors import ClosedError, PeerLostError, ProtocolError, TooLargeError
from aiotensor.protocol.exchange import PartLimits
from aiotensor.protocol.frames import MAX_TENSORS
from aiotensor.receiver import TensorReceiver
from aiotensor.runtime.affinity import FreedItems
from aiotensor.runtime.worker import Worker, in_thread
from aiotensor.sender import OpenMessage, TensorSender
from aiotensor.tensors.copying import QUICK_BYTES
from aiotensor.tensors.inline import MAX_INLINE_BYTES
from aiotensor.tensors.source import ArraySource, Source
from aiotensor.types import TensorHandle

__all__ = [
    "QUICK_BODY_BYTES",
    "QUICK_TENSORS",
    "Answered",
    "Asked",
    "Disposal",
    "Handles",
    "Loans",
    "Parcel",
    "body_and_buffers",
    "check_parts",
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
_INSIDE = msgspec.msgpack.encode("in")  # the tag of a tensor in a body

_QUICK_FREED_BYTES = 8 << 20


Handles = tuple[TensorHandle, ...]


class Answered(NamedTuple):
    """An answer: the handles of tensors that a sender has sent, the body, and the buffers beside it."""

    handles: Handles
    parts: list[memoryview]


class Asked(NamedTuple):
    """A sent message: its number, and the future of the answer if it expects one."""

    number: int
    answered: "asyncio.Future[Answered] | None"


class Parcel:
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

    async def send_tensors(
        self, sender: TensorSender, inside: OpenMessage | None = None
    ) -> tuple[TensorHandle, ...]:
        """Send the tensors as one message.

        Args:
            sender: the sender of the tensors.
            inside: an open message of the sender, which this completes; None to begin a new one.

        Yields to the loop between many tensors, even if no send has to wait. Cancelling discards the tensors
        that were sent.
        """
        if inside is not None:
            return await self._send_inside(inside)
        if len(self.tensors) == 1:
            return (await sender.send(self.tensors[0]),)
        async with sender.message() as message:
            return tuple(await self._send_all(message, []))

    async def _send_inside(self, message: OpenMessage) -> tuple[TensorHandle, ...]:
        handles: list[TensorHandle] = []
        try:
            await self._send_all(message, handles)
        except BaseException:
            # The receiver would never take these tensors, and a retry needs the message without them.
            if handles:
                with suppress(ClosedError):
                    message.sender.discard(handles[0])
            raise
        message.finish()
        return tuple(handles)

    async def _send_all(self, message: OpenMessage, handles: list[TensorHandle]) -> list[TensorHandle]:
        """Send every tensor, and append its handle."""
        tensors = nbytes = 0  # in this iteration of the loop, if no send has to wait
        for tensor in self.tensors:
            if tensors == QUICK_TENSORS or nbytes > QUICK_BYTES:
                tensors = nbytes = 0
                await asyncio.sleep(0)
            handles.append(await message.send(tensor))
            tensors += 1
            nbytes += tensor.nbytes
        return handles


async def pack(box: list[object], *, has_sender: bool) -> Parcel:
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
    parcel = Parcel(has_sender=has_sender)
    if takes_long(box[0], has_sender=has_sender):
        await in_thread(parcel.encode, box)
    else:
        parcel.encode(box)
    return parcel


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
        tensors += bytes(body).count(_INSIDE) + bytes(body).count(PACKED)
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


def body_and_buffers(
    body: memoryview | None, frames: "Sequence[zmq.Frame]", limits: PartLimits
) -> list[memoryview]:
    """Return the body and buffers of a message that arrived.

    Args:
        body: the body in the header; None if it is the first part after the header.
        frames: the parts after the header.
        limits: the limits announced to the peer. ZeroMQ enforces the limit on parts.

    Raises:
        ProtocolError: there is no body, or it is too large.
    """
    parts = [frame.buffer for frame in frames]
    if body is not None:
        parts.insert(0, body)
    if not parts:
        raise ProtocolError("it sent a message without a body")
    if limits.body_bytes is not None and len(parts[0]) > limits.body_bytes:
        raise ProtocolError(
            f"it sent a body of {len(parts[0])} bytes, though it was told max_body_bytes={limits.body_bytes}"
        )
    return parts


def check_parts(parts: Sequence[bytes | memoryview], limits: PartLimits, peer: str) -> None:
    """Refuse a message that the peer does not accept.

    Args:
        parts: the body, and the buffers beside it.
        limits: the limits of the peer.
        peer: "client" or "server", for the text of the error.

    Raises:
        TooLargeError: the body or another part is too large, or there are too many.
    """
    # The buffer of packed tensors is `bytes`, and does not count as a tensor.
    tensors = len(parts) - 1 - (len(parts) > 1 and isinstance(parts[-1], bytes))
    if tensors > MAX_TENSORS:
        raise TooLargeError(
            f"a message without a sender has at most {MAX_TENSORS} tensors of more than "
            f"{MAX_INLINE_BYTES} bytes, this one has {tensors}: send several messages",
            limit=MAX_TENSORS,
            requested=tensors,
        )
    size, limit = len(parts[0]), limits.body_bytes
    if limit is not None and size > limit:
        raise TooLargeError(
            f"the body of this message has {size} bytes, and the {peer} accepts max_body_bytes={limit}: "
            "put large data into tensors or arrays, which travel beside it, or raise this limit",
            limit=limit,
            requested=size,
        )
    limit = limits.part_bytes
    if limit is not None and (largest := max(map(len, parts))) > limit:
        what = "the body" if size == largest else "a tensor, or the small ones together,"
        raise TooLargeError(
            f"{what} of this message has {largest} bytes, and the {peer} accepts max_part_bytes={limit}: "
            f"send several messages, or tensors by a sender, or raise that limit of the {peer}",
            limit=limit,
            requested=largest,
        )


def check_road(handles: Sequence[TensorHandle], receiver: str, leads_to: str | None) -> None:
    """Check that the tensors of a message went to its server, which would otherwise wait for them.

    Args:
        handles: the handles of the tensors.
        receiver: the id of the server's receiver; "" if it has none.
        leads_to: the id of the receiver that the sender is connected to; None for none.

    Raises:
        PeerLostError: they went to another receiver.
    """
    if handles and receiver and leads_to not in (None, receiver):
        raise PeerLostError(
            "the tensors of this message went to another receiver than the server's: the server was replaced "
            "in the meantime, or the sender's endpoint is not that of the server's receiver"
        )


class Disposal:
    """Free messages, large ones in a thread; belongs to the running loop.

    The kernel needs a millisecond to reclaim 20 MB, and Python as long for the objects of a large decoded
    message. The thread starts with the first large message.
    """

    def __init__(self) -> None:
        self._worker = Worker("aiotensor-channel")
        self._is_closed = False

    def let_go(self, parts: "list[memoryview] | list[bytes | memoryview]") -> None:
        """Release the parts of a message, by emptying the list now or in the thread."""
        if sum(map(len, parts)) > _QUICK_FREED_BYTES:
            self.free(parts)
        else:
            parts.clear()

    def free(self, box: list[Any]) -> None:
        """Empty a list in the thread."""
        if self._is_closed:
            box.clear()
        else:
            self._worker.begin("freeing a message", box.clear)

    def close(self) -> None:
        """Stop the thread after the pending work."""
        self._is_closed = True
        self._worker.close()


class _Loan:
    """Memory that ZeroMQ still reads, and the future that completes when it is released."""

    def __init__(self, returned: "asyncio.Future[None]") -> None:
        self.returned = returned
        self.left = 0
        self.watches: list[weakref.ref[Any]] = []


class Loans:
    """Track the memory that ZeroMQ reads without copying; belongs to the running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._freed: FreedItems[_Loan] = FreedItems(self._loop, self._let_go)
        self._open: set[_Loan] = set()  # keeps the weak references: their callbacks need them alive

    def lend(self, parts: Sequence[bytes | memoryview]) -> "asyncio.Future[None] | None":
        """Watch the large buffers of a message, before it is sent; return None if it has none.

        The future completes when nothing refers to their memory. The caller must drop its references too.
        """
        large = [
            part.obj for part in parts[1:] if isinstance(part, memoryview) and len(part) >= zmq.COPY_THRESHOLD
        ]
        if not large:
            return None
        loan = _Loan(self._loop.create_future())
        loan.left = len(large)
        self._open.add(loan)
        # The callbacks run in the thread that frees the memory, often pyzmq's own.
        loan.watches = [weakref.ref(owner, lambda _: self._freed(loan)) for owner in large]
        return loan.returned

    def _let_go(self, loans: list[_Loan]) -> None:
        for loan in loans:
            loan.left -= 1
            if not loan.left:
                self._open.discard(loan)
                if not loan.returned.done():
                    loan.returned.set_result(None)


def discard(sender: TensorSender | None, handles: Handles) -> None:
    """Discard tensors that were sent for a message."""
    if sender is not None and handles:
        with suppress(ClosedError):  # closing has discarded them already
            sender.discard(handles[0])


def drop_answer(disposal: Disposal, receiver: TensorReceiver | None, answered: Answered) -> None:
    """Drop an answer that no request waits for, and its tensors; the client may be closed."""
    # Not now: the caller may be reading the message, and would free it here after all.
    asyncio.get_running_loop().call_soon(disposal.let_go, answered.parts)
    if receiver is not None and answered.handles:
        with suppress(ClosedError, ValueError):  # it may be the handle of no sender
            receiver.discard(answered.handles[0])
