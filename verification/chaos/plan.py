"""The plan of a round: its messages, the behaviour of its processes, and its faults.

Only a seed and the number of the round determine a plan, so a failed round can be repeated alone. The timing
of its steps depends on the machine.
"""

import enum
import random
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from aiotensor.broadcast import SlowPolicy

SLOTS = 3  # the senders or clients of a family
_SERVERS = 2
_MAX_SUBSCRIBERS = 8
LAST = -1  # the key of a publication that belongs to no order
MAX_TENSORS = 4  # in a message
_PARTS = 2  # of a process, and of its replacement within the round
_ORDERS = 256  # the maximum number of orders in one part

PEER_TIMEOUT_S = 2.0  # of connections over `tcp://`, as the default of the library

# The roles of both sides, by the work.
ROLES = {
    "tensors": ("sender", "receiver"),
    "requests": ("client", "server"),
    "broadcast": ("publisher", "subscriber"),
}


class Kind(NamedTuple):
    """The work of a group of processes, and whether their connections are those between machines.

    Between machines, tensors are copied to memory of the side that receives them, and silence for
    `PEER_TIMEOUT_S` ends a connection.
    """

    work: str
    is_remote: bool


FAMILIES = {
    **{work: Kind(work, is_remote=False) for work in ROLES},
    **{f"tcp {work}": Kind(work, is_remote=True) for work in ROLES},
}
_WEIGHTS = {False: 3, True: 2}  # how often each family has a round, by `is_remote`

_SMALL, _MIDDLE, _LARGE, _HUGE = 10, 10_000, 100_000, 600_000  # elements of 8 bytes
_FRAME = 900  # sent inline; a few dozen of them fill the socket


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
    COLLECT = "garbage collection at every allocation"


RESOURCES = (FaultKind.NO_SPACE, FaultKind.FILE_SIZE, FaultKind.NO_ADDRESSES, FaultKind.NO_DESCRIPTORS)
ENDS = (FaultKind.KILL, FaultKind.KILL_WITH_FORK, FaultKind.CLOSE)

_FAULTS = {
    FaultKind.KILL: 5,
    FaultKind.KILL_WITH_FORK: 1,
    FaultKind.STOP: 5,
    FaultKind.CLOSE: 3,
    FaultKind.NO_ADDRESSES: 1,
    FaultKind.NO_DESCRIPTORS: 1,
    FaultKind.COLLECT: 2,
}
_FAULTS_OF_MEMORY = {FaultKind.NO_SPACE: 3, FaultKind.FILE_SIZE: 2}  # of a process with its own memory

# A stop that heartbeats survive, and one after which the connection is lost, in milliseconds.
_LONG_STOPS = ((200, 500 * PEER_TIMEOUT_S), (1700 * PEER_TIMEOUT_S, 2500 * PEER_TIMEOUT_S))


class Hold(enum.Enum):
    """The use of a taken tensor by its receiver."""

    DROP = "drop it at once"
    KEEP = "keep it for a while"
    CYCLE = "leave it to the garbage collector"


class Fault(msgspec.Struct, frozen=True):
    """A fault of one process.

    Attributes:
        kind: the kind of the fault.
        target: the slot of the sender, client or publisher; receivers, servers and subscribers are counted
            on from `SLOTS`.
        at_ms: the time after the start of the round.
        for_ms: the duration, for faults that have one.
    """

    kind: FaultKind
    target: int
    at_ms: float
    for_ms: float


class Order(msgspec.Struct, frozen=True):
    """One message to send.

    Attributes:
        key: the pattern of its first tensor, a multiple of `MAX_TENSORS`; the next ones count on. No other
            message has it.
        how: send, nowait, post, message, or allocate; for questions: request, inside, idempotent, or one-way;
            for publications: publish, nowait, allocate, or drain.
        counts: the numbers of elements of its tensors.
        is_cancelled: whether its call is cancelled.
        after_ms: the time of the cancellation.
        wish: the requested reaction to a question: answer, echo, raise, or drop.
        answer: the numbers of elements of the tensors in its answer.
        target: the server to ask; None for any.
    """

    key: int
    how: str
    counts: tuple[int, ...]
    is_cancelled: bool = False
    after_ms: float = 0.0
    wish: str = ""
    answer: tuple[int, ...] = ()
    target: int | None = None


