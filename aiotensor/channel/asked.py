"""A client and its messages, as the server sees them.

The states of a message:

    WAITING --taken by the iteration--> IN_HAND --answered, failed--> ENDED
       |                                   |
       '-----------------------------------'--cancelled, or its client lost--> ENDED
"""

import asyncio
import enum
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from aiotensor.channel.outbox import Outbox
from aiotensor.channel.parcels import QUICK_BODY_BYTES, QUICK_TENSORS
from aiotensor.errors import AioTensorError, ProtocolError, WouldBlockError
from aiotensor.protocol.exchange import ClientHello, PartLimits
from aiotensor.protocol.window import Tally
from aiotensor.receiver import TensorReceiver
from aiotensor.runtime.logs import logger_of
from aiotensor.sender import TensorSender
from aiotensor.tensors.copying import QUICK_BYTES
from aiotensor.types import TensorHandle

__all__ = ["Asked", "Client", "Limits", "State", "await_tensors", "take_tensors"]

logger = logger_of("channel")

# The least time between attempts of a sender to connect to a client's receiver that refused it; until it
# succeeds, answers contain their tensors.
_AT_MOST_EVERY_S = 1.0


class State(enum.Enum):
    """The state of a message."""

    WAITING = "waiting"
    IN_HAND = "in hand"
    ENDED = "ended"


class Asked:
    """A message of a client.

    Args:
        client: the client that sent it.
        number: its number, unique for that client.
        wants_answer: whether the client expects an answer.
        handles: the handles of its tensors that a sender has sent.
        parts: its body, and the buffers beside it.

    Attributes:
        is_answered: whether an answer was sent.
        is_large: whether freeing the decoded message may take long.
    """

    __slots__ = (
        "client",
        "handles",
        "is_answered",
        "is_large",
        "nbytes",
        "number",
        "parts",
        "request",
        "state",
        "wants_answer",
    )

    def __init__(
        self,
        client: "Client",
        number: int,
        handles: tuple[TensorHandle, ...],
        parts: list[memoryview],
        *,
        wants_answer: bool,
    ) -> None:
        self.client = client
        self.number = number
        self.wants_answer = wants_answer
        self.handles = handles
        self.parts = parts
        self.nbytes = sum(map(len, parts))
        self.is_large = self.nbytes > QUICK_BYTES or len(parts[0]) > QUICK_BODY_BYTES
        self.state = State.WAITING
        self.is_answered = False
        self.request: weakref.ref[object] | None = None  # once it is taken

    @property
    def is_wanted(self) -> bool:
        """Return whether the client waits for an answer."""
        return self.wants_answer and self.state is not State.ENDED


class Limits(NamedTuple):
    """The limits of a server on its clients; None for no limit.

    Attributes:
        clients: the most clients at once.
        waiting: the most messages of each client that may wait to be taken.
        waiting_bytes: the bytes of these messages at which the client stops sending.
        parts: the largest part, and the largest body, of a message.
    """

    clients: int | None
    waiting: int
    waiting_bytes: int
    parts: PartLimits


class Client:
    """A connected client.

    Args:
        identity: the identity that ZeroMQ assigned to its connection.
        hello: its hello.
        tally: counts its waiting messages.
        outbox: the messages that wait to be sent to it.
    """

    def __init__(self, identity: bytes, hello: ClientHello, tally: Tally, outbox: Outbox) -> None:
        self.identity = identity
        self.tally = tally
        self.outbox = outbox
        self.pid = hello.pid
        self.receiver = hello.receiver
        self.limits = PartLimits(hello.max_part_bytes, hello.max_body_bytes)
        self._looks_at = 0.0
        self._takes_detour = False  # answers contain their tensors though the server has senders
        self.next_number = 0
        self.asked: dict[int, Asked] = {}  # unfinished messages, by their numbers

    def sender_among(self, senders: Sequence[TensorSender]) -> TensorSender | None:
        """Return the sender that is connected to its receiver; if there is none, others try to connect."""
        if not (self.receiver and senders):
            return None
        for sender in senders:
            if sender.receiver_id == self.receiver:
                return sender
        now = asyncio.get_running_loop().time()
        if now >= self._looks_at:
            self._looks_at = now + _AT_MOST_EVERY_S
            for sender in senders:
                sender._look_again()
        return None

    def note_detour(self) -> None:
        """Log, once, that answers contain their tensors for lack of a connected sender."""
        if self.receiver and not self._takes_detour:
            self._takes_detour = True
            logger.warning(
                "tensors for process %s travel in the answers: no sender is connected to its receiver",
                self.pid,
                extra={"event": "detour_taken", "peer_pid": self.pid},
            )

    def note_dropped_request(self) -> None:
        """Log that one of its requests was garbage-collected without an answer."""
        logger.warning(
            "a request of process %s was dropped without an answer: answer each one in its block",
            self.pid,
            extra={"event": "request_dropped", "peer_pid": self.pid},
        )

    def note_refusal(self, error: Exception, text: str) -> None:
        """Log that one of its messages cannot be taken.

        Args:
            error: the reason.
            text: the text of the error.
        """
        is_foreseen = isinstance(error, AioTensorError | ValueError)
        # Discarded tensors, and tensors lost with their sender, are not errors of this process.
        is_fault = isinstance(error, ProtocolError) or not is_foreseen
        logger.log(
            logging.ERROR if is_fault else logging.INFO,
            "a message of process %s is refused: %s",
            self.pid,
            text,
            exc_info=None if is_foreseen else error,
            extra={
                "event": "message_refused",
                "peer_pid": self.pid,
                "error": type(error).__name__,
                "reason": text,
            },
        )


async def await_tensors(
    asked: Asked,
    receiver: TensorReceiver,
    came: "weakref.WeakMethod[Callable[[Asked, Exception | None], None]]",
) -> None:
    """Wait for the tensors of a message.

    Args:
        asked: the message.
        receiver: where they arrive.
        came: called with the message, and the error if its tensors will not arrive. Weak: a message that
            waits for its tensors does not keep its server alive.
    """
    error: Exception | None = None
    try:
        for handle in asked.handles:
            await receiver.arrived(handle)
    except Exception as caught:  # noqa: BLE001 - any error is sent to the client and logged
        error = caught
        if isinstance(error, WouldBlockError):  # tensors that arrive later would never be taken
            for handle in asked.handles:
                receiver.discard(handle)
    method = came()
    if method is not None:
        method(asked, error)
    del error  # its traceback refers to this frame


async def take_tensors(
    receiver: TensorReceiver, handles: Sequence[TensorHandle], found: list[torch.Tensor]
) -> None:
    """Append the missing tensors of a message to `found`; yields to the loop between many."""
    for count in range(len(found), len(handles)):
        if count and not count % QUICK_TENSORS:
            await asyncio.sleep(0)
        found.append(receiver.receive_nowait(handles[count]))
