"""What a receiver has to tell its senders: collected in one turn of the loop, sent at its end."""

import asyncio
from collections.abc import Callable

from aiotensor.protocol.frames import MAX_NUMBERS, Bye, Discarded, Release, Taken, ToSender, encode
from aiotensor.transports.base import ReceiverLink

__all__ = ["Answers"]


class _Pending:
    """What one sender is to be told."""

    __slots__ = ("blocks", "discarded", "says_goodbye", "taken")

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.discarded: list[int] = []
        self.blocks: list[int] = []
        self.says_goodbye = False

    def frames(self) -> list[ToSender]:
        frames: list[ToSender] = []
        if self.taken:
            frames += _split(Taken, self.taken)
        if self.discarded:
            frames += _split(Discarded, self.discarded)
        if self.blocks:
            frames += _split(Release, self.blocks)
        if self.says_goodbye:
            frames.append(Bye())
        return frames


def _split(make: Callable[[tuple[int, ...]], ToSender], numbers: list[int]) -> list[ToSender]:
    """Make as few frames of numbers as their length allows."""
    if len(numbers) <= MAX_NUMBERS:
        return [make(tuple(numbers))]
    return [
        make(tuple(numbers[start : start + MAX_NUMBERS])) for start in range(0, len(numbers), MAX_NUMBERS)
    ]


class Answers:
    """Collect answers for each sender, so that they go out in few frames.

    Args:
        loop: the loop whose turns count.
        complete: called before they are sent, to add what else is known by then, if it is not much.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, complete: Callable[[], None]) -> None:
        self._loop = loop
        self._complete = complete
        self._pending: dict[ReceiverLink, _Pending] = {}

    def taken(self, link: ReceiverLink, message: int) -> None:
        """Give the permit of a message back, whose tensors were all taken."""
        pending = self._pending.get(link) or self._begin(link)
        pending.taken.append(message)

    def discarded(self, link: ReceiverLink, message: int) -> None:
        """Give the permit of a message back, which is dropped."""
        pending = self._pending.get(link) or self._begin(link)
        pending.discarded.append(message)

    def released(self, link: ReceiverLink, block: int) -> None:
        """Give a block of memory back."""
        pending = self._pending.get(link) or self._begin(link)
        pending.blocks.append(block)

    def goodbye(self, link: ReceiverLink) -> None:
        """Say that this is the end, together with all that comes before it."""
        pending = self._pending.get(link) or self._begin(link)
        pending.says_goodbye = True

    def forget(self, link: ReceiverLink) -> None:
        """Drop what a sender is to be told: it is gone."""
        self._pending.pop(link, None)

    def flush(self) -> None:
        """Send everything now."""
        self._complete()
        pending, self._pending = self._pending, {}
        for link, answers in pending.items():
            frames = answers.frames()
            if len(answers.taken) + len(answers.discarded) + len(answers.blocks) <= MAX_NUMBERS:
                link.write(encode(*frames))
            else:
                for frame in frames:
                    link.write(encode(frame))

    def _begin(self, link: ReceiverLink) -> _Pending:
        if not self._pending:
            self._loop.call_soon(self.flush)
        pending = self._pending[link] = _Pending()
        return pending
