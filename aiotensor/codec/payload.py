"""Encode and decode messages on the event loop, or in a thread if that may take long."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from aiotensor.codec.cost import QUICK_CODED_TENSORS, least_bytes, takes_long
from aiotensor.codec.decoder import TensorDecoder
from aiotensor.codec.encoder import Encoding
from aiotensor.codec.expectations import check_before_sending
from aiotensor.codec.placeholders import PACKED
from aiotensor.errors import ProtocolError
from aiotensor.memory.copying import QUICK_BYTES
from aiotensor.memory.inline import MAX_INLINE_BYTES
from aiotensor.memory.source import ArraySource, Source
from aiotensor.protocol.parts import body_too_large
from aiotensor.runtime.worker import in_thread

__all__ = ["MAX_BODY_TENSOR_BYTES", "QUICK_BODY_BYTES", "Payload", "pack", "unpack", "unpack_now"]

# The maximum number of bytes of tensors in the body of a message. A sender carries the other tensors. Without
# a sender, further small tensors are packed into one separate buffer, so that tensors alone cannot make the
# body too large.
MAX_BODY_TENSOR_BYTES = 8 * MAX_INLINE_BYTES

# A larger body is decoded in a thread, since that may take a millisecond. In addition to one tensor of
# `MAX_INLINE_BYTES`, a body of this size can contain two thousand values or many tiny tensors, so tensors are
# counted, too.
QUICK_BODY_BYTES = MAX_INLINE_BYTES + 2 * 1024
_MANY_TENSORS_BYTES = 2 * 1024  # a body of this size contains at most `QUICK_CODED_TENSORS` inline tensors
_TAGS = (msgspec.msgpack.encode("in"), msgspec.msgpack.encode("as"), PACKED)  # of tensors in a body
_TAG_START = PACKED[:1]  # the first byte of each tag


class Payload(msgspec.Struct, eq=False, kw_only=True):
    """An encoded message.

    Attributes:
        has_sender: whether a sender carries large tensors separately.
        max_inline_bytes: the maximum number of bytes of tensors in the body.
        parts: the body, followed by its buffers.
        tensors: the tensors that are sent separately, in the order of their numbers in the body.
        inline_bytes: the number of bytes of tensors in the body, counted only if `has_sender`.
    """

    has_sender: bool
    max_inline_bytes: int = MAX_BODY_TENSOR_BYTES
    parts: list[bytes | memoryview] = []
    tensors: list[torch.Tensor | npt.NDArray[np.generic]] = []
    inline_bytes: int = 0

    def encode(self, box: list[object]) -> None:
        """Encode the message that a list contains, and empty the list, so that the message can be freed."""
        try:
            message = box[0]
            if isinstance(message, msgspec.Struct) and (check := check_before_sending(type(message))):
                check(message)
            del message
            encoding = Encoding(self._place, max_inline_bytes=self.max_inline_bytes)
            self.parts = encoding.encode(box.pop())
        except BaseException:
            self.tensors.clear()
            raise

    def _place(self, source: Source) -> int | None:
        """Return the number of a tensor that is sent separately, or None to encode it in the message."""
        if not self.has_sender:
            return None
        nbytes = source.nbytes
        if nbytes <= MAX_INLINE_BYTES and self.inline_bytes + nbytes <= self.max_inline_bytes:
            self.inline_bytes += nbytes
            return None
        self.tensors.append(source.array if isinstance(source, ArraySource) else source)
        return len(self.tensors) - 1


async def pack(
    box: list[object],
    *,
    has_sender: bool,
    max_inline_bytes: int = MAX_BODY_TENSOR_BYTES,
    body_limit: Callable[[], int | None] = lambda: None,
    peer: str = "",
) -> Payload:
    """Encode a message, in a thread if that may take long.

    The message must not change until the call returns, because other threads may run between the encoding of
    two tensors. If the call is cancelled, the thread continues.

    Args:
        box: a list that contains the message, and is empty afterwards, so that a large message can be freed
            in the thread.
        has_sender: as for `Payload`.
        max_inline_bytes: as for `Payload`.
        body_limit: called for a large message; returns the largest body that the peer accepts, in bytes; None
            for no limit.
        peer: "client", "server" or "consumer", for the error message.

    Raises:
        TypeError: part of the message cannot be encoded, or a tensor does not match its `TensorMeta`;
            `TensorEncoder.encode` lists further errors.
        UnsupportedTensorError: a tensor in the message cannot be sent unchanged.
        TooLargeError: the strings and bytes of a large message exceed the limit.
        OSError: no thread can be started.
    """
    payload = Payload(has_sender=has_sender, max_inline_bytes=max_inline_bytes)
    if takes_long(box[0], has_sender=has_sender):
        limit = body_limit()
        if limit is not None and (size := least_bytes(box[0])) > limit:
            raise body_too_large(size, limit, peer)
        await in_thread(payload.encode, box)
    else:
        payload.encode(box)
    return payload


async def unpack(decoder: TensorDecoder[Any], parts: Sequence[memoryview], found: list[torch.Tensor]) -> Any:
    """Decode a message, in a thread if that may take long.

    If the call is cancelled, the thread continues.

    Args:
        decoder: the decoder for the type of the message.
        parts: the body, followed by its buffers.
        found: the tensors that were sent separately, in the order of their numbers in the body.

    Raises:
        ProtocolError: the message cannot be decoded, has the wrong type, or does not use each tensor once.
        OSError: no thread can be started.
    """
    if _decodes_quickly(parts, len(found)):
        return unpack_now(decoder, parts, found)
    return await in_thread(unpack_now, decoder, parts, found)


def _decodes_quickly(parts: Sequence[memoryview], tensors: int) -> bool:
    body = parts[0]
    if len(body) > QUICK_BODY_BYTES or sum(map(len, parts)) > QUICK_BYTES:
        return False
    tensors += len(parts)
    if len(body) > _MANY_TENSORS_BYTES or len(parts) > 1:  # references to packed tensors are short
        data = bytes(body)
        if tensors + data.count(_TAG_START) > QUICK_CODED_TENSORS:  # rare: counting a single byte is faster
            tensors += sum(map(data.count, _TAGS))
    return tensors <= QUICK_CODED_TENSORS


def unpack_now(decoder: TensorDecoder[Any], parts: Sequence[memoryview], found: list[torch.Tensor]) -> Any:
    """Decode a message on this thread; arguments and errors are those of `unpack`."""
    used: set[int] = set()

    def find(handle: object) -> torch.Tensor:
        if not isinstance(handle, int) or not 0 <= handle < len(found) or handle in used:
            raise ProtocolError(
                f"the peer referred to tensor {handle!r:.64} of {len(found)}, which does not exist or was "
                "used before"
            )
        used.add(handle)
        return found[handle]

    message = decoder.decode(parts, find)
    if len(used) != len(found):
        raise ProtocolError(
            f"the peer sent {len(found)} tensors, but the message uses {len(used)} of them: one is too many, "
            "or is in a field that the type of this decoder does not have"
        )
    return message
