"""The parts of a ZeroMQ message of the channel, and their limits.

    header | body, unless the header contains it | a buffer for each large tensor | all small tensors

The hello of each side states the largest part (a body or a buffer) and the largest body that this side
accepts. A message that exceeds these limits is not sent. If a peer violates them nevertheless, ZeroMQ closes
the connection for a part that is too large, and the reader of a body that is too large closes it without
decoding the body.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from aiotensor.errors import ProtocolError, TooLargeError
from aiotensor.protocol.frames import MAX_TENSORS

__all__ = [
    "BODY_BYTES",
    "MAX_PARTS",
    "PartLimits",
    "Parts",
    "body_too_large",
    "check_parts",
    "parts_of",
    "split",
]

Parts: TypeAlias = Sequence[bytes | memoryview]

# A body of at least this size is sent as a separate part, so that it is not copied into the header.
BODY_BYTES = 64 * 1024

MAX_PARTS = MAX_TENSORS + 3


class PartLimits(NamedTuple):
    """The limits of one side on the messages that it accepts; None for no limit.

    Attributes:
        part_bytes: the largest part, in bytes.
        body_bytes: the largest body, in bytes.
    """

    part_bytes: int | None = None
    body_bytes: int | None = None


def check_parts(parts: Parts, limits: PartLimits, peer: str) -> None:
    """Check that the peer accepts a message.

    Args:
        parts: the body of the message, and the buffers beside it.
        limits: the limits of the peer.
        peer: "client" or "server", for the error message.

    Raises:
        TooLargeError: the body or another part is too large, or there are too many parts.
    """
    # The last buffer contains all small tensors if it is `bytes`; it does not count as a large tensor.
    tensors = len(parts) - 1 - (len(parts) > 1 and isinstance(parts[-1], bytes))
    if tensors > MAX_TENSORS:
        raise TooLargeError(
            f"a message without a TensorSender can have at most {MAX_TENSORS} large tensors, but this one "
            f"has {tensors}: send several messages",
            limit=MAX_TENSORS,
            requested=tensors,
            unit="tensors",
        )
    size, limit = len(parts[0]), limits.body_bytes
    if limit is not None and size > limit:
        raise body_too_large(size, limit, peer)
    limit = limits.part_bytes
    if limit is not None and (largest := max(map(len, parts))) > limit:
        what = "the body" if size == largest else "a tensor, or all small tensors together,"
        raise TooLargeError(
            f"{what} of this message has {largest} bytes, but the {peer} accepts only "
            f"max_part_bytes={limit}: send several messages, or tensors with a TensorSender, or raise that "
            f"limit of the {peer}",
            limit=limit,
            requested=largest,
        )


def body_too_large(size: int, limit: int, peer: str) -> TooLargeError:
    """Return the error for a body of `size` bytes, or more; `peer` is as for `check_parts`."""
    return TooLargeError(
        f"the body of this message has {size} bytes, but the {peer} accepts only max_body_bytes={limit}: "
        "put large data into tensors or arrays, which are sent beside it, or raise this limit",
        limit=limit,
        requested=size,
    )


def split(parts: Parts) -> tuple[memoryview | None, Parts]:
    """Return the body for the header, or None if it is a separate part, and the parts after the header."""
    return (None, parts) if len(parts[0]) >= BODY_BYTES else (memoryview(parts[0]), parts[1:])


def parts_of(body: memoryview | None, following: list[memoryview], limits: PartLimits) -> list[memoryview]:
    """Return the body and the buffers of a received message.

    Args:
        body: the body in the header; None if it is the first part after the header.
        following: the parts after the header.
        limits: the limits that were announced to the peer; ZeroMQ enforces the limit on parts.

    Raises:
        ProtocolError: there is no body, or the body is too large.
    """
    parts = following if body is None else [body, *following]
    if not parts:
        raise ProtocolError("it sent a message without a body")
    if limits.body_bytes is not None and len(parts[0]) > limits.body_bytes:
        raise ProtocolError(
            f"it sent a body of {len(parts[0])} bytes, more than the announced max_body_bytes="
            f"{limits.body_bytes}"
        )
    return parts
