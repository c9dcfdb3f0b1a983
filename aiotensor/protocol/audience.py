"""Track how far the subscribers of a publisher are behind, and decide which publications each gets, and when.

The objects of this module never wait. The states of one publication for one subscriber:

    add --> pending --announced--> announced --taken--> in use --last block released--> (ended)
               |                       |
               |                       |--the subscriber closes--> (ended)
               |                       '--dropped--> withdrawn --the subscriber confirms--> (ended)
               |                                         '--it was taken before--> in use
               '--dropped--> (ended)

A subscriber is *behind* by its pending and announced publications. If it is `max_behind` publications behind,
it is *full*, and the policy of the publisher applies: `wait` until it takes a publication, `drop` its oldest
publication, or `disconnect` it.

Each announced publication pins memory until the subscriber answers. A publication stays pending while
`max_behind` others are unanswered, so a stopped subscriber pins only a limited number of publications. It
also stays pending while its blocks would raise the memory that the subscriber may use above `max_held_bytes`.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar

from aiotensor.errors import ProtocolError

S = TypeVar("S", bound=Hashable)

SlowPolicy: TypeAlias = Literal["wait", "drop", "disconnect"]
"""The effect of a slow subscriber: publishing waits, publications are dropped, or it is disconnected."""


class Item(NamedTuple):
    """A publication.

    Attributes:
        number: the number of the publication, larger than those of earlier publications.
        record: the record that announces the publication.
        at: the time of the publication, by the clock of the publisher.
        blocks: for each tensor or content in shared memory, the number and the size in bytes of its block.
        segments: the numbers of the segments of these blocks.
    """

    number: int
    record: bytes
    at: float = 0.0
    blocks: tuple[tuple[int, int], ...] = ()
    segments: tuple[int, ...] = ()


class Dropped(NamedTuple):
    """A publication that was dropped for one subscriber.

    Attributes:
        item: the publication.
        is_withdrawn: whether the publication was announced, so that the subscriber has to confirm the drop.
            Otherwise, the subscriber never used its memory.
    """

    item: Item
    is_withdrawn: bool


class Backlog:
    """The publications of one subscriber, and the memory that it may use.

    Args:
        max_behind: the number of publications at which the subscriber is full; also the maximum number of
            unanswered ones.
        max_held_bytes: the maximum shared memory that the subscriber may use, in bytes; None for no limit.

    Attributes:
        held_bytes: the bytes of the blocks that the subscriber may use: those of announced and withdrawn
            publications, and those of taken publications until they are released.
        delivered: the number of publications that the subscriber has taken.
        pending: the publications that were not announced, by their numbers, the oldest first.
    """

    def __init__(self, max_behind: int, max_held_bytes: int | None) -> None:
        self.held_bytes = 0
        self.delivered = 0
        self.pending: dict[int, Item] = {}
        self._dropped = 0
        self._max_behind = max_behind
        self._max_held_bytes = max_held_bytes
        self._announced: dict[int, Item] = {}  # the oldest first, like the others
        self._withdrawn: dict[int, Item] = {}
        self._pins: dict[int, int] = {}  # the pins of each block that the subscriber may use
        self._sizes: dict[int, int] = {}  # of these blocks, in bytes
        self._in_use: dict[int, int] = {}  # the pins of taken publications, by block

    @property
    def behind(self) -> int:
        """The number of publications that the subscriber has not taken; dropped ones do not count."""
        return len(self.pending) + len(self._announced)

    @property
    def is_full(self) -> bool:
        """Whether the subscriber is `max_behind` publications behind."""
        return len(self.pending) + len(self._announced) >= self._max_behind

    @property
    def unanswered(self) -> int:
        """The number of announced publications that the subscriber has not answered."""
        return len(self._announced) + len(self._withdrawn)

    @property
    def dropped(self) -> int:
        """The number of dropped publications; it includes withdrawn ones until the subscriber answers."""
        return self._dropped + len(self._withdrawn)

    @property
    def oldest(self) -> Item | None:
        """The oldest publication that the subscriber has not taken, apart from dropped ones; None if none."""
        return next(iter((self._announced or self.pending).values()), None)

    def add(self, item: Item) -> None:
        """Add a pending publication."""
        self.pending[item.number] = item

    def next(self) -> Item | None:
        """Return the next publication to announce, and mark it as announced; None if it has to wait."""
        if not self.pending or self.unanswered >= self._max_behind:
            return None
        item = next(iter(self.pending.values()))
        if item.blocks and self._max_held_bytes is not None:
            new = {block: nbytes for block, nbytes in item.blocks if block not in self._pins}
            if self.held_bytes + sum(new.values()) > self._max_held_bytes:
                return None
        return self._announce(item)

    def rest(self) -> Iterator[Item]:
        """Iterate over all pending publications, and mark each as announced, regardless of the limits.

        Called when no more publications will follow.
        """
        while self.pending:
            yield self._announce(next(iter(self.pending.values())))

    def drop(self) -> Dropped:
        """Drop the oldest publication that was not taken; there must be one."""
        if self._announced:
            number = next(iter(self._announced))
            item = self._withdrawn[number] = self._announced.pop(number)
            return Dropped(item, is_withdrawn=True)
        self._dropped += 1
        number = next(iter(self.pending))
        return Dropped(self.pending.pop(number), is_withdrawn=False)

    def taken(self, number: int) -> None:
        """Record that the subscriber has taken a publication, which may have been withdrawn in the meantime.

        Raises:
            ProtocolError: the publication was not announced, or was answered before.
        """
        item = self._announced.pop(number, None)
        if item is None:
            item = self._withdrawn.pop(number, None)
            if item is None:
                raise _unanswerable(number)
        self.delivered += 1
        for block, _ in item.blocks:
            self._in_use[block] = self._in_use.get(block, 0) + 1

    def discarded(self, number: int) -> Item:
        """Record that the subscriber has discarded a publication, and return the publication.

        The subscriber discards a publication that was withdrawn, or that it cannot take because it closes.

        Raises:
            ProtocolError: the publication was not announced, or was answered before.
        """
        item = self._withdrawn.pop(number, None)
        if item is not None:
            self._dropped += 1
        else:
            item = self._announced.pop(number, None)
            if item is None:
                raise _unanswerable(number)
        for block, _ in item.blocks:
            self._unpin(block)
        return item

    def released(self, block: int) -> None:
        """Record that the subscriber has released a block once.

        Raises:
            ProtocolError: the subscriber has released the block more often than its contents were taken.
        """
        count = self._in_use.get(block, 0)
        if not count:
            raise ProtocolError(f"it released block {block} more often than it was announced")
        if count == 1:
            del self._in_use[block]
        else:
            self._in_use[block] = count - 1
        self._unpin(block)

    def pins(self) -> Iterator[int]:
        """Iterate over the blocks that the subscriber may use, once for each pin."""
        for block, count in self._pins.items():
            for _ in range(count):
                yield block

    def close(self) -> list[int]:
        """Record that the subscriber has closed, and will take no further publication.

        Returns:
            the blocks of its unanswered publications, once for each pin; the subscriber does not use them.
        """
        unanswered = [*self._announced.values(), *self._withdrawn.values()]
        blocks = [block for item in unanswered for block, _ in item.blocks]
        for block in blocks:
            self._unpin(block)
        self._announced.clear()
        self._dropped += len(self._withdrawn)
        self._withdrawn.clear()
        return blocks

    def pending_blocks(self) -> Iterator[int]:
        """Iterate over the blocks of pending publications, once for each tensor or content in them."""
        for item in self.pending.values():
            for block, _ in item.blocks:
                yield block

    def _announce(self, item: Item) -> Item:
        del self.pending[item.number]
        self._announced[item.number] = item
        for block, nbytes in item.blocks:
            count = self._pins.get(block, 0)
            if not count:
                self._sizes[block] = nbytes
                self.held_bytes += nbytes
            self._pins[block] = count + 1
        return item

    def _unpin(self, block: int) -> None:
        count = self._pins[block]
        if count == 1:
            del self._pins[block]
            self.held_bytes -= self._sizes.pop(block)
        else:
            self._pins[block] = count - 1


class Audience(Generic[S]):
    """The subscribers of a publisher, and their backlogs.

    Args:
        slow: the policy for full subscribers.
        max_behind: as for `Backlog`.
        max_held_bytes: as for `Backlog`.
    """

    def __init__(self, slow: SlowPolicy, max_behind: int, max_held_bytes: int | None) -> None:
        self.backlogs: dict[S, Backlog] = {}
        self._slow = slow
        self._max_behind = max_behind
        self._max_held_bytes = max_held_bytes

    def join(self, subscriber: S, items: Sequence[Item] = ()) -> Backlog:
        """Add a subscriber, which begins with the given earlier publications."""
        backlog = self.backlogs[subscriber] = Backlog(self._max_behind, self._max_held_bytes)
        for item in items:
            backlog.add(item)
        return backlog

    def leave(self, subscriber: S) -> Backlog | None:
        """Remove a subscriber, and return its backlog; None if it was removed before."""
        return self.backlogs.pop(subscriber, None)

    def delaying(self) -> list[S]:
        """Return the subscribers that the next publication has to wait for."""
        return self._full() if self._slow == "wait" else []

    def to_disconnect(self) -> list[S]:
        """Return the subscribers to disconnect before the next publication."""
        return self._full() if self._slow == "disconnect" else []

    def publish(self, item: Item) -> list[tuple[S, Dropped]]:
        """Add a publication for every subscriber, and return the publications dropped in its favor."""
        dropped = []
        for subscriber, backlog in self.backlogs.items():
            if backlog.is_full and self._slow == "drop":
                dropped.append((subscriber, backlog.drop()))
            backlog.add(item)
        return dropped

    def _full(self) -> list[S]:
        return [subscriber for subscriber, backlog in self.backlogs.items() if backlog.is_full]


def _unanswerable(number: int) -> ProtocolError:
    return ProtocolError(f"it answered publication {number}, which was not announced or was answered before")
