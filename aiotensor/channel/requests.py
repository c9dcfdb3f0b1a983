"""The requests of a server, from their arrival until they are answered.

arrived --taken by the application--> in hand --answered, failed--> (ended)
|                                    |
'------------------------------------'--cancelled, or its client is lost--> (ended)
"""

import asyncio
import enum
import logging
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from aiotensor.channel.cancelling import CancelOnce
from aiotensor.codec import TensorDecoder
from aiotensor.errors import (
    AioTensorError,
    ClosedError,
    ProtocolError,
    UsageError,
    WouldBlockError,
)
from aiotensor.link.events import PeerLog
from aiotensor.link.messages import Arrived, MessageSession, trace_context_of
from aiotensor.link.outgoing import Outgoing
from aiotensor.memory.mappings import Mappings
from aiotensor.memory.memory import Memory
from aiotensor.protocol.connection import Connection, Loss
from aiotensor.protocol.frames import (
    INLINE,
    MAX_TEXT,
    MAX_TYPE_NAME,
    Discard,
    Failure,
    Frame,
    Message,
)
from aiotensor.runtime import tracing
from aiotensor.runtime.affinity import FreedItems, LoopAffinity
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.waiting import Waiters, until
from aiotensor.transports.base import Transport
from aiotensor.types import TraceContext, Usage

logger = logger_of("server")

M = TypeVar("M")


class State(enum.Enum):
    """The state of a request."""

    WAITING = "waiting"
    IN_HAND = "in hand"
    ENDED = "ended"


# Names of the module, because looking up a member of an enum is slow.
WAITING, IN_HAND, ENDED = State


