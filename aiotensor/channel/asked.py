"""What a client has asked, and where it is.

A message that was asked, as the server sees it:

    WAITING --taken by whoever iterates--> IN_HAND --answered, failed--> ENDED
       |                                      |
       '--------------------------------------'--cancelled, or its client lost--> ENDED
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
from aiotensor.logs import logger_of
from aiotensor.placements import QUICK_BYTES
from aiotensor.protocol.exchange import ClientHello, PartLimits
from aiotensor.protocol.window import Tally
from aiotensor.receiver import TensorReceiver
from aiotensor.sender import TensorSender
from aiotensor.types import TensorHandle

__all__ = ["Asked", "Client", "Limits", "State", "await_tensors", "take_tensors"]

logger = logger_of("channel")

# How often a sender that a client's receiver refused asks it again, while answers to it go another way.
_AT_MOST_EVERY_S = 1.0


class State(enum.Enum):
    """Where a message is."""

    WAITING = "waiting"
    IN_HAND = "in hand"
    ENDED = "ended"


class Asked:
    """A message of a client.

    Args:
        client: whose.
        number: its number there.
        wants_answer: whether it is to be answered.
        handles: of its tensors that travel by a sender.
        parts: its body, and the buffers beside it.

    Attributes:
        is_answered: whether an answer has left.
        is_large: whether freeing what it was decoded to may take long.
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
        self.request: weakref.ref[object] | None = None  # what whoever answers it has

    @property
    def is_wanted(self) -> bool:
        """Say whether somebody waits for an answer."""
        return self.wants_answer and self.state is not State.ENDED


class Limits(NamedTuple):
    """What clients may use of a server; None for no limit.

    Attributes:
        clients: the most at once.
        waiting: messages of each that may wait to be taken.
        waiting_bytes: after how many bytes of them it sends no more.
        parts: the largest part, and the largest body, of a message.
    """

    clients: int | None
    waiting: int
    waiting_bytes: int
    parts: PartLimits


class Client:
    """A client that is connected.

    Args:
        identity: of its connection, by which ZeroMQ knows it.
        hello: what it said of itself.
        tally: of its messages that wait.
        outbox: what is on its way to it.
    """

    def __init__(self, identity: bytes, hello: ClientHello, tally: Tally, outbox: Outbox) -> None:
        self.identity = identity
        self.tally = tally
        self.outbox = outbox
        self.pid = hello.pid
        self.receiver = hello.receiver
        self.limits = PartLimits(hello.max_part_bytes, hello.max_body_bytes)
        self._looks_at = 0.0
        self._takes_detour = False  # its tensors travel in the answers, though there are senders
        self.next_number = 0
        self.asked: dict[int, Asked] = {}  # what has not ended

    def sender_among(self, senders: Sequence[TensorSender]) -> TensorSender | None:
        """Find the sender that leads to its receiver; if there is none, have those that lead nowhere look."""
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
        """Log, once, that tensors for it do not go the way that was meant for them."""
        if self.receiver and not self._takes_detour:
            self._takes_detour = True
            logger.warning(
                "tensors for process %s travel in the answers: no sender is connected to its receiver",
                self.pid,
                extra={"event": "detour_taken", "peer_pid": self.pid},
            )

    def note_refusal(self, error: Exception, text: str) -> None:
        """Log that a message of it cannot be taken.

        Args:
            error: why.
            text: of the error.
        """
        is_foreseen = isinstance(error, AioTensorError | ValueError)
        # That its tensors were discarded, or lost with their sender, is nobody's fault here.
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
        came: called with the message and why they will not come, if so. Weak: a message that waits for its
            tensors does not keep its server alive.
    """
    error: Exception | None = None
    try:
        for handle in asked.handles:
            await receiver.arrived(handle)
    except Exception as caught:  # noqa: BLE001 - whatever it is, the client is told, and it is logged
        error = caught
        if isinstance(error, WouldBlockError):  # what comes later must not stay here untaken
            for handle in asked.handles:
                receiver.discard(handle)
    method = came()
    if method is not None:
        method(asked, error)
    del error  # its traceback has this frame


async def take_tensors(
    receiver: TensorReceiver, handles: Sequence[TensorHandle], found: list[torch.Tensor]
) -> None:
    """Take the tensors of a message that are not in `found` yet; yields to the loop between many."""
    for count in range(len(found), len(handles)):
        if count and not count % QUICK_TENSORS:
            await asyncio.sleep(0)
        found.append(receiver.receive_nowait(handles[count]))