class PublisherPlan(msgspec.Struct, frozen=True):
    """The options of the publishers of a round."""

    slow: SlowPolicy
    max_behind: int
    max_held_bytes: int | None
    history: int
    max_wait_s: float | None


class SenderPlan(msgspec.Struct, frozen=True):
    """The messages of one sender, in its process and in the process that replaces it after a kill.

    Attributes:
        permits, keep_warm_s: options of a sender that is opened in this round.
        uvloop: whether a process that is started in this round uses uvloop.
        width: the number of concurrent messages.
        parts: the orders of each process.
        publisher: further options of a publisher.
    """

    permits: int
    keep_warm_s: float
    uvloop: bool
    width: int
    parts: tuple[tuple[Order, ...], ...]
    publisher: PublisherPlan | None = None


class TakerPlan(msgspec.Struct, frozen=True):
    """The behaviour of a receiver, server or subscriber.

    Attributes:
        number: its number among them.
        seed: the seed of its random choices.
        uvloop: whether a process that is started in this round uses uvloop.
        iterators: the number of tasks that iterate over arriving tensors.
        stuck_ms: the time before it takes its first tensor.
        slow_ms: the pause after each tensor.
        hold: the use of each tensor.
        hold_ms: the time for which a tensor is kept.
        serves: whether a server uses `serve`.
        max_waiting: an option of a server that is opened in this round.
    """

    number: int
    seed: int
    uvloop: bool
    iterators: int
    stuck_ms: float
    slow_ms: float
    hold: Hold
    hold_ms: float
    serves: bool
    max_waiting: int


class Round(msgspec.Struct, frozen=True):
    """A round: the messages of all senders, the behaviour of the receivers, and the faults.

    Attributes:
        senders: the senders, the clients or the publisher.
        takers: the receiver, the servers or the subscribers.
    """

    number: int
    family: str
    senders: tuple[SenderPlan, ...]
    takers: tuple[TakerPlan, ...]
    faults: tuple[Fault, ...]

    @property
    def work(self) -> str:
        """Return the work of its family."""
        return FAMILIES[self.family].work

    @property
    def is_remote(self) -> bool:
        """Return whether its connections are those between machines."""
        return FAMILIES[self.family].is_remote

    @property
    def publisher(self) -> PublisherPlan:
        """Return the options of the publisher in a broadcast."""
        options = self.senders[0].publisher
        if options is None:
            raise AssertionError(f"a round of {self.family!r} has no publisher")
        return options

    @property
    def orders(self) -> dict[int, Order]:
        """Return all orders by their keys."""
        return {order.key: order for sender in self.senders for part in sender.parts for order in part}

    @property
    def ends_a_taker(self) -> bool:
        """Return whether a receiver, a server or a subscriber is killed or closed."""
        return any(fault.target >= SLOTS for fault in self.of(ENDS))

    def of(self, kinds: Sequence[FaultKind]) -> list[Fault]:
        """Return the planned faults of some kinds."""
        return [fault for fault in self.faults if fault.kind in kinds]

    def has(self, target: int, kinds: Sequence[FaultKind]) -> bool:
        """Return whether one of these faults is planned for a process."""
        return any(fault.target == target for fault in self.of(kinds))


