"""What a link is: an ordered two-way road for frames between one sender and one receiver.

A link carries bytes and file descriptors; it knows neither frames nor tensors. It tells its owner, on
the event loop's thread, what arrives and when the other side is gone.
"""

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Listener", "ReceiverEvents", "ReceiverLink", "SenderEvents", "SenderLink"]


class SenderEvents(Protocol):
    """What a sender wants to be told by its link."""

    def frame_arrived(self, data: bytes) -> None:
        """Take a frame from the receiver."""

    def link_lost(self, reason: str) -> None:
        """Note that the receiver is gone; called at most once, and not after `SenderLink.close`."""


class SenderLink(Protocol):
    """A sender's end of a link."""

    async def open(self, hello: bytes, events: SenderEvents) -> None:
        """Introduce the sender, and return when the kernel has the introduction.

        From then on the receiver hears of the sender's death, even if it has yet to start.
        """

    def write(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a frame; never block. Safe from any thread; takes the descriptors over.

        Raises:
            OSError: the kernel refused it (no memory, no descriptors); nothing was sent.
        """

    @property
    def is_flushed(self) -> bool:
        """Say whether the kernel has everything that was written."""

    async def flush(self) -> None:
        """Wait until the kernel has everything that was written, or the link is closed or lost."""

    def close(self) -> None:
        """Close at once, without a word to the other side; closing again does nothing."""


class ReceiverLink(Protocol):
    """A receiver's end of a link to one sender."""

    @property
    def sender(self) -> str:
        """The sender's id."""

    def write(self, data: bytes) -> None:
        """Send a frame; never block."""

    async def flush(self) -> None:
        """Wait until the kernel has everything that was written, or the link is closed or lost."""

    def close(self) -> None:
        """Close at once; nothing more is read from this sender."""


class ReceiverEvents(Protocol):
    """What a receiver wants to be told by its listener."""

    def frame_arrived(self, link: ReceiverLink, data: bytes, descriptors: Sequence[int]) -> None:
        """Take a frame from a sender; the descriptors belong to the receiver now."""

    def link_lost(self, link: ReceiverLink, reason: str) -> None:
        """Note that a sender is gone; everything that it had sent has arrived before."""

    def listener_failed(self, error: BaseException) -> None:
        """Note that nothing more will arrive from anybody, because of a bug or a broken machine."""


class Listener(Protocol):
    """The place where senders find a receiver."""

    def open(self, events: ReceiverEvents) -> None:
        """Begin to listen.

        Raises:
            UsageError: another receiver listens there.
        """

    async def close(self) -> None:
        """Stop listening and close every link."""
