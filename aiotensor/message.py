"""What is on its way: a message, and what can become of it.

    OPEN --last tensor--> WHOLE --taken--> TAKEN
      |                     |
      +---------------------+--discarded, by either side--> DISCARDED
      |                     |
      '---------------------'--the receiver is gone--> LOST

It holds a permit while it is OPEN or WHOLE.
"""

import enum

from aiotensor.errors import AioTensorError
from aiotensor.protocol.credits import Ticket

__all__ = ["Message", "State"]


class State(enum.Enum):
    """Where a message is."""

    OPEN = "being sent"
    WHOLE = "waiting to be taken"
    TAKEN = "taken, its tensors still in use"
    DISCARDED = "discarded"
    LOST = "lost"


class Message:
    """A message that holds a permit, or did.

    Args:
        permit: to give back when it ends.
    """

    __slots__ = (
        "awaits_bytes",
        "awaits_room",
        "count",
        "has_bytes",
        "loss",
        "number",
        "permit",
        "since",
        "state",
        "task",
    )

    def __init__(self, permit: Ticket[None]) -> None:
        self.permit = permit
        self.since = permit.since  # it began then, by the clock of the loop
        self.state = State.OPEN
        self.loss: AioTensorError | None = None  # why it is LOST
        self.number: int | None = None  # known with the first announcement
        self.count = 0  # tensors announced
        self.awaits_bytes = 0  # sends that wait for bytes
        self.awaits_room = 0  # sends that wait for the link
        self.has_bytes = False  # of shared memory, or had
        self.task: object = None  # the one in whose block it is open

    @property
    def has_ended(self) -> bool:
        """Say whether it gave its permit back."""
        return self.state is not State.OPEN and self.state is not State.WHOLE
