"""The rules for the segments that a peer attaches, the same for all roles."""

from aiotensor.errors import ProtocolError
from aiotensor.protocol.frames import ARENA, Attach

__all__ = ["LARGEST_PAGE_BYTES", "MAX_SEGMENTS", "add_segment"]

# The most segments of one peer. A peer of this library attaches one at a time. Without a limit, it could
# attach a page at a time until this process has no mappings left (65530 by default on Linux).
MAX_SEGMENTS = 8

LARGEST_PAGE_BYTES = 64 * 1024  # the size of an arena is rounded up to whole pages


def add_segment(segments: dict[int, int], attach: Attach, max_bytes: int, arena_bytes: int) -> None:
    """Validate a frame, and add its segment.

    Args:
        segments: the sizes of the attached segments in bytes, by their numbers.
        attach: the frame.
        max_bytes: the most bytes of address space that the segment may have.
        arena_bytes: the size of the arena, as the peer stated it.

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
