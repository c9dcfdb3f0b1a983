"""The plan of a round: its messages, the behaviour of its processes, and its faults."""

import enum
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from aiotensor.broadcast import SlowPolicy

__all__ = [
    "ELDERS",
    "ENDS",
    "FAMILIES",
    "LAST",
    "MAX_SUBSCRIBERS",
    "MAX_TENSORS",
    "PARTS",
    "PEER_TIMEOUT_S",
    "RESOURCES",
    "ROLES",
    "SLOTS",
    "Fault",
    "FaultKind",
    "Hold",
    "Kind",
    "Order",
    "PublisherPlan",
    "Round",
    "SenderPlan",
    "TakerPlan",
    "key_of",
]

SLOTS = 3  # the senders or clients of a family
MAX_SUBSCRIBERS = 8
LAST = -1  # the key of a publication that belongs to no order
MAX_TENSORS = 4  # in a message
PARTS = 2  # of a process, and of its replacement within the round
_ORDERS = 256  # the maximum number of orders in one part

PEER_TIMEOUT_S = 1.0  # between hosts

# The roles of both sides, by the work.
ROLES = {
    "tensors": ("sender", "receiver"),
    "requests": ("client", "server"),
    "broadcast": ("publisher", "subscriber"),
}


class Kind(NamedTuple):
    """The work of a family, and its connections.

    Attributes:
        work: "tensors", "requests" or "broadcast".
        link: "unix"; "tcp" on the loopback, without keys and timeouts; or "hosts": two hosts and a cable,
            with keys and timeouts.
        listeners: the number of receivers or servers.
    """

    work: str
    link: str
    listeners: int = 1

    @property
    def lands(self) -> bool:
        """Whether tensors are copied to memory of the side that receives them."""
        return self.link != "unix"

    @property
    def has_timeout(self) -> bool:
        """Whether silence for `PEER_TIMEOUT_S` ends a connection."""
        return self.link == "hosts"


FAMILIES = {
    "server": Kind("tensors", "unix"),
    "engine": Kind("tensors", "unix"),
    "asking": Kind("requests", "unix", 2),
    "answering": Kind("requests", "unix"),
    "publisher": Kind("broadcast", "unix"),
    "subscriber": Kind("broadcast", "unix"),
    "tcp server": Kind("tensors", "tcp"),
    "tcp engine": Kind("tensors", "tcp"),
    "tcp asking": Kind("requests", "tcp", 2),
    "tcp answering": Kind("requests", "tcp"),
    "tcp subscriber": Kind("broadcast", "tcp"),
    "remote server": Kind("tensors", "hosts"),
    "remote asking": Kind("requests", "hosts", 2),
    "remote subscriber": Kind("broadcast", "hosts"),
}

# The process that lives for the whole run, whose memory is measured: the target of its faults.
ELDERS = {
    "server": 0,
    "engine": SLOTS,
    "asking": 0,
    "answering": SLOTS,
    "publisher": 0,
    "subscriber": SLOTS,
    "tcp server": 0,
    "tcp engine": SLOTS,
    "tcp asking": 0,
    "tcp answering": SLOTS,
    "tcp subscriber": SLOTS,
    "remote server": 0,
    "remote subscriber": SLOTS,
}


class FaultKind(enum.Enum):
    """A kind of fault during a round."""

    KILL = "kill -9"
    KILL_WITH_FORK = "kill -9 while a forked child lives"
    STOP = "SIGSTOP, SIGCONT"
    CLOSE = "close and open again"
    NO_SPACE = "ENOSPC or ENOMEM when the arena grows"
    FILE_SIZE = "EFBIG when a segment is made"
    NO_ADDRESSES = "ENOMEM when a segment is mapped"
    NO_DESCRIPTORS = "EMFILE"
    CLOCK = "the clock jumps"
    FORK = "fork in the middle"
    COLLECT = "garbage collection at every allocation"
    ATTACK = "a flood of connections"
    PARTITION = "packets are lost"


RESOURCES = (FaultKind.NO_SPACE, FaultKind.FILE_SIZE, FaultKind.NO_ADDRESSES, FaultKind.NO_DESCRIPTORS)
ENDS = (FaultKind.KILL, FaultKind.KILL_WITH_FORK, FaultKind.CLOSE)


class Hold(enum.Enum):
    """The use of a taken tensor by its receiver."""

    DROP = "drop it at once"
    KEEP = "keep it for a while"
    CYCLE = "leave it to the garbage collector"


