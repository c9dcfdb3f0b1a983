"""A client and its requests, as the server sees them.

The states of a request:

    WAITING --taken by the iteration--> IN_HAND --answered, failed--> ENDED
       |                                   |
       '-----------------------------------'--cancelled, or its client lost--> ENDED
"""

import asyncio
import enum
import weakref
from collections.abc import Callable, Mapping, Sequence

from aiotensor.channel.cancelling import CancelOnce
from aiotensor.channel.payloads import Handles
from aiotensor.channel.send_queue import SendQueue
from aiotensor.codec.payload import QUICK_BODY_BYTES
from aiotensor.memory.copying import QUICK_BYTES
from aiotensor.protocol.exchange import Ask, Cause
from aiotensor.protocol.parts import Parts
from aiotensor.protocol.server import ServerConnection
from aiotensor.runtime import tracing
from aiotensor.runtime.logs import logger_of
from aiotensor.sender import TensorSender, capacity_of

__all__ = ["MAX_UNREAD", "ClientSession", "IncomingRequest", "RequestState"]

logger = logger_of("channel")

# The maximum number of messages that are queued for a client that does not read them: answers, each with a
# task that waits until it is sent, and failures, for which no task waits.
MAX_UNREAD = 4096

# The minimum time between attempts of a sender to connect to a client's receiver that refused it; until it
# succeeds, answers contain their tensors.
_AT_MOST_EVERY_S = 1.0


class RequestState(enum.Enum):
    """The state of a request."""

    WAITING = "waiting"
    IN_HAND = "in hand"
    ENDED = "ended"


class IncomingRequest:
    """A message of a client, with its body and the buffers beside it.

    Attributes:
        nbytes: the size of the body and the buffers in bytes.
        is_large: whether freeing the decoded message may take a long time.
        is_answered: whether an answer was sent.
        trace_context: the trace context of the client; None without tracing.
        request: a weak reference to the `Request` of the application, once the message is taken; its callback
            detects that the `Request` was garbage-collected.
        block: cancels the task that answers the message; None until the task enters the `Request`.
    """

    def __init__(self, client: "ClientSession", ask: Ask, parts: list[memoryview]) -> None:
        self.client = client
        self.number = ask.number
        self.wants_answer = ask.wants_answer
        self.handles: Handles = ask.handles
        self.parts = parts
        self.nbytes = sum(map(len, parts))
        self.is_large = self.nbytes > QUICK_BYTES or len(parts[0]) > QUICK_BODY_BYTES
        self.state = RequestState.WAITING
        self.is_answered = False
        self.trace_context: Mapping[str, str] | None = None
        if ask.trace is not None and (tracer := tracing.tracer) is not None:
            self.trace_context = tracer.arrived(ask.trace)
        self.request: weakref.ref[object] | None = None
        self.block: CancelOnce | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether the client waits for an answer."""
        return self.wants_answer and self.state is not RequestState.ENDED


class ClientSession:
    """A connected client.

    Args:
        identity: the identity that ZeroMQ assigned to the connection of the client.
        connection: the state of the connection.
        send: passes a message to ZeroMQ, and returns whether ZeroMQ accepted it; the second argument is
            whether this is a retry.
        unfinished: the requests that have not ended, of all clients of the server.
        disconnect: called with this object when the client leaves too many messages unread.

    Attributes:
        queue: the messages that wait to be sent to the client.
        requests: the unfinished requests of the client, by their numbers.
    """

    def __init__(
        self,
        identity: bytes,
        connection: ServerConnection,
        send: Callable[[Parts, bool], bool],
        unfinished: set[IncomingRequest],
        disconnect: Callable[["ClientSession"], None],
    ) -> None:
        self.identity = identity
        self.connection = connection
        self.queue = SendQueue(send)
        self.requests: dict[int, IncomingRequest] = {}
        self._unfinished = unfinished
        self._disconnect = disconnect
        self._retry_senders_at = 0.0
        self._has_logged_no_sender = False

    @property
    def pid(self) -> int:
        """The process id of the client, as the client states it."""
        return self.connection.peer_pid or 0

    def add(self, ask: Ask, parts: list[memoryview]) -> IncomingRequest:
        """Add a request that has arrived, with its body and the buffers beside it."""
        incoming = self.requests[ask.number] = IncomingRequest(self, ask, parts)
        self._unfinished.add(incoming)
        return incoming

    def take(self, incoming: IncomingRequest) -> None:
        """Return the credit for a request that no longer waits, because it was taken or never will be."""
        incoming.parts = []
        if self.connection.take(incoming.nbytes):
            self.post(self.connection.credit())

    def end(self, incoming: IncomingRequest) -> None:
        """Mark a request as finished."""
        incoming.state = RequestState.ENDED
        incoming.request = None
        self.requests.pop(incoming.number, None)
        self._unfinished.discard(incoming)

    async def answer(self, incoming: IncomingRequest, parts: Parts, handles: Handles) -> bool:
        """Send an answer once ZeroMQ accepts it, and return whether the client still waited for it.

        Args:
            incoming: the request to answer; sending the answer ends it.
            parts: the body of the answer, and the buffers beside it.
            handles: the handles of the tensors of the answer that a sender has sent.

        Cancellation removes the answer unless it was sent.

        Raises:
            TooLargeError: the client does not accept a body or a part of this size.
            OSError: this process lacks the descriptors or threads to send the answer.
        """
        if not incoming.is_wanted:
            return False
        answer, message = self.connection.answer(incoming.number, parts, handles)

        def sent() -> None:  # not called if the answering task is cancelled first
            self.connection.answered(answer)
            incoming.is_answered = True
            self.end(incoming)

        return await self.queue.put(message, sent)

    def answer_now(self, incoming: IncomingRequest, parts: Parts) -> bool:
        """Send or queue a small answer without waiting, and return whether the client still waited for it."""
        if not incoming.is_wanted:
            self.end(incoming)
            return False
        answer, message = self.connection.answer(incoming.number, parts, ())
        self.connection.answered(answer)
        incoming.is_answered = True
        self.end(incoming)
        self.post(message)
        return True

    def fail(self, incoming: IncomingRequest, cause: Cause) -> bool:
        """Send a failure in place of an answer, and return whether the client still waited for it."""
        was_wanted = incoming.is_wanted
        self.end(incoming)
        if was_wanted:
            self.post(self.connection.fail(incoming.number, cause))
        return was_wanted

    def post(self, message: Parts) -> None:
        """Send or queue a message; disconnect a client that leaves too many messages unread."""
        self.queue.post(message)
        if len(self.queue) > MAX_UNREAD and not self.connection.is_closed:
            self._disconnect(self)

    def sender_among(self, senders: Sequence[TensorSender]) -> TensorSender | None:
        """Return the sender that is connected to the client's receiver; if none is, all try to connect."""
        if not (self.connection.receiver and senders):
            return None
        for sender in senders:
            if sender.receiver_id == self.connection.receiver:
                return sender
        now = asyncio.get_running_loop().time()
        if now >= self._retry_senders_at:
            self._retry_senders_at = now + _AT_MOST_EVERY_S
            for sender in senders:
                capacity_of(sender).connect_now()
        return None

    def log_no_sender(self) -> None:
        """Log, once, that answers contain their tensors, because no sender is connected to the client."""
        if self.connection.receiver and not self._has_logged_no_sender:
            self._has_logged_no_sender = True
            logger.warning(
                "tensors for process %s are sent inside the replies because no sender is connected to its "
                "receiver",
                self.pid,
                extra={"event": "detour_taken", "peer_pid": self.pid},
            )