class Incoming(Arrived["ClientSession"], eq=False):
    """A message of a client, until it has ended.

    Attributes:
        state: the state of the request.
        block: cancels the task that answers the request; None until the task enters it.
        request: a weak reference to the `Request` of the application, while it is in hand.
    """

    state: State = WAITING
    block: CancelOnce | None = None
    request: weakref.ref[object] | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether the client waits for an answer."""
        return self.message.asks and self.state is not ENDED

    @property
    def has_ended(self) -> bool:
        """Whether it was answered or cancelled."""
        return self.state is ENDED


class Cause(NamedTuple):
    """The reason why a message gets no answer.

    Attributes:
        type_name: the name of the type of the error.
        text: the text of the error.
        is_loss: whether the server stopped its work, for example because its process exits.
    """

    type_name: str
    text: str
    is_loss: bool = False


def cause_of(error: BaseException) -> Cause:
    """Return the name and the text of an error, even if its `__str__` raises."""
    try:
        text = str(error)
    except Exception as another:  # noqa: BLE001 - the client gets an answer in any case
        text = f"(its text cannot be shown: {type(another).__name__})"
    if isinstance(error, asyncio.CancelledError) and not text:
        text = "the server's handler was cancelled"
    return Cause(type(error).__name__, text, is_loss=not isinstance(error, Exception))


class FairQueue:
    """Order requests so that clients take turns; the requests of each client stay in order.

    A client with many waiting requests gets no more turns than a client with one.

    Attributes:
        by_client: the waiting requests of each client that has any, in the order of the turns.
    """

    def __init__(self) -> None:
        self.by_client: OrderedDict[ClientSession, deque[Incoming]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self.by_client.values()))

    def __iter__(self) -> Iterator[Incoming]:
        for requests in self.by_client.values():
            yield from requests

    def put_back(self, incoming: Incoming) -> None:
        """Return a request to the front, as if it had not been taken."""
        self.by_client.setdefault(incoming.session, deque()).appendleft(incoming)
        self.by_client.move_to_end(incoming.session, last=False)

    def take(self) -> Incoming:
        """Take a request of the client whose turn it is; the client then has the last turn.

        Raises:
            KeyError: no request waits.
        """
        client, requests = self.by_client.popitem(last=False)
        incoming = requests.popleft()
        if requests:
            self.by_client[client] = requests
        return incoming

    def remove(self, incoming: Incoming) -> bool:
        """Remove a request, and return whether it waited."""
        requests = self.by_client.get(incoming.session)
        if requests is None or incoming not in requests:
            return False
        requests.remove(incoming)
        if not requests:
            del self.by_client[incoming.session]
        return True


class Answer(Outgoing, kw_only=True, eq=False):
    """An answer that is being sent."""

    affinity: LoopAffinity
    incoming: Incoming
    trace: TraceContext | None

    def check(self) -> None:
        """Raise `ClosedError` if the server was closed."""
        if self.affinity.is_closed:
            raise closed()

    def no_space(self, nbytes: int, *, is_stuck: bool) -> WouldBlockError:
        """Return the error of an answer that gets no memory."""
        memory = self.memory.gate
        reason = "used by answers that wait for more of it" if is_stuck else "in use"
        return WouldBlockError(
            f"all shared memory is {reason} ({memory.in_use} of {memory.limit} bytes in use, {nbytes} bytes "
            "requested): raise arena_bytes of the server",
            bytes=Usage(memory.limit, memory.in_use, nbytes),
        )


class Requests(Generic[M]):
    """The requests of one server; belongs to the running loop.

    Args:
        decoder: decodes their messages.
        memory: the memory of answers.
        affinity: the loop of the server.
        counts: the counters of `ServerStatistics`.
        max_body_bytes: the maximum size of the body of a message in bytes; None for no limit.
        shares_memory: whether clients share memory, so that received tensors are forwarded in answers.

    Attributes:
        memory, affinity, counts, shares_memory: the arguments.
        ready: the requests that wait to be taken.
        takers: the calls that wait to take a request.
        waiters: the calls that wait for a change.
        in_hand: the requests that were taken, and neither answered nor cancelled.
        dropped: called with a request in hand that was garbage-collected.
        failure: why no request will arrive any more; None if one may.
    """

    def __init__(
        self,
        decoder: TensorDecoder[M],
        memory: Memory,
        affinity: LoopAffinity,
        counts: dict[str, int],
        max_body_bytes: int | None,
        *,
        shares_memory: bool,
    ) -> None:
        self.memory = memory
        self.affinity = affinity
        self.shares_memory = shares_memory
        self.ready = FairQueue()
        self.takers, self.waiters = Waiters(), Waiters()
        self.in_hand: set[Incoming] = set()
        self.dropped: FreedItems[Incoming] = FreedItems(self._requests_dropped)
        self._decoder = decoder
        self.counts = counts
        self._max_body_bytes = max_body_bytes

    async def take(self, *, waits: bool = True) -> tuple[Incoming, M] | None:
        """Take a request, and wait for it if `waits`; return None if none waits or the server is closed.

        A message that cannot be decoded or is of another type is answered with the error, and skipped.
        Cancellation loses no request.
        """
        ready = self.ready
        while True:
            while not ready.by_client:
                if not waits or self.affinity.is_closed:
                    return None
                try:
                    await self.takers.wait()
                except asyncio.CancelledError:
                    self.wake_taker()  # in place of this task, which may have been woken
                    raise
            client, queued = ready.by_client.popitem(last=False)  # as `FairQueue.take`, without a call
            incoming = queued.popleft()
            if queued:
                ready.by_client[client] = queued
                if self.takers:
                    self.takers.wake_one()
            try:
                message: M = await incoming.decode(self._decoder, self._max_body_bytes)
            except asyncio.CancelledError:
                if incoming.state is WAITING and not self.affinity.is_closed:
                    ready.put_back(incoming)
                    self.wake()
                else:
                    incoming.finish()
                    self.end(incoming)
                raise
            except Exception as error:  # noqa: BLE001 - decoding runs code of the user's type
                incoming.finish()
                self._refuse(incoming, error)
                continue
            if incoming.state is WAITING and not self.affinity.is_closed:
                break
            self.end(incoming)  # it was cancelled, or the server closed, during decoding
            del message  # not kept alive while the next request is awaited
        self._taken(incoming)
        return incoming, message

    async def arrival(self) -> None:
        """Wait until there may be a request, which the caller takes, or the server or a client has closed."""
        try:
            await self.takers.wait()
        except asyncio.CancelledError:
            self.wake_taker()  # in place of this task, which may have been woken
            raise

    def take_now(self) -> tuple[Incoming, M] | None:
        """Take a request as `take` does, but decode even a large one on this thread, and never wait."""
        while self.ready.by_client:
            incoming = self.ready.take()
            try:
                message: M = incoming.decode_now(self._decoder, self._max_body_bytes)
            except Exception as error:  # noqa: BLE001 - decoding runs code of the user's type
                incoming.finish()
                self._refuse(incoming, error)
                continue
            self._taken(incoming)
            return incoming, message
        return None

    def _taken(self, incoming: Incoming) -> None:
        incoming.state = IN_HAND
        self.in_hand.add(incoming)
        self.counts["messages_taken"] += 1
        if incoming.trace_context is not None and (tracer := tracing.tracer) is not None:
            tracer.delivered("message", incoming.trace_context, nbytes=incoming.message.nbytes)

    def wake(self) -> None:
        """Wake all tasks that wait for a request or a change."""
        self.takers.wake()
        self.waiters.wake()

    def wake_taker(self) -> None:
        """Wake one task that waits for a request, if there is one to take."""
        if self.takers and self.ready.by_client:
            self.takers.wake_one()

    def cancel(self, incoming: Incoming) -> None:
        """End a request whose client cancelled it or is gone, and cancel the task that answers it."""
        self.counts["cancelled"] += 1
        was_in_hand = incoming.state is IN_HAND
        self.end(incoming)
        if was_in_hand and incoming.block is not None:
            incoming.block.cancel()

    def end(self, incoming: Incoming) -> None:
        """End a request; while it is decoded, it is not in the queue, and belongs to `take`."""
        if incoming.state is WAITING and self.ready.remove(incoming):
            incoming.finish()
        incoming.state = ENDED
        incoming.request = None  # its end is no longer of interest
        self.in_hand.discard(incoming)
        incoming.session.requests.pop(incoming.message.message, None)

    def _refuse(self, incoming: Incoming, error: Exception) -> None:
        """Answer a waiting request with an error, and release it."""
        if incoming.is_broken:  # its session has ended
            self.end(incoming)
        if incoming.state is not WAITING:
            return
        cause = cause_of(error)
        is_foreseen = isinstance(error, AioTensorError | ValueError)
        is_fault = isinstance(error, ProtocolError) or not is_foreseen
        logger.log(
            logging.ERROR if is_fault else logging.INFO,
            "a message from process %s was refused: %s",
            incoming.session.pid,
            cause.text,
            exc_info=None if is_foreseen else error,
            extra={
                "event": "message_refused",
                "peer_pid": incoming.session.pid,
                "error": cause.type_name,
                "reason": cause.text,
            },
        )
        if not incoming.message.asks:
            incoming.session.fail(incoming.number, cause)
        self.fail(incoming, cause)

    def fail(self, incoming: Incoming, cause: Cause) -> bool:
        """Send a failure in place of an answer, and return whether the client still waited for it."""
        was_wanted = incoming.is_wanted
        if was_wanted:
            self.counts["failures"] += 1
            incoming.session.fail(incoming.number, cause)
        self.end(incoming)
        return was_wanted

    def _requests_dropped(self, dropped: list[Incoming]) -> None:
        """Fail the requests that were garbage-collected without an answer."""
        for incoming in dropped:
            if incoming in self.in_hand and not self.affinity.is_closed:
                if incoming.is_wanted:
                    logger.warning(
                        "a request from process %s was dropped without an answer: answer each request in its "
                        "block",
                        incoming.session.pid,
                        extra={"event": "request_dropped", "peer_pid": incoming.session.pid},
                    )
                # Reported as a loss, not as an error of the handler: a signal or a cancellation may arrive
                # after the request was taken, but before its block is entered.
                self.fail(
                    incoming, Cause(UsageError.__name__, "it was dropped without an answer", is_loss=True)
                )


class ClientSession(MessageSession):
    """The connection of a client.

    Args:
        transport: the connection, which has not been started yet.
        connection: the rules, after the hello of the client.
        log: the log of the server.
        mappings: the mappings of the server.
        server: the requests of the server.
        max_waiting: the maximum number of its messages that wait to be taken.
        max_mapped_bytes: the limit of its memory, as for `MessageSession`.

    Attributes:
        requests: its messages that have not ended, by their numbers.
        max_body_bytes: the maximum size of the body of an answer in bytes; None for no limit.
    """

    def __init__(
        self,
        transport: Transport,
        connection: Connection,
        log: PeerLog,
        mappings: Mappings,
        server: Requests[Any],
        max_waiting: int,
        max_mapped_bytes: int | None,
    ) -> None:
        super().__init__(transport, connection, log, server.memory, mappings, max_mapped_bytes)
        self.id = self.hello.id
        self.name = f"client {self.id}"
        self.memory.arena_bytes = self.hello.arena_bytes
        self.max_body_bytes = self.hello.max_body_bytes
        self.requests: dict[int, Incoming] = {}
        self._server = server
        self._max_waiting = max_waiting

    def taken(self, number: int) -> None:
        """Write at once that the application takes a request.

        A request whose server is lost is sent to another one if the server has not taken it. So the client
        must know before the application begins.
        """
        try:
            for record in self.connection.taken_now(number):
                self.transport.write(record)
        except OSError as error:
            self.unwritable(error)

    def answer(self, answer: Answer) -> None:
        """Announce an answer whose blocks the client can read."""
        if answer.incoming.state is ENDED:  # it was cancelled while its blocks were moved
            self.unpost(answer)
            return
        connection = self.connection
        number, asked, content = connection.next_message, answer.incoming.message.message, answer.content
        if answer.content_block is None:  # as `frame`, without a call
            frame = Message(number, INLINE, content, len(content), None, answer.trace, False, asked)
        else:
            frame = answer.frame(number, answer.trace, answers=asked)
        try:
            for record in connection.post(frame):
                self.transport.write(record)
        except OSError as error:
            self.unwritable(error)

    async def announced(self, answer: Answer) -> None:
        """Wait until the blocks of an answer were moved, and it was announced, or the client is lost."""
        try:
            await until(lambda: answer not in self.transfers or self.is_over or None, self._writing)
        except asyncio.CancelledError:
            if answer in self.transfers and not self.is_over:
                self.unpost(answer)
            else:  # it was announced in this iteration of the loop
                self._server.end(answer.incoming)
            raise

    def moved(self) -> None:
        """Wake the calls whose answers were announced."""
        self._writing.wake()

    def fail(self, number: int, cause: Cause) -> None:
        """Answer a message with an error."""
        type_name, text = _plain(cause.type_name, MAX_TYPE_NAME), _plain(cause.text, MAX_TEXT)
        self.connection.send(Failure(number, type_name, text, cause.is_loss), len(text.encode()))
        self.schedule_flush()

    def received(self, frames: Sequence[Frame], descriptors: list[int]) -> None:
        """Process the frames of a record."""
        server = self._server
        for frame in frames:
            match frame:
                case Message():
                    if frame.answers is not None:
                        raise ProtocolError("it answered a server, which asks nothing")
                    most = self._max_waiting
                    if len(self.requests) >= most and self.connection.in_flight > most:
                        raise ProtocolError(f"more than {most} of its messages wait")
                    incoming = self.requests[frame.message] = Incoming(self, frame)
                    if frame.trace is not None:
                        incoming.trace_context = trace_context_of(frame)
                    self.untaken += 1
                    server.counts["messages_received"] += 1
                    if (waiting := server.ready.by_client.get(self)) is None:
                        server.ready.by_client[self] = deque((incoming,))
                    else:
                        waiting.append(incoming)
                    if server.takers:
                        server.takers.wake_one()
                    if server.waiters:
                        server.waiters.wake()
                case Discard():
                    cancelled = self.requests.get(frame.message)
                    if cancelled is not None:
                        server.cancel(cancelled)
                        if cancelled.is_taken and cancelled.message.asks:
                            self.connection.discarded(frame.message, confirms=True)
                            self.schedule_flush()
                case _:
                    self.control(frame, descriptors)
            if self.is_over:
                break

    def lost(self, loss: Loss) -> None:
        """Handle the end of the session."""
        self.arena.abandon(self)
        self.transfers.clear()


def closed() -> ClosedError:
    """Return the error of a server that was closed."""
    return ClosedError("this MessageServer was closed")


def _plain(text: str, length: int) -> str:
    # A lone surrogate cannot be encoded, and the path in an error may contain one.
    return text[:length].encode(errors="backslashreplace").decode()[:length]