class Fault(msgspec.Struct, frozen=True):
    """A fault of one process or of the network.

    Attributes:
        kind: the kind of the fault.
        target: the slot of the sender, client or publisher; receivers, servers and subscribers are counted
            on from `SLOTS`. None for the network.
        at_ms: the time after the start of the round.
        for_ms: the duration, for faults that have one.
        how: the attack, or the direction of lost packets.
    """

    kind: FaultKind
    target: int | None
    at_ms: float
    for_ms: float
    how: str = ""


class Order(msgspec.Struct, frozen=True):
    """One message to send.

    Attributes:
        key: the pattern of its first tensor, a multiple of `MAX_TENSORS`; the next ones count on. No other
            message has it.
        how: send, nowait, post, message, or allocate; for questions: request, inside, idempotent, or one-way;
            for publications: publish, nowait, allocate, or drain.
        counts: the numbers of elements of its tensors.
        fate: the sender's next action on it: none, discard, cancel, or raise.
        after_ms: the time of that action.
        wish: the requested reaction to a question: answer, echo, raise, or drop.
        answer: the numbers of elements of the tensors in its answer.
        target: the server to ask; None for any.
    """

    key: int
    how: str
    counts: tuple[int, ...]
    fate: str
    after_ms: float
    wish: str = ""
    answer: tuple[int, ...] = ()
    target: int | None = None


class SenderPlan(msgspec.Struct, frozen=True):
    """The messages of one sender, in its process and in the process that replaces it after a kill.

    Attributes:
        slot: the slot of the sender.
        permits, keep_warm_s: options of a sender that is opened in this round.
        uvloop: whether a process that is started in this round uses uvloop.
        width: the number of concurrent messages.
        parts: the orders of each process.
    """

    slot: int
    permits: int
    keep_warm_s: float
    uvloop: bool
    width: int
    parts: tuple[tuple[Order, ...], ...]


class TakerPlan(msgspec.Struct, frozen=True):
    """The behaviour of a receiver, server or subscriber.

    Attributes:
        number: its number among them.
        seed: the seed of its random choices.
        uvloop: whether a process that is started in this round uses uvloop.
        iterators: the number of tasks that iterate over arriving tensors.
        by_handle: the messages of each sender to request by handle, counted from the first of the round.
        discards: the messages that are discarded by handle.
        stuck_ms: the time before it takes its first tensor.
        slow_ms: the pause after each tensor.
        hold: the use of each tensor.
        hold_ms: the time for which a tensor is kept.
        copies: the share of tensors received as copies.
        serves: whether a server uses `serve`.
        max_waiting: an option of a server that is opened in this round.
    """

    number: int
    seed: int
    uvloop: bool
    iterators: int
    by_handle: tuple[int, ...]
    discards: tuple[int, ...]
    stuck_ms: float
    slow_ms: float
    hold: Hold
    hold_ms: float
    copies: float
    serves: bool
    max_waiting: int


class PublisherPlan(msgspec.Struct, frozen=True):
    """The options of the publishers of a round."""

    slow: SlowPolicy
    max_behind: int
    max_held_bytes: int | None
    history: int
    max_wait_s: float | None


class Round(msgspec.Struct, frozen=True):
    """A round: the messages of all senders, the behaviour of the receivers, and the faults.

    Attributes:
        senders: the senders, the clients or the publisher.
        takers: the receiver, the servers or the subscribers.
        publisher: the options of the publisher in a broadcast.
    """

    number: int
    family: str
    senders: tuple[SenderPlan, ...]
    takers: tuple[TakerPlan, ...]
    faults: tuple[Fault, ...]
    publisher: PublisherPlan | None = None

    @property
    def kind(self) -> Kind:
        """Return the work and the connections of its family."""
        return FAMILIES[self.family]

    def who(self, fault: Fault) -> str:
        """Name the target of a fault."""
        if fault.target is None:
            return "network"
        return ROLES[self.kind.work][fault.target >= SLOTS]

    @property
    def ends_a_taker(self) -> bool:
        """Return whether a receiver, a server or a subscriber is killed or closed."""
        return any(fault.target is not None and fault.target >= SLOTS for fault in self.of(ENDS))

    @property
    def has_partition(self) -> bool:
        """Return whether the network loses packets."""
        return bool(self.of((FaultKind.PARTITION,)))

    def of(self, kinds: Sequence[FaultKind]) -> list[Fault]:
        """Return the planned faults of some kinds."""
        return [fault for fault in self.faults if fault.kind in kinds]

    def has(self, target: int | None, kinds: Sequence[FaultKind]) -> bool:
        """Return whether one of these faults is planned for a process."""
        return any(fault.target == target and fault.kind in kinds for fault in self.faults)


def key_of(number: int, slot: int, part: int, order: int) -> int:
    """Return the pattern of a message's first tensor."""
    return (((number * SLOTS + slot) * PARTS + part) * _ORDERS + order) * MAX_TENSORS
