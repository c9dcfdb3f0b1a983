"""The messages to one peer that wait, in order, for credit and for space in ZeroMQ's queue."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import TypeAlias

from aiotensor.errors import WouldBlockError
from aiotensor.protocol.window import Window

__all__ = ["Outbox", "Parts", "flush_all"]

Parts: TypeAlias = Sequence[bytes | memoryview]


class _Letter:
    """A message that waits to be sent.

    Args:
        parts: the parts of the message.
        nbytes: the bytes that it uses of the window.
        on_sent: called when it is sent.
        gone: a future whose result is whether it was sent; None if no task waits for it.
    """

    __slots__ = ("gone", "nbytes", "on_sent", "parts")

    def __init__(
        self,
        parts: Parts,
        nbytes: int = 0,
        on_sent: Callable[[], object] = lambda: None,
        gone: "asyncio.Future[bool] | None" = None,
    ) -> None:
        self.parts = parts
        self.nbytes = nbytes
        self.on_sent = on_sent
        self.gone = gone


class Outbox:
    """Send messages in order; belongs to the running loop.

    Args:
        send: passes a message to ZeroMQ, and returns whether ZeroMQ accepted it; the second argument is
            whether this is a retry.
        window: the credit of the peer; None for no limit.
        patience: returns a context manager that limits the wait of `put`.
    """

    def __init__(
        self,
        send: Callable[[Parts, bool], bool],
        window: Window | None = None,
        patience: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        self.window = window
        self._patience = patience
        self._hand_over = send
        self._letters: deque[_Letter] = deque()
        self._is_over = False

    def __len__(self) -> int:
        return len(self._letters)

    def post(self, parts: Parts) -> None:
        """Send a message, or queue it until it can be sent."""
        if self._letters or not self._send(parts, 0, is_retry=False):
            self._letters.append(_Letter(parts))

    async def put(self, parts: Parts, nbytes: int = 0, on_sent: Callable[[], object] = lambda: None) -> bool:
        """Wait until a message can be sent; return False if the peer disconnected first.

        Cancelling removes the message if it has not been sent.

        Args:
            parts: the parts of the message.
            nbytes: the bytes that it uses of the window.
            on_sent: called when it is sent.

        Raises:
            OSError: this process lacks the descriptors or threads to send it.
            AioTensorError: the wait took too long.
        """
        if not self._letters and self._send(parts, nbytes, is_retry=False):
            on_sent()
            return True
        if self._is_over:  # sending may have found that the peer is gone
            return False
        gone: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        letter = _Letter(parts, nbytes, on_sent, gone)
        self._letters.append(letter)
        try:
            async with self._patience():
                return await gone
        except BaseException as error:
            letter.parts = parts = ()  # the error's traceback refers to this frame
            with suppress(ValueError):  # sent or cleared in this iteration of the loop
                self._letters.remove(letter)
            if isinstance(error, WouldBlockError) and gone.done() and not gone.cancelled():
                return gone.result()  # the wait ended in the iteration in which it timed out
            raise

    def flush(self, *, is_retry: bool) -> bool:
        """Send waiting messages until ZeroMQ or the window accepts no more; return whether any was sent."""
        before = len(self._letters)
        while self._letters:
            letter = self._letters[0]
            if letter.gone is not None and letter.gone.done():
                # The waiting task was cancelled in this iteration: its message must not be sent.
                self._letters.popleft()
                continue
            try:
                if not self._send(letter.parts, letter.nbytes, is_retry=is_retry):
                    break
            except OSError as error:
                self._letters.popleft()
                if letter.gone is None:
                    raise
                letter.gone.set_exception(error)
                continue
            # Sending may find that the peer is gone, which clears the outbox.
            if self._letters and self._letters[0] is letter:
                self._letters.popleft()
                letter.on_sent()
                _settle(letter, was_sent=True)
        return len(self._letters) < before

    def _send(self, parts: Parts, nbytes: int, *, is_retry: bool) -> bool:
        window = self.window
        if window is not None and window.credit <= 0:
            return False
        was_sent = self._hand_over(parts, is_retry)
        if was_sent and window is not None:
            window.sent(nbytes)
        return was_sent

    def clear(self) -> None:
        """Discard the waiting messages, because the peer is gone."""
        letters, self._letters = self._letters, deque()
        for letter in letters:
            _settle(letter, was_sent=False)

    def end(self) -> None:
        """End the waits of `put`; messages of `post` are still sent, also later ones."""
        self._is_over = True
        for letter in self._letters:
            if letter.gone is not None:
                _settle(letter, was_sent=False)
        self._letters = deque(letter for letter in self._letters if letter.gone is None)


def _settle(letter: _Letter, *, was_sent: bool) -> None:
    letter.parts = ()
    if letter.gone is not None and not letter.gone.done():
        letter.gone.set_result(was_sent)


def flush_all(outboxes: Callable[[], list[Outbox]]) -> None:
    """Send the waiting messages of all outboxes, as far as ZeroMQ accepts them.

    An attempt may consume ZeroMQ's signal that another peer is writable, which is not repeated. Two rounds
    without a sent message in a row rule that out.
    """
    idle = 0
    while idle < 2 and (waiting := outboxes()):
        went = [outbox.flush(is_retry=True) for outbox in waiting]
        idle = 0 if any(went) else idle + 1
