"""A message that a server has taken, for whoever answers it."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

from aiotensor.channel.asked import Asked
from aiotensor.channel.cancelling import CancelOnce
from aiotensor.errors import ClosedError, UsageError
from aiotensor.home import Home
from aiotensor.logs import logger_of

__all__ = ["Answerer", "Request", "text_of"]

logger = logger_of("channel")

M = TypeVar("M")


class Answerer(NamedTuple):
    """What sends answers.

    Attributes:
        answer: sends the answer in a box, and returns whether a client waited for it.
        fail: says that there is none, with the name of an error's type and its text; and whether anybody
            wanted one.
        free: empties a box that holds the message.
        home: where the server lives.
    """

    answer: Callable[[Asked, list[object]], Awaitable[bool]]
    fail: Callable[[Asked, str, str], bool]
    free: Callable[[Asked, list[Any]], None]
    home: Home


class Request(Generic[M]):
    """A message of a client, to be answered once.

    Whoever answers several at a time does so in tasks, each in the block of its request::

        async def answer(request):
            async with request:
                await request.reply(await work(request.message))

    When the client disconnects or cancels its request, the task in the block is cancelled, once, as
    `asyncio.Task.cancel` does: cleanup may wait, and code that catches `asyncio.CancelledError` is not
    cancelled again. The end of the block absorbs this cancellation; any other one, such as that of
    `asyncio.timeout` around the block, goes on. An exception in the block goes to the client as
    `RemoteError` and is logged, and leaving it without an answer is such an error too. Afterwards the
    message, with its tensors, is released. A request that is dropped without an answer fails in the same way
    when it is freed.
    """

    def __init__(self, asked: Asked, message: M, answerer: Answerer) -> None:
        self._message: M | None = message
        self._asked = asked
        self._answerer = answerer
        self._is_answered = False
        self._block: CancelOnce | None = None

    def __repr__(self) -> str:
        state = "answered" if self._is_answered else "unanswered" if self.is_wanted else "not wanted"
        return f"<{type(self).__name__} {state}, of process {self.client_pid}>"

    @property
    def message(self) -> M:
        """What the client sent, with its tensors in place."""
        if self._message is None:
            raise UsageError("this request was answered, or its block has ended: its message is gone")
        return self._message

    @property
    def client_pid(self) -> int:
        """The process id of the client, as it says."""
        return self._asked.client.pid

    @property
    def is_wanted(self) -> bool:
        """Whether anybody still waits for an answer."""
        return self._asked.is_wanted

    async def reply(self, answer: object) -> bool:
        """Answer, and return whether the client still wanted it.

        Nobody wants an answer to a message that was sent by `send`, or whose client has cancelled it or is
        gone: then this does nothing.

        Afterwards the message is gone here, so that the shared memory of its tensors does not wait for the
        next one; keep what you still need of it.

        Args:
            answer: of the client's `reply_type`, with tensors and arrays anywhere in it. Nothing in it may
                change before this returns. A large answer is encoded in a thread, which goes on for a moment
                if this is cancelled.

        Waits for a permit and memory, if its tensors go by a sender; for room, while the client does not
        read; and until ZeroMQ has let go of large tensors that go without one. Cancelling before it was
        handed to ZeroMQ sends nothing, and the request can be answered again; after that, the tensors must
        not change until it has left.

        Raises:
            UsageError: it was answered before.
            TypeError: something in the answer cannot be encoded, as `MessageClient.request` has it; answer
                again, or `fail`.
            UnsupportedTensorError: a tensor would not arrive as it is.
            TooLargeError: a tensor is larger than the sender's `arena_bytes`, the body exceeds the client's
            `max_body_bytes`, a tensor that travels in the answer its `max_part_bytes`, or there are too many
            tensors; nothing was sent, so answer again, or `fail`.
            PeerLostError: the client's receiver is gone, though the client is not.
            ClosedError: the server was closed.
        """
        self._answer_once()
        box = [answer]
        del answer
        try:
            was_wanted = await self._answerer.answer(self._asked, box)
        except BaseException:
            self._is_answered = not self._asked.is_wanted
            raise
        self._release()
        return was_wanted

    async def fail(self, error: BaseException | str) -> bool:
        """Tell the client that there is no answer, and return whether it still wanted one.

        Args:
            error: raised there as `RemoteError`, with the name of its type and its text.

        Raises:
            UsageError: it was answered before.
            ClosedError: the server was closed.
        """
        self._answer_once()
        return self._fail(error)

    async def __aenter__(self) -> Self:
        if self._block is not None:
            raise UsageError("the block of a request is entered once")
        self._block = CancelOnce()
        self._block.__enter__()
        if not self.is_wanted and self._asked.wants_answer:
            self._block.cancel()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._block is None:
            raise AssertionError("a block that is left was entered")
        if self._answerer.home.is_left_in_child(error):
            return False
        was_cancelled = self._block.__exit__(kind, error, trace)
        self._leave(None if was_cancelled else error)
        return was_cancelled or isinstance(error, Exception)

    def _never_begun(self) -> None:
        """Tell the client, if a task was cancelled before it entered the block."""
        if self._block is None:
            self._leave(asyncio.CancelledError())

    def _leave(self, error: BaseException | None) -> None:
        """End its block: release the message, and tell the client if it got no answer."""
        self._release()
        if self.is_wanted and not self._is_answered:
            self._is_answered = True
            self._fail(UsageError("the server's handler gave no answer") if error is None else error)
        if isinstance(error, Exception) and not isinstance(error, ClosedError):
            logger.error(
                "answering a request of process %s failed",
                self.client_pid,
                exc_info=error,
                extra={
                    "event": "request_failed",
                    "peer_pid": self.client_pid,
                    "error": type(error).__name__,
                    "reason": text_of(error),
                },
            )

    def _release(self) -> None:
        """Release the message; a large one is freed in a thread, if nothing else refers to it."""
        if self._asked.is_large and self._message is not None:
            box, self._message = [self._message], None
            self._answerer.free(self._asked, box)
        self._message = None

    def _cancel(self) -> None:
        """Cancel the task in its block: no client waits for an answer any more."""
        if self._block is not None:
            self._block.cancel()

    def _answer_once(self) -> None:
        if self._is_answered:
            raise UsageError("this request was answered before")
        self._is_answered = True

    def _fail(self, error: BaseException | str) -> bool:
        if isinstance(error, str):
            return self._answerer.fail(self._asked, "Exception", error)
        if isinstance(error, asyncio.CancelledError):
            return self._answerer.fail(self._asked, "CancelledError", "the server's handler was cancelled")
        return self._answerer.fail(self._asked, type(error).__name__, text_of(error))


def text_of(error: BaseException) -> str:
    """Return the text of an error, which is code of whoever made it."""
    try:
        return str(error)
    except Exception as another:  # noqa: BLE001 - whatever it is, the client is to have an answer
        return f"(its text cannot be shown: {type(another).__name__})"
