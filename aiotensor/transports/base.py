"""The interface of links: ordered, bidirectional channels for records of one sender and one receiver.

A link carries bytes and file descriptors; it knows neither frames nor tensors. Callbacks report the records
that arrive and the loss of the other side. Everything here belongs to the event loop's thread.
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

# The most bytes that a receiver queues for a sender that does not read its answers. A stopped sender has only
# its messages in flight to be answered. With the default limit on these messages, and the most tensors in
# each, the answers to all of them are shorter than this.
MAX_UNREAD_BYTES = 8 << 20


class SenderEvents(Protocol):
    """The callbacks of a sender's link."""

    def introduction(self) -> bytes:
        """Return the first record of a connection."""

    def record_arrived(self, data: bytes | memoryview) -> None:
        """Handle a record from the receiver; its data is valid during the call."""

    def link_lost(self, error: AioTensorError) -> None:
        """Handle a lost connection, or a permanent failure to connect; not after `SenderLink.close`."""


class SenderLink(Protocol):
    """A sender's end of a link."""

    @property
    def peer_pid(self) -> int | None:
        """The receiver's process id according to the kernel; 0 if it has none here, None if unknown."""

    @property
    def comes_back(self) -> bool:
        """Whether the link connects again after a loss."""

    async def open(self, events: SenderEvents) -> None:
        """Begin to connect; does not wait for a receiver that has not started.

        Raises:
            AccessDeniedError: the receiver belongs to another user.
            UsageError: the address does not lead to a receiver.
            OSError: this process has no descriptors or no memory left.
        """

    @property
    def is_kept_waiting(self) -> bool:
        """Whether a receiver listens, but its backlog was full at the last attempt to connect."""

    @property
    def is_ready(self) -> bool:
        """Whether the receiver is connected, and all written records were passed to the kernel."""

    async def ready(self) -> None:
        """Wait until `is_ready` may have become true, the link was lost or closed, or `wake` is called."""

    def wake(self) -> None:
        """Wake the tasks that wait in `ready`, so that they check their conditions again."""

    def write(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a record to a connected receiver, without blocking. The caller keeps the descriptors.

        Raises:
            OSError: the kernel rejected it (no memory, no descriptors); nothing was sent.
        """

    async def flush(self) -> None:
        """Wait until all written records were passed to the kernel, or the link is closed or lost."""

    def drop(self, *, retry: bool) -> None:
        """Close the connection without notifying the receiver.

        Args:
            retry: whether to begin to connect again; if not, only `ready` and `look_again` do so.
        """

    def look_again(self) -> None:
        """Try to connect now, if `drop` has stopped the attempts."""

    def close(self) -> None:
        """Close at once, without notifying the receiver; closing again does nothing."""


class ReceiverLink(Protocol):
    """A receiver's end of a link to one sender."""

    @property
    def peer_pid(self) -> int | None:
        """The sender's process id according to the kernel; 0 if it has none here, None if unknown."""

    def write(self, data: bytes) -> None:
        """Send a record, without blocking; disconnect a sender that leaves `MAX_UNREAD_BYTES` unread."""

    async def flush(self) -> None:
        """Wait until all written records were passed to the kernel, or the link is closed or lost."""

    def close(self) -> None:
        """Close at once; no more records of this sender are read or reported."""


class ReceiverEvents(Protocol):
    """The callbacks of a receiver's listener."""

    def link_opened(self, link: ReceiverLink) -> None:
        """Handle a new connection; this callback may close it."""

    def record_arrived(
        self, link: ReceiverLink, data: bytes | memoryview, descriptors: Sequence[int]
    ) -> None:
        """Handle a record, whose data is valid during the call; the receiver owns the descriptors."""

    def link_lost(self, link: ReceiverLink, reason: str) -> None:
        """Handle the loss of a sender, after all records that it sent."""

    def listener_failed(self, error: BaseException) -> None:
        """Handle the failure of the listener, from a bug or a system error: no more records arrive."""


class Listener(Protocol):
    """The place where senders find a receiver."""

    async def open(self, events: ReceiverEvents, max_record_bytes: int) -> None:
        """Begin to listen.

        Raises:
            UsageError: another receiver listens there, or the address is in use otherwise.
            OSError: this process cannot listen there; see `errno`, and `filename` for the folder of a path.
        """

    def look(self) -> None:
        """Accept the pending connections, and read their introductions.

        A caller may have the handle of a sender that has reconnected, before the new connection was read.
        """

    def stop(self) -> None:
        """Accept no more senders and records; existing links can still be written to."""

    async def close(self) -> None:
        """Stop, and close every link."""
