"""The messages from a client to one server, from the call until the answer.

Messages are sent in the order of the calls, within the server's credit. Cancellations need no credit, and
overtake messages that wait for it.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TypeVar

import zmq

from aiotensor.channel.cancelling import CancelOnce
from aiotensor.channel.outbox import Outbox, Parts, flush_all
from aiotensor.channel.parcels import Answered, Asked, Handles, body_and_buffers, check_parts
from aiotensor.channel.unanswered import Unanswered
from aiotensor.errors import AioTensorError, PeerLostError, ProtocolError, RemoteError
from aiotensor.protocol.exchange import (
    BODY_BYTES,
    Answer,
    Ask,
    Cancel,
    Failure,
    PartLimits,
    ServerHello,
    Taken,
    write,
)
from aiotensor.protocol.window import Window

__all__ = ["Pipeline"]

R = TypeVar("R")


class Pipeline:
    """Send requests to one server, and return its answers; belongs to the running loop.

    Args:
        send: passes a message to ZeroMQ, and returns whether ZeroMQ accepted it; its second argument is
            whether this is a retry.
        patience: returns a context manager that limits the wait for credit and queue space.
        drop: called with an answer whose request was cancelled.
        limits: the largest part, and the largest body, of an answer.
    """

    def __init__(
        self,
        send: Callable[[Parts, bool], bool],
        patience: Callable[[], AbstractAsyncContextManager[None]],
        drop: Callable[[Answered], None],
        limits: PartLimits,
    ) -> None:
        self.outbox = Outbox(send, patience=patience)
        self.limits = PartLimits()  # the limits of the server
        self._notices = Outbox(send)
        self._unanswered = Unanswered(drop)
        self._own_limits = limits
        self._sending: set[CancelOnce] = set()
        self._server_pid: int | None = None

    @property
    def credit(self) -> int:
        """Count the messages that can be sent at once."""
        window = self.outbox.window
        return 0 if window is None or self.outbox else window.credit

    @property
    def unsent(self) -> int:
        """Count the messages and cancellations that have not been sent."""
        return len(self.outbox) + len(self._notices)

    @property
    def unanswered(self) -> int:
        """Count the requests that were sent and have no answer."""
        return len(self._unanswered)

    def begin(self, hello: ServerHello) -> None:
        """Use the limits that the server announces."""
        self.outbox.window = Window(hello.max_waiting, hello.max_waiting_bytes)
        self.limits = PartLimits(hello.max_part_bytes, hello.max_body_bytes)
        self._server_pid = hello.pid

    def end(self, error: AioTensorError) -> None:
        """Fail the requests that were sent; the others go to another server, or wait for the next one."""
        self.outbox.window, self.limits = None, PartLimits()
        self._unanswered.fail_all(error)
        self._notices.clear()
        self.outbox.clear()
        for wait in self._sending:
            wait.cancel()

    async def sending(self, tensors: Awaitable[R]) -> R | None:
        """Wait until the tensors of a message are sent; return None if the server is lost before."""
        with CancelOnce() as wait:
            self._sending.add(wait)
            try:
                return await tensors
            finally:
                self._sending.discard(wait)
        return None

    async def ask(self, handles: Handles, parts: Parts, *, wants_answer: bool) -> Asked | None:
        """Wait for credit and queue space, and send a message.

        Cancelling removes an unsent message, and notifies the server of a sent one.

        Args:
            handles: the handles of its tensors.
            parts: its body, and the buffers beside it.
            wants_answer: whether it expects an answer.

        Returns None if the server was lost before.

        Raises:
            WouldBlockError: the message could not be sent within `max_wait_s`.
            TooLargeError: the server does not accept a body or a part of this size.
        """
        check_parts(parts, self.limits, "server")
        body = None if len(parts[0]) >= BODY_BYTES else memoryview(parts[0])
        asked = self._unanswered.number(wants_answer=wants_answer)
        header = write(Ask(asked.number, body, handles, wants_answer))
        following = parts if body is None else parts[1:]
        nbytes, expect = sum(map(len, parts)), partial(self._unanswered.expect, asked)
        try:
            has_left = await self.outbox.put([header, *following], nbytes, expect)
        except BaseException:
            self.cancel(asked)  # it may have been sent in this iteration
            parts = following = ()  # the error's traceback refers to this frame
            raise
        return asked if has_left else None

    def cancel(self, asked: Asked) -> None:
        """Notify the server that a request was cancelled, and drop its answer if it has arrived."""
        if self._unanswered.cancel(asked):
            self._notices.post([write(Cancel(asked.number))])

    def has_room(self) -> None:
        """Send messages that the socket did not accept before."""
        flush_all(lambda: [one for one in (self._notices, self.outbox) if one])

    def heard(self, header: Answer | Failure | Taken, buffers: "Sequence[zmq.Frame]") -> None:
        """Pass an answer to its request, and send messages for which there is credit now.

        Raises:
            ProtocolError: the server broke the protocol.
        """
        match header:
            case Answer(number, body, handles, messages, nbytes):
                answered = Answered(handles, body_and_buffers(body, buffers, self._own_limits))
                self._returned(messages, nbytes)
                self._unanswered.answer(number, answered)
            case Failure(number, type_name, text, messages, nbytes, is_loss=is_loss):
                self._returned(messages, nbytes)
                what = f"{type_name}: {text}"
                error = self._stopped(what) if is_loss else RemoteError(what, type_name=type_name)
                self._unanswered.fail(number, error)
            case Taken(messages, nbytes):
                self._returned(messages, nbytes)

    def _stopped(self, what: str) -> PeerLostError:
        text = f"the server (pid {self._server_pid}) stopped its work on this request: {what}"
        return PeerLostError(text, pid=self._server_pid)

    def _returned(self, messages: int, nbytes: int) -> None:
        """Update the credit, and send messages that waited for it."""
        window = self.outbox.window
        if window is None:
            raise ProtocolError("it answered before it introduced itself")
        window.taken(messages, nbytes)
        if self.outbox:
            self.outbox.flush(is_retry=False)
