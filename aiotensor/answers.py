"""What a receiver has to tell its senders: collected in one turn of the loop, sent at its end."""

import asyncio

from aiotensor.links.base import ReceiverLink
from aiotensor.protocol.frames import Bye, Discarded, Release, Taken, ToSender, encode

__all__ = ["Answers"]

_NUMBERS_A_FRAME = 4096


class _Pending:
    """What one sender is to be told."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.discarded: list[int] = []
        self.blocks: list[int] = []
        self.goodbye: list[Bye] = []


class Answers:
    """Collect answers for each sender, so that they go out in few frames.

    Args:
        loop: the loop whose turns count.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: dict[ReceiverLink, _Pending] = {}

    def taken(self, link: ReceiverLink, message: int) -> None:
        """Give the permit of a message back, whose tensors were all taken."""
        self._to(link).taken.append(message)

    def discarded(self, link: ReceiverLink, message: int) -> None:
        """Give the permit of a message back, which is dropped."""
        self._to(link).discarded.append(message)

    def released(self, link: ReceiverLink, block: int) -> None:
        """Give a block of memory back."""
        self._to(link).blocks.append(block)

    def goodbye(self, link: ReceiverLink) -> None:
        """Say that this is the end, together with all that comes before it."""
        self._to(link).goodbye.append(Bye())

    def forget(self, link: ReceiverLink) -> None:
        """Drop what a sender is to be told: it is gone."""
        self._pending.pop(link, None)

    def flush(self) -> None:
        """Send everything now."""
        pending, self._pending = self._pending, {}
        for link, answers in pending.items():
            frames: list[ToSender] = [
                make(tuple(numbers[start : start + _NUMBERS_A_FRAME]))
                for make, numbers in (
                    (Taken, answers.taken),
                    (Discarded, answers.discarded),
                    (Release, answers.blocks),
                )
                for start in range(0, len(numbers), _NUMBERS_A_FRAME)
            ]
            frames += answers.goodbye
            if sum(map(len, (answers.taken, answers.discarded, answers.blocks))) <= _NUMBERS_A_FRAME:
                link.write(encode(*frames))
            else:
                for frame in frames:
                    link.write(encode(frame))

    def _to(self, link: ReceiverLink) -> _Pending:
        if not self._pending:
            self._loop.call_soon(self.flush)
        return self._pending.setdefault(link, _Pending())
