"""One connection of a client to a server, and its messages, from the call until the answer.

Messages are sent in the order of the calls, within the server's credit. Cancellations need no credit, and
overtake messages that wait for it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TypeVar

import msgspec

from aiotensor.channel.cancelling import CancelOnce
from aiotensor.channel.payloads import Handles, ReceivedAnswer
from aiotensor.channel.send_queue import SendQueue, flush_all
from aiotensor.errors import AioTensorError, PeerLostError, RemoteError, again
from aiotensor.protocol.client import ClientConnection
from aiotensor.protocol.exchange import Answer, Credit, Failure
from aiotensor.protocol.parts import Parts
from aiotensor.runtime import tracing
from aiotensor.transports.zeromq.sockets import LoopSocket

__all__ = ["SentRequest", "ServerSession"]

R = TypeVar("R")


class SentRequest(msgspec.Struct, frozen=True, eq=False):
    """A message that was sent.

    Attributes:
        session: the connection that carries the message.
        number: the number of the message.
        handles: the handles of the tensors that a sender has sent.
        answer: the future of the answer; None if no answer is expected.
    """

    session: "ServerSession"
    number: int
    handles: Handles
    answer: "asyncio.Future[ReceivedAnswer] | None"


class ServerSession:
    """Send messages over one connection, and return their answers; belongs to the running loop.

    Args:
        sock: the socket, which connects to one server.
        connection: the state of the connection; messages are sent once it is open.
        wait_limit: returns a context manager that limits the wait for credit and queue space.
        drop: called with an answer whose request was cancelled.

    Attributes:
        socket: the socket.
        connection: the state of the connection.
    """

    def __init__(
        self,
        sock: LoopSocket,
        connection: ClientConnection,
        wait_limit: Callable[[], AbstractAsyncContextManager[None]],
        drop: Callable[[ReceivedAnswer], None],
    ) -> None:
        self.socket = sock
        self.connection = connection
        self._drop = drop
        self._queue = SendQueue(self._send, wait_limit)
        self._cancellations = SendQueue(sock.send)
        self._answers: dict[int, asyncio.Future[ReceivedAnswer]] = {}  # by the numbers of the requests
        self._sending: set[CancelOnce] = set()

    @property
    def credit(self) -> int:
        """The number of messages that can be sent immediately."""
        return 0 if self._queue else self.connection.window.credit

    @property
    def unanswered(self) -> int:
        """The number of requests that were sent and have no answer."""
        return len(self._answers)

    async def sending(self, tensors: Awaitable[R]) -> R | None:
        """Wait until tensors are sent, and return the result; return None if the server is lost first."""
        with CancelOnce() as wait:
            self._sending.add(wait)
            try:
                return await tensors
            finally:
                self._sending.discard(wait)
        return None

    async def ask(self, handles: Handles, parts: Parts, *, wants_answer: bool) -> SentRequest | None:
        """Send a message once there is credit and queue space; return None if the server is lost first.

        Cancellation removes an unsent message, and notifies the server of a sent one.

        Args:
            handles: the handles of the tensors that a sender has sent.
            parts: the body of the message, and the buffers beside it.
            wants_answer: whether an answer is expected.

        Raises:
            WouldBlockError: the message could not be sent within `max_wait_s`.
            TooLargeError: the server does not accept a body or a part of this size.
        """
        trace = None if (tracer := tracing.tracer) is None else tracer.context()
        number, message = self.connection.ask(parts, handles, wants_answer=wants_answer, trace=trace)
        answer = asyncio.get_running_loop().create_future() if wants_answer else None
        request = SentRequest(self, number, handles, answer)
        try:
            was_sent = await self._queue.put(message, partial(self._sent, request, sum(map(len, parts))))
        except BaseException:
            self.cancel(request)  # the message may have been sent in this iteration
            parts = message = ()  # the error's traceback refers to this frame
            raise
        return request if was_sent else None

    def _sent(self, request: SentRequest, nbytes: int) -> None:
        self.connection.sent(request.number, nbytes)
        if request.answer is not None:
            self._answers[request.number] = request.answer

    def cancel(self, request: SentRequest) -> None:
        """Notify the server that a request was cancelled, and drop its answer if it has arrived."""
        answer = request.answer
        if answer is None:
            return
        if self._answers.pop(request.number, None) is not None:
            self._cancellations.post(self.connection.cancel(request.number))
        elif answer.done() and not answer.cancelled() and answer.exception() is None:
            self._drop(answer.result())

    def flush(self) -> None:
        """Send messages that the socket did not accept before."""
        flush_all(lambda: [queue for queue in (self._cancellations, self._queue) if queue])

    def handle(self, frame: Answer | Failure | Credit, parts: list[memoryview]) -> None:
        """Handle a frame of the server, with the body and the buffers of an answer."""
        waiting = None if isinstance(frame, Credit) else self._answers.pop(frame.number, None)
        if waiting is not None and waiting.done():  # the request was cancelled in this iteration
            waiting = None
        if isinstance(frame, Answer):
            received = ReceivedAnswer(frame.handles, parts)
            if waiting is None:
                self._drop(received)
            else:
                waiting.set_result(received)
        elif isinstance(frame, Failure) and waiting is not None:
            waiting.set_exception(self._error_of(frame))
        if self._queue:
            self._queue.flush(is_retry=False)  # there may be credit now

    def _error_of(self, failure: Failure) -> PeerLostError | RemoteError:
        what = f"{failure.type_name}: {failure.text}"
        if not failure.is_loss:
            return RemoteError(what, type_name=failure.type_name)
        pid = self.connection.peer_pid
        return PeerLostError(f"the server (pid {pid}) stopped processing this request: {what}", pid=pid)

    def end(self, error: AioTensorError) -> None:
        """Fail the requests that were sent; others are sent to another server, or wait for the next one."""
        lost, self._answers = self._answers, {}
        for answer in lost.values():
            if not answer.done():
                answer.set_exception(again(error))
        self._cancellations.clear()
        self._queue.clear()
        for wait in self._sending:
            wait.cancel()

    def _send(self, parts: Parts, is_retry: bool) -> bool:
        return self.connection.window.credit > 0 and self.socket.send(parts, is_retry)
