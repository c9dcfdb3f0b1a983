"""Messages whose large tensors are beside the body."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from aiotensor.codec.decoder import Parts, TensorDecoder
from aiotensor.codec.encoder import Encoding
from aiotensor.codec.expectations import check_before_sending
from aiotensor.errors import ProtocolError, TooLargeError
from aiotensor.memory.source import ArraySource, Source
from aiotensor.memory.tensors import MAX_INLINE_BYTES

# The maximum number of bytes of tensors in the body of a message, so that tensors alone cannot make a body
# too large. The other tensors are placed in shared memory.
MAX_BODY_TENSOR_BYTES = 8 * MAX_INLINE_BYTES

# A larger body is decoded in a thread, since that may take a millisecond. In addition to one tensor of
# `MAX_INLINE_BYTES`, a body of this size can contain two thousand values or many tiny tensors, so tensors are
# counted, too.
QUICK_BODY_BYTES = MAX_INLINE_BYTES + 2 * 1024

# The tags of tensors in a body, and their first byte. Other values may contain these, too.
TENSOR_TAGS = (msgspec.msgpack.encode("in"), msgspec.msgpack.encode("as"))
TENSOR_MARK = TENSOR_TAGS[0][:1]


class Payload(Encoding):
    """An encoded message, and the tensors beside it.

    Attributes:
        body: the encoded message.
        tensors: the tensors beside the body, in the order of their numbers in it.
    """

    room: int = MAX_BODY_TENSOR_BYTES
    body: bytes = b""
    tensors: list[torch.Tensor | npt.NDArray[np.generic]] = msgspec.field(default_factory=list)

    def place(self, source: Source) -> int:
        """Return the number of a tensor beside the body."""
        self.tensors.append(source.array if isinstance(source, ArraySource) else source)
        return len(self.tensors) - 1

    def encode_body(self, box: list[object]) -> None:
        """Encode the message that a list contains, and empty the list, so that the message can be freed."""
        try:
            message = box[0]
            if isinstance(message, msgspec.Struct) and (check := check_before_sending(type(message))):
                check(message)
            del message
            self.body = msgspec.msgpack.encode(box.pop(), enc_hook=self.encode_tensor)
        except BaseException:
            self.tensors.clear()
            self.values.clear()
            raise


def check_body(size: int, limit: int | None) -> None:
    """Raise `TooLargeError` if a body of `size` bytes, or more, exceeds a limit of the peer."""
    if limit is not None and size > limit:
        raise TooLargeError(
            f"the body of this message has {size} bytes, but the peer accepts only max_body_bytes={limit}: "
            "put large data into tensors or arrays, which are sent beside it, or raise its limit",
            limit=limit,
            requested=size,
        )


def unpack(decoder: TensorDecoder[Any], body: memoryview, found: list[torch.Tensor]) -> Any:
    """Decode a message.

    Args:
        decoder: the decoder for the type of the message.
        body: the encoded message.
        found: the tensors beside the body, in the order of their numbers in it.

    Raises:
        ProtocolError: the message cannot be decoded, has the wrong type, or does not use each tensor once.
    """
    parts = Parts("tensor", found)
    message = decoder.decode([body], parts.take)
    try:
        parts.check_all_used()
    except ProtocolError:
        del message  # the traceback refers to this frame
        raise
    return message
