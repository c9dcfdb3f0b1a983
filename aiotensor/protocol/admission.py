"""The limits for all senders of a receiver together."""

from typing import NamedTuple

from aiotensor.protocol.frames import Hello

__all__ = ["AdmissionLimits"]


class AdmissionLimits(NamedTuple):
    """The limits for all senders together; None for no limit.

    The admission of a sender covers its maximum use, so that no later frame can exceed a limit.

    Attributes:
        senders: connected senders.
        mapped_bytes: bytes of shared memory that are mapped, or reserved for connected senders.
        unclaimed_messages: messages that may wait to be taken.
        frame_bytes: the longest record in bytes.
    """

    senders: int | None
    mapped_bytes: int | None
    unclaimed_messages: int | None
    frame_bytes: int

    def exceeded_by(self, hello: Hello, senders: int, mapped: int, promised: int) -> str | None:
        """Return the limit that another sender would exceed, with a remedy; None if it can be admitted.

        Args:
            hello: the hello of the sender.
            senders: the number of connected senders.
            mapped: bytes of shared memory that are mapped, or reserved for these.
            promised: messages that these may have in flight, and remaining messages of closed senders.
        """
        if self.senders is not None and senders >= self.senders:
            return (
                f"max_senders={self.senders} senders are connected already: raise max_senders of the "
                "receiver, or close another sender"
            )
        if self.mapped_bytes is not None and mapped + hello.arena_bytes > self.mapped_bytes:
            return (
                f"{mapped} bytes of shared memory are reserved for others and this sender wants "
                f"{hello.arena_bytes}, more than max_mapped_bytes={self.mapped_bytes} allows: raise "
                "max_mapped_bytes of the receiver, or lower arena_bytes of the senders"
            )
        wanted = hello.max_concurrent_videos
        if self.unclaimed_messages is not None and promised + wanted > self.unclaimed_messages:
            return (
                f"{promised} messages in flight are reserved for others and this sender wants {wanted}, "
                f"more than max_unclaimed_messages={self.unclaimed_messages} allows: raise "
                "max_unclaimed_messages of the receiver, or lower max_concurrent_videos of the senders"
            )
        return None
