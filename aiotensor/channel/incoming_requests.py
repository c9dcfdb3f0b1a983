"""The requests of a server, from their arrival to their answers."""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

import torch

from aiotensor.channel.client_session import ClientSession, IncomingRequest, RequestState
from aiotensor.channel.memory import MessageMemory
from aiotensor.channel.payloads import QUICK_TENSORS, Handles, discard, send_tensors
from aiotensor.codec import TensorDecoder
from aiotensor.codec.payload import pack, unpack, unpack_now
from aiotensor.errors import AioTensorError, ClosedError, ProtocolError, UsageError, WouldBlockError
from aiotensor.protocol.exchange import Cause
from aiotensor.protocol.parts import Parts, check_parts
from aiotensor.receiver import TensorReceiver, has_seen
from aiotensor.runtime import tracing
from aiotensor.runtime.affinity import FreedItems, LoopAffinity
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.waiting import Waiters
from aiotensor.sender import TensorSender

__all__ = ["FairQueue", "IncomingRequests", "cause_of"]

logger = logger_of("channel")

M = TypeVar("M")


class FairQueue:
    """Order requests so that clients take turns; the requests of each client stay in order.

    A client with many waiting requests gets no more turns than a client with one.

    Attributes:
        by_client: the waiting requests of each client that has any, in the order of the turns.
    """

    def __init__(self) -> None:
        self.by_client: OrderedDict[ClientSession, deque[IncomingRequest]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self.by_client.values()))

    def __iter__(self) -> Iterator[IncomingRequest]:
        for requests in self.by_client.values():
            yield from requests

    def add(self, incoming: IncomingRequest) -> None:
        """Add a request behind the others of its client."""
        self.by_client.setdefault(incoming.client, deque()).append(incoming)

    def put_back(self, incoming: IncomingRequest) -> None:
        """Return a request to the front, as if it had not been taken."""
        self.by_client.setdefault(incoming.client, deque()).appendleft(incoming)
        self.by_client.move_to_end(incoming.client, last=False)

    def take(self) -> IncomingRequest:
        """Take a request of the client whose turn it is; the client then has the last turn.

        Raises:
            KeyError: no request waits.
        """
        client, requests = self.by_client.popitem(last=False)
        incoming = requests.popleft()
        if requests:
            self.by_client[client] = requests
        return incoming

    def remove(self, incoming: IncomingRequest) -> None:
        """Remove a request if it waits."""
        requests = self.by_client.get(incoming.client)
        if requests is not None and incoming in requests:
            requests.remove(incoming)
            if not requests:
                del self.by_client[incoming.client]