def plan_round(seed: int, number: int, only: str | None = None) -> Round:
    """Plan one round, of any family or only of one."""
    rng = random.Random(f"{seed}/{number}")
    name = rng.choices(list(FAMILIES), [_WEIGHTS[family.is_remote] for family in FAMILIES.values()])[0]
    name = only or name
    family = FAMILIES[name]
    if family.work == "broadcast":
        return _plan_broadcast(rng, number, name)
    floods = rng.random() < 0.15
    senders = tuple(_plan_sender(rng, number, slot, family.work, floods=floods) for slot in range(SLOTS))
    takers = _plan_takers(rng, _SERVERS if family.work == "requests" else 1, family.work)
    faults = _plan_faults(rng, family, SLOTS, len(takers))
    if floods:  # the sender's socket fills while the receiver is stopped
        faults = (*faults, Fault(FaultKind.STOP, SLOTS, rng.uniform(0, 2), rng.uniform(10, 40)))
    return Round(number, name, senders, takers, faults)


def _plan_sender(rng: random.Random, number: int, slot: int, work: str, *, floods: bool) -> SenderPlan:
    asks = work == "requests"
    parts = []
    for part in range(_PARTS):
        count = rng.randint(0, 10) if part == 0 else rng.randint(1, 3)
        keys = [_key(number, slot, part, index) for index in range(count)]
        orders = [_plan_question(rng, key) if asks else _plan_order(rng, key) for key in keys]
        if floods and part == 0:
            more = range(count, count + rng.randint(30, 60))
            how = "one-way" if asks else "send"
            orders += [Order(_key(number, slot, part, index), how, (_FRAME,)) for index in more]
        parts.append(tuple(orders))
    return SenderPlan(
        permits=rng.choice((1, 2, 8, 64)),
        keep_warm_s=rng.choice((0.005, 0.02, 30.0)),
        uvloop=rng.random() < 0.5,
        width=rng.choice((1, 2, 4, 32)),
        parts=tuple(parts),
    )


def _key(number: int, slot: int, part: int, order: int) -> int:
    """Return the pattern of a message's first tensor."""
    return (((number * SLOTS + slot) * _PARTS + part) * _ORDERS + order) * MAX_TENSORS


def _plan_order(rng: random.Random, key: int) -> Order:
    how = rng.choices(("send", "nowait", "post", "message", "allocate"), (8, 2, 4, 3, 3))[0]
    counts = _plan_counts(rng, rng.randint(1, MAX_TENSORS) if how == "message" else 1)
    # Cancelling the wait for a posted tensor has no effect on it.
    is_cancelled = how not in ("nowait", "post") and rng.random() < 0.13
    return Order(key, how, counts, is_cancelled, _plan_after_ms(rng))


def _plan_question(rng: random.Random, key: int) -> Order:
    return Order(
        key,
        rng.choices(("request", "inside", "idempotent", "one-way"), (10, 4, 2, 4))[0],
        _plan_counts(rng, rng.choice((0, 1, 1, 2, MAX_TENSORS))),
        rng.random() < 0.2,
        _plan_after_ms(rng),
        rng.choices(("answer", "echo", "raise", "drop"), (14, 3, 1, 1))[0],
        _plan_counts(rng, rng.choice((0, 1, 1, 3))),
        rng.choice((None, None, None, *range(_SERVERS))),
    )


def _plan_counts(rng: random.Random, tensors: int) -> tuple[int, ...]:
    sizes = (_SMALL, _MIDDLE, _LARGE, 2 * _LARGE, _HUGE)
    return tuple(rng.choices(sizes, (6, 5, 5, 3, 1))[0] for _ in range(tensors))


def _plan_after_ms(rng: random.Random) -> float:
    return rng.choice((0.0, rng.uniform(0, 1), rng.uniform(0, 10)))


