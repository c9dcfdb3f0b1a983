"""The tasks that wait for tensors of one receiver, woken when one may have arrived."""

from collections.abc import Sequence

from aiotensor.errors import PeerLostError
from aiotensor.protocol.mailbox import Key, Mailbox
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.waiting import Waiters
from aiotensor.types import Delivery

__all__ = ["Arrivals"]

logger = logger_of("receiver")


class Arrivals:
    """Wake tasks that wait for tensors; belongs to the event loop's thread.

    The connections refer to this object and not to the receiver. So an unused receiver is garbage-collected,
    and a receiver with a waiting task is not.

    Attributes:
        waiters: the calls that wait for the tensor of a key; without empty ones.
        iterators: the iterations that wait for any tensor.
    """

    def __init__(self, mailbox: Mailbox[Delivery]) -> None:
        self.waiters: dict[Key, Waiters] = {}
        self.iterators = Waiters()
        self._mailbox = mailbox
        self._failure: OSError | None = None

    @property
    def waiting(self) -> int:
        """The number of waiting calls."""
        return sum(map(len, self.waiters.values())) + len(self.iterators)

    def wake(self, keys: Sequence[Key]) -> None:
        """Wake the tasks that wait for these keys, and the iterations that may continue."""
        if self.waiters:
            for key in keys:
                if key in self.waiters:
                    self.waiters[key].wake()
        self.wake_iterators()

    def wake_iterators(self) -> None:
        """Wake the iterations if a tensor is available for them."""
        if self.iterators and self._mailbox.next_unclaimed() is not None:
            self.iterators.wake()

    def wake_all(self) -> None:
        """Wake every task that waits."""
        for waiters in self.waiters.values():
            waiters.wake()
        self.iterators.wake()

    def fail(self, error: OSError) -> None:
        """End all waits because of a system error: no more tensors will arrive."""
        logger.critical(
            "reading from the senders failed, nothing more will arrive",
            exc_info=error,
            extra={"event": "reading_failed", "error": type(error).__name__, "reason": str(error)},
        )
        self._failure = error
        self.wake_all()

    def raise_if_failed(self) -> None:
        """Raise `PeerLostError` if no more tensors will arrive."""
        if self._failure is not None:
            raise PeerLostError(f"nothing more will arrive: {self._failure}") from self._failure
