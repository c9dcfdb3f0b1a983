"""What a link is: an ordered two-way road for records between one sender and one receiver.

A link carries bytes and file descriptors; it knows neither frames nor tensors. It tells its owner what
arrives and when the other side is gone. Everything here belongs to the event loop's thread.
"""

from collections.abc import Sequence
from typing import Protocol

from aiotensor.errors import AioTensorError

__all__ = [
    "MAX_UNREAD_BYTES",
    "Listener",
    "ReceiverEvents",
    "ReceiverLink",
    "SenderEvents",
    "SenderLink",
]

# What a receiver keeps for a sender that does not read its answers. A sender that is only stopped has at most
# its messages in flight to be answered: with as many as a receiver admits by default, of as many tensors as a
# message may have, the answers to all of them are shorter than this.
MAX_UNREAD_BYTES = 8 << 20


class SenderEvents(Protocol):
    """What a sender wants to be told by its link."""

    def introduction(self) -> bytes:
        """Make the first record of a connection."""

    def record_arrived(self, data: bytes | memoryview) -> None:
        """Take a record from the receiver; it is valid during the call."""

    def link_lost(self, error: AioTensorError) -> None:
        """Note that the connection is gone, or that there will be none; not after `SenderLink.close`."""


class SenderLink(Protocol):
    """A sender's end of a link."""

    @property
    def peer_pid(self) -> int | None:
        """The process id of the receiver, as the kernel knows it, 0 for one without; None if it does not."""

    @property
    def comes_back(self) -> bool:
        """Say whether the link connects again after it was lost."""

    async def open(self, events: SenderEvents) -> None:
        """Begin to connect; does not wait for a receiver that is not there yet.

        Raises:
            AccessDeniedError: the receiver is another user.
            UsageError: what is there is no receiver.
        """

    @property
    def is_kept_waiting(self) -> bool:
        """Say whether a receiver is there, and did not take the connection when the link last tried."""

    @property
    def is_ready(self) -> bool:
        """Say whether the receiver is connected, and the kernel has everything that was written."""

    async def ready(self) -> None:
        """Wait until `is_ready` may have become true, the link was lost or closed, or `wake` is called."""

    def wake(self) -> None:
        """Have everybody who waits in `ready` look again whether they still want to."""

    def write(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a record to a connected receiver; never block. The descriptors stay the caller's.

        Raises:
            OSError: the kernel refused it (no memory, no descriptors); nothing was sent.
        """

    async def flush(self) -> None:
        """Wait until the kernel has everything that was written, or the link is closed or lost."""

    def drop(self, *, retry: bool) -> None:
        """Close the connection without a word.

        Args:
            retry: connect again at once; else not before somebody waits in `ready`, or asks for it.
        """

    def look_again(self) -> None:
        """Look for a receiver now, if `drop` has ended that."""

    def close(self) -> None:
        """Close at once, without a word to the other side; closing again does nothing."""


class ReceiverLink(Protocol):
    """A receiver's end of a link to one sender."""

    @property
    def peer_pid(self) -> int | None:
        """The process id of the sender, as the kernel knows it, 0 for one without; None if it does not."""

    def write(self, data: bytes) -> None:
        """Send a record; never block. A sender that leaves `MAX_UNREAD_BYTES` unread loses its link."""

    async def flush(self) -> None:
        """Wait until the kernel has everything that was written, or the link is closed or lost."""

    def close(self) -> None:
        """Close at once; nothing more is read from this sender, and nothing more is told of it."""


class ReceiverEvents(Protocol):
    """What a receiver wants to be told by its listener."""

    def link_opened(self, link: ReceiverLink) -> None:
        """Note that somebody connected; it may be closed right here."""

    def record_arrived(
        self, link: ReceiverLink, data: bytes | memoryview, descriptors: Sequence[int]
    ) -> None:
        """Take a record, valid during the call; the descriptors belong to the receiver now."""

    def link_lost(self, link: ReceiverLink, reason: str) -> None:
        """Note that a sender is gone; everything that it had sent has arrived before."""

    def listener_failed(self, error: BaseException) -> None:
        """Note that nothing more will arrive from anybody, because of a bug or a broken machine."""


class Listener(Protocol):
    """The place where senders find a receiver."""

    async def open(self, events: ReceiverEvents, max_record_bytes: int) -> None:
        """Begin to listen.

        Raises:
            UsageError: another receiver listens there, or the place is in use by something else.
            OSError: nothing can listen there; `errno` says why, `filename` names the folder of a path.
        """

    def look(self) -> None:
        """Take in those who have come back by now, up to their introductions.

        Whoever holds a handle of a sender that was lost may hold it before its new connection was read.
        """

    def stop(self) -> None:
        """Take no more senders and no more records; the links that there are can still be written to."""

    async def close(self) -> None:
        """Stop, and close every link."""