def _plan_takers(rng: random.Random, count: int, work: str) -> tuple[TakerPlan, ...]:
    # Requests are sent to another server, or cancelled, only while their server does not take them.
    not_stuck = 1 if work == "requests" else 6
    return tuple(
        TakerPlan(
            number,
            seed=rng.getrandbits(32),
            uvloop=rng.random() < 0.5,
            iterators=rng.choice((1, 1, 3)),
            stuck_ms=rng.choices((0.0, rng.uniform(5, 60)), (not_stuck, 1))[0],
            slow_ms=rng.choices((0.0, rng.uniform(0.1, 1.5)), (5, 1))[0],
            hold=rng.choice(tuple(Hold)),
            hold_ms=rng.choice((0.0, rng.uniform(0, 30))),
            serves=rng.random() < 0.4,
            max_waiting=rng.choice((1, 4, 256)),
        )
        for number in range(count)
    )


def _plan_faults(rng: random.Random, family: Kind, senders: int, takers: int) -> tuple[Fault, ...]:
    faults: dict[tuple[int, FaultKind], Fault] = {}
    ends: dict[int, FaultKind] = {}
    for _ in range(rng.choices((0, 1, 2, 3, 4), (1, 4, 4, 2, 1))[0]):
        target = rng.choice((rng.randrange(senders), SLOTS + rng.randrange(takers)))
        kind = _plan_kind(rng, family, target)
        if kind in ENDS:
            if target in ends:
                continue  # each process ends at most once in a round
            closes = FaultKind.CLOSE in (kind, *ends.values())
            if family.work == "tensors" and ends and closes and SLOTS in (target, *ends):
                continue  # a sender that is closed does not notice that its receiver ends
            ends[target] = kind
        faults[target, kind] = Fault(kind, target, rng.uniform(0, 20), _plan_for_ms(rng, kind, family))
    return tuple(faults.values())


def _plan_kind(rng: random.Random, family: Kind, target: int) -> FaultKind:
    faults = dict(_FAULTS)
    if family.is_remote or family.work == "requests" or target < SLOTS:
        faults |= _FAULTS_OF_MEMORY
    return rng.choices(list(faults), list(faults.values()))[0]


def _plan_for_ms(rng: random.Random, kind: FaultKind, family: Kind) -> float:
    if kind is FaultKind.STOP and family.is_remote and rng.random() < 0.3:
        return rng.uniform(*rng.choice(_LONG_STOPS))
    return rng.choice((rng.uniform(1, 5), rng.uniform(5, 60)))


def _plan_broadcast(rng: random.Random, number: int, name: str) -> Round:
    subscribers = rng.choices((1, 2, 4, _MAX_SUBSCRIBERS), (3, 4, 3, 2))[0]
    max_behind = rng.choice((1, 2, 4, 16))
    counts = (rng.randint(1, 20), rng.randint(1, 6))
    publisher = SenderPlan(
        permits=0,
        keep_warm_s=rng.choice((0.005, 0.02, 30.0)),
        uvloop=rng.random() < 0.5,
        width=rng.choice((1, 1, 2, 8)),
        parts=tuple(
            tuple(_plan_publication(rng, _key(number, 0, part, i)) for i in range(count))
            for part, count in enumerate(counts)
        ),
        publisher=PublisherPlan(
            slow=rng.choice(("wait", "drop", "disconnect")),
            max_behind=max_behind,
            max_held_bytes=rng.choice((None, None, 1 << 20, 6 << 20)),
            history=rng.choice((0, rng.randrange(max_behind))),
            max_wait_s=rng.choice((None, None, rng.uniform(0.001, 0.05))),
        ),
    )
    takers = _plan_takers(rng, subscribers, "broadcast")
    return Round(number, name, (publisher,), takers, _plan_faults(rng, FAMILIES[name], 1, subscribers))


def _plan_publication(rng: random.Random, key: int) -> Order:
    how = rng.choices(("publish", "nowait", "allocate", "drain"), (8, 2, 3, 2))[0]
    counts = _plan_counts(rng, rng.choice((0, 1, 1, 2, MAX_TENSORS)))
    if how == "allocate":  # leaves memory for the publications of other calls
        counts = tuple(min(count, _MIDDLE) for count in counts)
    return Order(key, how, counts, how != "nowait" and rng.random() < 0.17, _plan_after_ms(rng))
