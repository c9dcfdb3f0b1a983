"""The requests of a client that one server has not answered yet."""

import asyncio
from collections.abc import Callable

from aiotensor.channel.parcels import Answered, Asked
from aiotensor.errors import AioTensorError, ProtocolError, again

__all__ = ["Unanswered"]


class Unanswered:
    """The futures of the answers, by the numbers of their requests; belongs to the running loop.

    Args:
        drop: called with an answer whose request was cancelled.
    """

    def __init__(self, drop: Callable[[Answered], None]) -> None:
        self._drop = drop
        self._next_number = 0
        self._open: dict[int, asyncio.Future[Answered]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def number(self, *, wants_answer: bool) -> Asked:
        """Return the next number, with a future if the message expects an answer."""
        number, self._next_number = self._next_number, self._next_number + 1
        return Asked(number, asyncio.get_running_loop().create_future() if wants_answer else None)

    def expect(self, asked: Asked) -> None:
        """Wait for the answer to a message that was sent."""
        if asked.answered is not None:
            self._open[asked.number] = asked.answered

    def cancel(self, asked: Asked) -> bool:
        """Stop waiting for an answer, and drop it if it has arrived.

        Returns whether it may still arrive.
        """
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
        """Pass an answer on to its request, or drop it if the request was cancelled.

        Raises:
            ProtocolError: no message of this number was sent.
        """
        future = self._pop(number)
        deliver = self._drop if future is None else future.set_result
        deliver(answered)

    def fail(self, number: int, error: AioTensorError) -> None:
        """Raise an error in a request.

        Raises:
            ProtocolError: no message of this number was sent.
        """
        future = self._pop(number)
        if future is not None:
            future.set_exception(error)

    def fail_all(self, error: AioTensorError) -> None:
        """Raise an error in every request, and count from 0 again for the next server."""
        lost, self._open = self._open, {}
        self._next_number = 0
        for future in lost.values():
            if not future.done():
                future.set_exception(again(error))

    def _pop(self, number: int) -> "asyncio.Future[Answered] | None":
        """Return the future of an answer, or None if its request was cancelled."""
        future = self._open.pop(number, None)
        if future is None:
            if number >= self._next_number:
                raise ProtocolError(f"it answered message {number}, which was never sent")
            return None
        return None if future.done() else future
