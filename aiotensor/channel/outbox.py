"""What is on its way to one peer, in order, for as long as ZeroMQ has no room for it."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import TypeAlias, TypeVar

from aiotensor.channel.cancelling import CancelOnce
from aiotensor.errors import WouldBlockError
from aiotensor.protocol.window import Window

__all__ = ["Outbox", "Parts", "flush_all"]

R = TypeVar("R")

Parts: TypeAlias = Sequence[bytes | memoryview]


class _Letter:
    """A message that waits to leave.

    Args:
        parts: of the message.
        nbytes: what it counts.
        on_sent: called when it leaves.
        gone: says in the end whether it left.
        may_move: whether `give_up_one` may take it back.
    """

    __slots__ = ("gone", "may_move", "nbytes", "on_sent", "parts")

    def __init__(
        self,
        parts: Parts,
        nbytes: int = 0,
        on_sent: Callable[[], object] = lambda: None,
        gone: "asyncio.Future[bool] | None" = None,
        may_move: bool = False,
    ) -> None:
        self.parts = parts
        self.nbytes = nbytes
        self.on_sent = on_sent
        self.gone = gone
        self.may_move = may_move


class Outbox:
    """Send messages in order; belongs to the running loop.

    Args:
        send: hands a message over, and says whether there was room; the second argument is whether it is a
            retry.
        window: how much the peer takes, if that is limited.
        patience: limits how long somebody waits here.
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
        self.movable = 0  # letters that `give_up_one` may take back
        self.on_wait: Callable[[], None] = lambda: None  # called when a movable message begins to wait
        self._sending: dict[CancelOnce, None] = {}  # messages whose tensors are on their way, the latest last

    def __len__(self) -> int:
        return len(self._letters)

    def post(self, parts: Parts) -> None:
        """Send a message now, or when there is room."""
        if self._letters or not self._send(parts, 0, is_retry=False):
            self._letters.append(_Letter(parts))

    async def put(
        self,
        parts: Parts,
        nbytes: int = 0,
        on_sent: Callable[[], object] = lambda: None,
        *,
        may_move: bool = False,
    ) -> bool:
        """Send a message as soon as there is room, and return whether it left.

        It does not if the peer went first, or if `give_up_one` took it back.

        Cancelling takes it back, if it is still here.

        Args:
            parts: of the message.
            nbytes: what it counts in the window.
            on_sent: called when it leaves.
            may_move: whether `give_up_one` may take it back.

        Raises:
            OSError: this process lacks something to send it with.
            AioTensorError: what `patience` raises.
        """
        if not self._letters and self._send(parts, nbytes, is_retry=False):
            on_sent()
            return True
        if self._is_over:  # sending may have shown that
            return False
        gone: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        letter = _Letter(parts, nbytes, on_sent, gone, may_move)
        self._letters.append(letter)
        if may_move:
            self.movable += 1
            self.on_wait()
        try:
            async with self._patience():
                return await gone
        except BaseException as error:
            letter.parts = parts = ()  # the error keeps this frame
            with suppress(ValueError):  # it has left, or the peer has gone, in this very turn
                self._letters.remove(letter)
            if isinstance(error, WouldBlockError) and gone.done() and not gone.cancelled():
                return gone.result()  # the wait ended when it was overdue, but it did end
            raise
        finally:
            self.movable -= may_move

    async def sending(self, tensors: Awaitable[R]) -> R | None:
        """Wait until the tensors of a message are sent; return None if `give_up_one` or `clear` ends that."""
        with CancelOnce() as wait:
            self._sending[wait] = None
            self.on_wait()
            try:
                return await tensors
            finally:
                self._sending.pop(wait, None)
        return None

    @property
    def sending_tensors(self) -> int:
        """Return for how many messages tensors are being sent."""
        return len(self._sending)

    @property
    def takes_more(self) -> bool:
        """Return whether the peer has credit for a message and no other message waits."""
        return not self._letters and self.window is not None and self.window.is_open

    def give_up_one(self) -> None:
        """Take the latest message back that waits here and may be sent to another peer."""
        for letter in reversed(self._letters):
            if letter.may_move and letter.gone is not None and not letter.gone.done():
                self._letters.remove(letter)
                _settle(letter, was_sent=False)
                return
        if self._sending:
            self._sending.popitem()[0].cancel()

    def flush(self, *, is_retry: bool) -> bool:
        """Send what there is room for, and say whether that was anything."""
        before = len(self._letters)
        while self._letters:
            letter = self._letters[0]
            if letter.gone is not None and letter.gone.done():
                # Who waited gave up, in this very turn: what is called too late must not go all the same.
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
            # Unless sending found that the peer is gone, and the outbox was cleared.
            if self._letters and self._letters[0] is letter:
                self._letters.popleft()
                letter.on_sent()
                _settle(letter, was_sent=True)
        return len(self._letters) < before

    def _send(self, parts: Parts, nbytes: int, *, is_retry: bool) -> bool:
        window = self.window
        if window is not None and not window.is_open:
            return False
        was_sent = self._hand_over(parts, is_retry)
        if was_sent and window is not None:
            window.sent(nbytes)
        return was_sent

    def clear(self) -> None:
        """Send nothing of what waits: the peer is gone."""
        for wait in self._sending:
            wait.cancel()
        letters, self._letters = self._letters, deque()
        for letter in letters:
            _settle(letter, was_sent=False)

    def end(self) -> None:
        """Have nobody wait here any more; what was posted, and will be, still goes when there is room."""
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
    """Send what there is room for, to everybody.

    A try may take in that another peer has room, which nothing says again; the second of two rounds in which
    nothing goes finds that.
    """
    idle = 0
    while idle < 2 and (waiting := outboxes()):
        went = [outbox.flush(is_retry=True) for outbox in waiting]
        idle = 0 if any(went) else idle + 1