class IncomingRequests(Generic[M]):
    """Queue requests until they are taken, and answer them; belongs to the running loop.

    Args:
        decoder: the decoder for the messages.
        receiver: the receiver for the tensors that clients send with a sender; None if there is none.
        senders: the senders for the tensors of answers, each to the receiver of one client.
        affinity: the `LoopAffinity` of the server.
        counts: the counters of the server.

    Attributes:
        takers: the tasks that wait for a request, and take it.
        waiters: the other tasks that wait for a change.
        unfinished: the requests that have not ended, of all clients.
        ready: the requests whose tensors have arrived.
        waiting: the number of requests that have not been taken.
        waiting_bytes: the bytes of the bodies and buffers of these requests.
        memory: the memory of large messages.
        dropped: called with a request when its `Request` was garbage-collected.
    """

    def __init__(
        self,
        decoder: TensorDecoder[M],
        receiver: TensorReceiver | None,
        senders: Sequence[TensorSender],
        affinity: LoopAffinity,
        counts: dict[str, int],
    ) -> None:
        self.takers, self.waiters = Waiters(), Waiters()
        self.unfinished: set[IncomingRequest] = set()
        self.ready = FairQueue()
        self.waiting = self.waiting_bytes = 0
        self.memory = MessageMemory()
        self.affinity = affinity
        self._decoder = decoder
        self._receiver = receiver
        self._senders = senders
        self._counts = counts
        self._arriving: dict[IncomingRequest, asyncio.Task[None]] = {}  # tasks that wait for tensors
        self._found: dict[IncomingRequest, list[torch.Tensor]] = {}  # taken before decoding was cancelled
        self.dropped: FreedItems[IncomingRequest] = FreedItems(self._requests_dropped)
        self.dropped.bind()

    @property
    def in_hand(self) -> int:
        """The number of requests that were taken and have not ended."""
        return len(self.unfinished) - self.waiting

    def close(self) -> None:
        """Cancel all requests, and end the waits for them."""
        for incoming in list(self.unfinished):
            self.cancel(incoming)
        self.wake()

    def wake(self) -> None:
        """Wake all tasks that wait for a request or a change."""
        self.takers.wake()
        self.waiters.wake()

    def wake_taker(self) -> None:
        """Wake one task that waits for a request, if there is one to take."""
        if self.takers and self.ready.by_client:
            self.takers.wake_one()

    # From clients

    def add(self, incoming: IncomingRequest) -> None:
        """Queue a new request once its tensors have arrived."""
        self._counts["messages_received"] += 1
        self.waiting += 1
        self.waiting_bytes += incoming.nbytes
        if not incoming.handles:
            self._make_ready(incoming)
        elif self._receiver is None:
            self._refuse(incoming, ProtocolError("this server has no receiver for tensors sent by a sender"))
        else:
            waiting = self._await_tensors(incoming, self._receiver)
            task = asyncio.get_running_loop().create_task(waiting)
            if not task.done():  # an eager task may have ended already
                self._arriving[incoming] = task

    def cancel(self, incoming: IncomingRequest) -> None:
        """Release a request whose client cancelled it or is gone, and cancel the task that answers it."""
        self._counts["cancelled"] += 1
        was_waiting = incoming.state is RequestState.WAITING
        incoming.client.end(incoming)
        if was_waiting:
            self._stop_waiting(incoming)
        elif incoming.block is not None:
            incoming.block.cancel()

    def cancel_arriving(self, client: ClientSession) -> bool:
        """Cancel the requests of a disconnected client if all wait for tensors; return whether they do.

        Tensors are sent before their message, so tensors that are still missing may never arrive.
        """
        left = [incoming for incoming in client.requests.values() if incoming.state is RequestState.WAITING]
        if not all(incoming in self._arriving for incoming in left):
            return False
        for incoming in left:
            self.cancel(incoming)
        return True

    def is_void(self, incoming: IncomingRequest) -> bool:
        """Return whether a request waits for tensors of a sender that has never connected."""
        receiver = self._receiver
        if receiver is None or incoming not in self._arriving:
            return False
        return not all(has_seen(receiver, handle.sender) for handle in incoming.handles)

    async def _await_tensors(self, incoming: IncomingRequest, receiver: TensorReceiver) -> None:
        error: Exception | None = None
        try:
            for handle in incoming.handles:
                await receiver.arrived(handle)
        except Exception as caught:  # noqa: BLE001 - any error is sent to the client and logged
            error = caught
            if isinstance(error, WouldBlockError):  # no call would take tensors that arrive later
                for handle in incoming.handles:
                    receiver.discard(handle)
        self._arriving.pop(incoming, None)
        if error is None:
            self._make_ready(incoming)
        else:
            self._refuse(incoming, error)
        del error  # its traceback refers to this frame

    def _make_ready(self, incoming: IncomingRequest) -> None:
        self.ready.add(incoming)
        if self.takers:
            self.takers.wake_one()
        if self.waiters:
            self.waiters.wake()

    # Taking

    async def take(self) -> tuple[IncomingRequest, M] | None:
        """Take the next request, and return it with its message; return None if it was refused or has ended.

        Waits while a thread decodes a large message. Cancellation returns the request to the front.
        """
        incoming = self.ready.take()
        if self.takers:
            self.wake_taker()
        try:
            found = self._found.pop(incoming, None) or []
            try:
                if incoming.handles and self._receiver is not None:
                    await _take_tensors(self._receiver, incoming.handles, found)
                message: M = await unpack(self._decoder, incoming.parts, found)
            except asyncio.CancelledError:
                if incoming.state is RequestState.WAITING:
                    self._found[incoming] = found
                    self.ready.put_back(incoming)
                    self.takers.wake_one()
                    self.waiters.wake()
                raise
        except Exception as error:  # noqa: BLE001 - decoding runs code of the user's type
            self._refuse(incoming, error)
            return None
        if incoming.state is not RequestState.WAITING:
            # It was cancelled, or the server closed, during decoding.
            if incoming.is_large:
                box = [message]
                del message
                self.memory.free(box)
            return None
        incoming.state = RequestState.IN_HAND
        self._counts["messages_taken"] += 1
        self._stopped_waiting(incoming)  # after the state: sending credit may reveal that the client is gone
        if incoming.trace_context is not None and (tracer := tracing.tracer) is not None:
            tracer.delivered("message", incoming.trace_context, nbytes=incoming.nbytes)
        return incoming, message

    def take_now(self) -> tuple[IncomingRequest, M] | None:
        """Take the next request as `take` does, but decode even a large message on this thread."""
        incoming = self.ready.take()
        self.wake_taker()
        found = self._found.pop(incoming, [])
        try:
            if incoming.handles and self._receiver is not None:
                found += [self._receiver.receive_nowait(handle) for handle in incoming.handles[len(found) :]]
            message: M = unpack_now(self._decoder, incoming.parts, found)
        except Exception as error:  # noqa: BLE001 - decoding runs code of the user's type
            self._refuse(incoming, error)
            return None
        incoming.state = RequestState.IN_HAND
        self._counts["messages_taken"] += 1
        self._stopped_waiting(incoming)
        if incoming.trace_context is not None and (tracer := tracing.tracer) is not None:
            tracer.delivered("message", incoming.trace_context, nbytes=incoming.nbytes)
        return incoming, message

    def _refuse(self, incoming: IncomingRequest, error: Exception) -> None:
        """Answer a waiting request with an error, and release it."""
        if incoming.state is RequestState.WAITING:
            cause = cause_of(error)
            is_foreseen = isinstance(error, AioTensorError | ValueError)
            # Discarded tensors, and tensors lost with their sender, are not errors of this process.
            is_fault = isinstance(error, ProtocolError) or not is_foreseen
            logger.log(
                logging.ERROR if is_fault else logging.INFO,
                "a message from process %s was refused: %s",
                incoming.client.pid,
                cause.text,
                exc_info=None if is_foreseen else error,
                extra={
                    "event": "message_refused",
                    "peer_pid": incoming.client.pid,
                    "error": cause.type_name,
                    "reason": cause.text,
                },
            )
            self._counts["failures"] += 1
            incoming.client.fail(incoming, cause)
            self._stop_waiting(incoming)

    def _stop_waiting(self, incoming: IncomingRequest) -> None:
        """Release a waiting request and its tensors."""
        self._stopped_waiting(incoming)
        self._found.pop(incoming, None)
        task = self._arriving.pop(incoming, None)
        if task is not None:
            task.cancel()
        self.ready.remove(incoming)
        if self._receiver is not None and incoming.handles:
            with suppress(ClosedError, ValueError):
                self._receiver.discard(incoming.handles[0])

    def _stopped_waiting(self, incoming: IncomingRequest) -> None:
        self.waiting -= 1
        self.waiting_bytes -= incoming.nbytes
        self.memory.free_parts(incoming.parts)
        incoming.client.take(incoming)

    # Answering

    async def answer(self, incoming: IncomingRequest, box: list[object]) -> bool:
        """Send the answer in the list `box`, and return whether the client still waited for it."""
        self.affinity.check()
        sender = incoming.client.sender_among(self._senders)
        was_wanted = incoming.is_wanted and await self._send_answer(incoming, box, sender)
        if not was_wanted:
            self.affinity.check()  # the server may have been closed
        self._counts["answers"] += was_wanted
        incoming.client.end(incoming)
        return was_wanted

    def answer_now(self, incoming: IncomingRequest, parts: Parts) -> bool:
        """Send a small encoded answer without waiting, and return whether the client still waited for it."""
        was_wanted = incoming.client.answer_now(incoming, parts)
        self._counts["answers"] += was_wanted
        return was_wanted

    def fail(self, incoming: IncomingRequest, cause: Cause) -> bool:
        """Send a failure in place of an answer, and return whether the client still waited for it."""
        self.affinity.check()
        was_wanted = incoming.client.fail(incoming, cause)
        self._counts["failures"] += was_wanted
        return was_wanted

    async def _send_answer(
        self, incoming: IncomingRequest, box: list[object], sender: TensorSender | None
    ) -> bool:
        limits = incoming.client.connection.limits
        payload = await pack(
            box, has_sender=sender is not None, body_limit=lambda: limits.body_bytes, peer="client"
        )
        parts = payload.parts
        handles: Handles = ()
        try:
            if sender is None and self._senders and len(parts) > 1:
                incoming.client.log_no_sender()
            if sender is not None and payload.tensors:
                check_parts(parts, incoming.client.connection.limits, "client")  # before sending its tensors
                handles = await send_tensors(payload, sender)
            released = self.memory.watch(parts)
            was_wanted = await incoming.client.answer(incoming, parts, handles)
        finally:
            payload.tensors.clear()
            self.memory.free_parts(parts)
            if not incoming.is_answered:
                discard(sender, handles)
        if released is not None and was_wanted:
            await released
        return was_wanted

    def _requests_dropped(self, dropped: list[IncomingRequest]) -> None:
        """Fail the requests that were garbage-collected without an answer."""
        for incoming in dropped:
            if incoming in self.unfinished and not self.affinity.is_closed:
                if incoming.is_wanted:
                    logger.warning(
                        "a request from process %s was dropped without a reply: answer each request in its "
                        "block",
                        incoming.client.pid,
                        extra={"event": "request_dropped", "peer_pid": incoming.client.pid},
                    )
                # Reported as a loss, not as an error of the handler: a signal or a cancellation may arrive
                # after the request was taken, but before its block is entered.
                self.fail(
                    incoming, Cause(UsageError.__name__, "it was dropped without a reply", is_loss=True)
                )


async def _take_tensors(receiver: TensorReceiver, handles: Handles, found: list[torch.Tensor]) -> None:
    """Append the missing tensors of a message to `found`; yields to the loop at intervals."""
    for count in range(len(found), len(handles)):
        if count and not count % QUICK_TENSORS:
            await asyncio.sleep(0)
        found.append(receiver.receive_nowait(handles[count]))


def cause_of(error: BaseException) -> Cause:
    """Return the name and the text of an error, even if its `__str__` raises."""
    try:
        text = str(error)
    except Exception as another:  # noqa: BLE001 - the client gets an answer in any case
        text = f"(its text cannot be shown: {type(another).__name__})"
    if isinstance(error, asyncio.CancelledError) and not text:
        text = "the server's handler was cancelled"
    return Cause(type(error).__name__, text, is_loss=not isinstance(error, Exception))
