"""What a client has asked one server, and has no answer to."""

import asyncio
from collections.abc import Callable

from aiotensor.channel.parcels import Answered, Asked
from aiotensor.errors import AioTensorError, ProtocolError, RemoteError, again

__all__ = ["Unanswered"]


class Unanswered:
    """The messages that wait for an answer, by their numbers; belongs to the running loop.

    Args:
        drop: called with an answer that nobody waits for.
    """

    def __init__(self, drop: Callable[[Answered], None]) -> None:
        self._drop = drop
        self._next_number = 0
        self._open: dict[int, asyncio.Future[Answered]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def number(self, *, wants_answer: bool) -> Asked:
        """Give the next message its number, and a future if it is to be answered."""
        number, self._next_number = self._next_number, self._next_number + 1
        return Asked(number, asyncio.get_running_loop().create_future() if wants_answer else None)

    def expect(self, asked: Asked) -> None:
        """Note that a message has left."""
        if asked.answered is not None:
            self._open[asked.number] = asked.answered

    def give_up(self, asked: Asked) -> bool:
        """Wait for an answer no more, and say whether one may still come; one that has come is dropped."""
        future = asked.answered
        if future is None:
            return False
        if self._open.get(asked.number) is future:
            del self._open[asked.number]
            return True
        if future.done() and not future.cancelled() and future.exception() is None:
            self._drop(future.result())
        return False

    def answer(self, number: int, answered: Answered) -> None:
        """Take an answer.

        Raises:
            ProtocolError: to a message that was never sent.
        """
        future = self._taken(number)
        give = self._drop if future is None else future.set_result
        give(answered)

    def fail(self, number: int, error: RemoteError) -> None:
        """Take an error instead of an answer.

        Raises:
            ProtocolError: to a message that was never sent.
        """
        future = self._taken(number)
        if future is not None:
            future.set_exception(error)

    def end(self, error: AioTensorError) -> None:
        """Fail what waits: the server is gone, and the next one counts from 0."""
        lost, self._open = self._open, {}
        self._next_number = 0
        for future in lost.values():
            if not future.done():
                future.set_exception(again(error))

    def _taken(self, number: int) -> "asyncio.Future[Answered] | None":
        """Find who waits for an answer, or None if it was given up in the meantime."""
        future = self._open.pop(number, None)
        if future is None:
            if number >= self._next_number:
                raise ProtocolError(f"it answered message {number}, which was never sent")
            return None
        return None if future.done() else future
