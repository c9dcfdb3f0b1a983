"""The rules for segments that a peer attaches, which are the same for all roles."""

from aiotensor.errors import ProtocolError
from aiotensor.protocol.frames import ARENA, Attach

__all__ = ["LARGEST_PAGE_BYTES", "MAX_SEGMENTS", "add_segment"]

# The maximum number of segments of one connection. A peer with this library attaches one at a time. Without a
# limit, a peer could attach single pages until this process has no mappings left (65530 by default on Linux).
MAX_SEGMENTS = 8

# The largest page size of a peer, which rounds the size of its arena up to whole pages.
LARGEST_PAGE_BYTES = 64 * 1024


def add_segment(segments: dict[int, int], attach: Attach, max_bytes: int, arena_bytes: int) -> None:
    """Validate an `Attach`, and add its segment.

    Args:
        segments: the sizes of the attached segments in bytes, by their numbers; the segment is added to it.
        attach: the frame of the peer.
        max_bytes: the maximum address space that the segment may use, in bytes.
        arena_bytes: the size of the arena in bytes as stated by the peer, for the error message.

    Raises:
        ProtocolError: the peer may not attach the segment.
    """
    if attach.placement != ARENA:
        raise ProtocolError(f"it attached memory for the unknown placement {attach.placement!r}")
    if attach.segment in segments:
        raise ProtocolError(f"it attached segment {attach.segment} twice")
    if len(segments) >= MAX_SEGMENTS:
        raise ProtocolError(f"it attached more than {MAX_SEGMENTS} segments")
    if attach.nbytes > max_bytes:
        raise ProtocolError(
            f"it attached {attach.nbytes} bytes, more than the {max_bytes} of its arena of {arena_bytes}"
        )
    segments[attach.segment] = attach.nbytes
