"""The plan of a round, determined only by a seed and the number of the round.

So a failed round can be repeated alone, with the same plan. The timing of its steps depends on the machine.
"""

import enum
import random
from collections.abc import Sequence

import msgspec

__all__ = [
    "ANSWERED_BY_SENDER",
    "ASKS_BY_SENDER",
    "ELDERS",
    "ENGINES",
    "FAMILIES",
    "MAX_TENSORS",
    "SLOTS",
    "Fault",
    "FaultKind",
    "Hold",
    "Order",
    "Round",
    "SenderPlan",
    "TakerPlan",
    "key_of",
    "plan_round",
]

SLOTS = 3  # the senders of a family
ENGINES = 3  # the servers of each client in the family "engines"
MAX_TENSORS = 4  # in a message
_PARTS = 2  # of a process, and of its replacement within the round
_ORDERS = 256  # the most in one part

# The connection of each family. A queue ends with its receiver; in "messages" the senders are clients of one
# server, and in "network" of several.
FAMILIES = {
    "server": "unix",
    "engine": "unix",
    "queue": "queue",
    "asking": "messages",
    "answering": "messages",
    "engines": "network",
}
_FAMILY_WEIGHTS = (9, 9, 4, 6, 6, 4)

# The process that lives for the whole run, whose memory is measured: a sender's slot, or None.
ELDERS: dict[str, int | None] = {"server": 0, "engine": None, "asking": 0, "answering": None}

# The clients with a sender for their requests, and those with a receiver for their replies.
ASKS_BY_SENDER = (0, 1)
ANSWERED_BY_SENDER = (0, 2)

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
    CLOCK = "the clock jumps"
    FORK = "fork in the middle"
    COLLECT = "garbage collection at every allocation"
    ATTACK = "a flood of connections"
    PARTITION = "packets are lost"


class Hold(enum.Enum):
    """The use of a taken tensor by its receiver."""

    DROP = "drop it at once"
    KEEP = "keep it for a while"
    CYCLE = "leave it to the garbage collector"


class Fault(msgspec.Struct, frozen=True):
    """A fault of one process or of the network.

    Attributes:
        kind: of the fault.
        target: the sender's slot, or None for the receiver. Over a network, engines are counted on from
            `SLOTS`, and None is the network.
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
        how: send, nowait, message, or allocate; for questions: request, inside, or one-way.
        counts: the numbers of elements of its tensors.
        fate: the sender's next action on it: none, discard, cancel, or raise.
        after_ms: the time of that action.
        wish: the requested reaction to a question: answer, raise, or drop.
        answer: the numbers of elements of the tensors in its answer.
        target: the engine to ask; None for any.
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
        slot: of the sender.
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
    """The behaviour of a receiver.

    Attributes:
        seed: of its random choices.
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


class Round(msgspec.Struct, frozen=True):
    """A round: the messages of all senders, the behaviour of the receivers, and the faults.

    Attributes:
        taker: the receiver, or the first of several engines.
        other_takers: the other engines.
    """

    number: int
    family: str
    senders: tuple[SenderPlan, ...]
    taker: TakerPlan
    faults: tuple[Fault, ...]
    other_takers: tuple[TakerPlan, ...] = ()

    @property
    def takers(self) -> tuple[TakerPlan, ...]:
        """Return the plans of all receivers, or engines."""
        return (self.taker, *self.other_takers)

    def who(self, fault: Fault) -> str:
        """Name the target of a fault."""
        if FAMILIES[self.family] == "network":
            return "network" if fault.target is None else "client" if fault.target < SLOTS else "engine"
        return "receiver" if fault.target is None else "sender"

    @property
    def ends_the_receiver(self) -> bool:
        """Return whether the receiver is killed or closed."""
        return any(fault.target is None and fault.kind in _ENDS for fault in self.faults)

    def has(self, target: int | None, kinds: Sequence[FaultKind]) -> bool:
        """Return whether one of these faults is planned for a process."""
        return any(fault.target == target and fault.kind in kinds for fault in self.faults)


_ENDS = (FaultKind.KILL, FaultKind.KILL_WITH_FORK, FaultKind.CLOSE)
_SENDER_FAULTS = {
    FaultKind.KILL: 4,
    FaultKind.KILL_WITH_FORK: 1,
    FaultKind.STOP: 4,
    FaultKind.CLOSE: 3,
    FaultKind.NO_SPACE: 3,
    FaultKind.FILE_SIZE: 2,
    FaultKind.NO_ADDRESSES: 2,
    FaultKind.NO_DESCRIPTORS: 2,
    FaultKind.CLOCK: 2,
    FaultKind.FORK: 2,
    FaultKind.COLLECT: 2,
}
_RECEIVER_FAULTS = {
    FaultKind.KILL: 4,
    FaultKind.KILL_WITH_FORK: 1,
    FaultKind.STOP: 5,
    FaultKind.CLOSE: 2,
    FaultKind.NO_ADDRESSES: 1,
    FaultKind.NO_DESCRIPTORS: 1,
    FaultKind.CLOCK: 2,
    FaultKind.FORK: 2,
    FaultKind.COLLECT: 2,
}
_CLIENT_FAULTS = {
    FaultKind.KILL: 4,
    FaultKind.STOP: 4,
    FaultKind.CLOSE: 3,
    FaultKind.CLOCK: 2,
    FaultKind.FORK: 1,
    FaultKind.COLLECT: 1,
}
_ENGINE_FAULTS = {
    FaultKind.KILL: 5,
    FaultKind.STOP: 4,
    FaultKind.CLOSE: 3,
    FaultKind.ATTACK: 3,
    FaultKind.CLOCK: 2,
    FaultKind.FORK: 1,
    FaultKind.COLLECT: 1,
}
_ATTACKS = ("hang up", "greet", "say nothing")
_DIRECTIONS = ("both", "both", "to engines", "to clients")


def key_of(number: int, slot: int, part: int, order: int) -> int:
    """Return the pattern of a message's first tensor."""
    return (((number * SLOTS + slot) * _PARTS + part) * _ORDERS + order) * MAX_TENSORS


def plan_round(seed: int, number: int, only: str | None = None) -> Round:
    """Plan one round, of any family or only of one."""
    rng = random.Random(f"{seed}/{number}")
    family = rng.choices(list(FAMILIES), _FAMILY_WEIGHTS)[0]
    family = only or family
    floods = rng.random() < 0.15
    senders = tuple(_plan_sender(rng, number, slot, family, floods=floods) for slot in range(SLOTS))
    if FAMILIES[family] == "network":
        takers = [_plan_taker(rng) for _ in range(ENGINES)]
        return Round(number, family, senders, takers[0], _plan_faults_of_network(rng), tuple(takers[1:]))
    faults = _plan_faults(rng, family)
    if floods:  # the sender's socket fills while the receiver is stopped
        faults = (*faults, Fault(FaultKind.STOP, None, rng.uniform(0, 2), rng.uniform(10, 40)))
    return Round(number, family, senders, _plan_taker(rng), faults)


def _plan_sender(rng: random.Random, number: int, slot: int, family: str, *, floods: bool) -> SenderPlan:
    asks = FAMILIES[family] in ("messages", "network")
    plan_one = _plan_question if asks else _plan_order
    parts = []
    for part in range(_PARTS):
        count = rng.randint(0, 10) if part == 0 else rng.randint(1, 3)
        orders = [plan_one(rng, key_of(number, slot, part, index)) for index in range(count)]
        if FAMILIES[family] == "network":
            targets = (None, None, None, *range(ENGINES))
            orders = [msgspec.structs.replace(order, target=rng.choice(targets)) for order in orders]
        if floods and part == 0:
            first = len(orders)
            orders += [
                Order(
                    key_of(number, slot, part, first + index),
                    "one-way" if asks else "send",
                    (_FRAME,),
                    "",
                    0.0,
                )
                for index in range(rng.randint(30, 60))
            ]
        parts.append(tuple(orders))
    return SenderPlan(
        slot,
        permits=rng.choice((1, 2, 8, 64)),
        keep_warm_s=rng.choice((0.005, 0.02, 30.0)),
        uvloop=rng.random() < 0.5,
        width=rng.choice((1, 2, 4, 32)),
        parts=tuple(parts),
    )


def _plan_order(rng: random.Random, key: int) -> Order:
    how = rng.choices(("send", "nowait", "message", "allocate"), (8, 2, 3, 3))[0]
    tensors = rng.randint(1, MAX_TENSORS) if how == "message" else 1
    counts = _plan_counts(rng, tensors)
    fates = ("", "discard", "cancel") if how != "nowait" else ("", "discard")
    fate = rng.choices(fates, (12, 1, 2)[: len(fates)])[0]
    if how == "message" and rng.random() < 0.1:
        fate = "raise"
    return Order(key, how, counts, fate, _plan_after_ms(rng))


def _plan_question(rng: random.Random, key: int) -> Order:
    return Order(
        key,
        rng.choices(("request", "inside", "one-way"), (10, 3, 4))[0],
        _plan_counts(rng, rng.choice((0, 1, 1, 2, MAX_TENSORS))),
        rng.choices(("", "cancel"), (5, 1))[0],
        _plan_after_ms(rng),
        rng.choices(("answer", "raise", "drop"), (16, 1, 1))[0],
        _plan_counts(rng, rng.choice((0, 1, 1, 3))),
    )


def _plan_counts(rng: random.Random, tensors: int) -> tuple[int, ...]:
    sizes = (_SMALL, _MIDDLE, _LARGE, 2 * _LARGE, _HUGE)
    return tuple(rng.choices(sizes, (6, 5, 5, 3, 1))[0] for _ in range(tensors))


def _plan_after_ms(rng: random.Random) -> float:
    return rng.choice((0.0, rng.uniform(0, 1), rng.uniform(0, 10)))


def _plan_taker(rng: random.Random) -> TakerPlan:
    return TakerPlan(
        seed=rng.getrandbits(32),
        uvloop=rng.random() < 0.5,
        iterators=rng.choice((1, 1, 3)),
        by_handle=tuple(index for index in range(12) if rng.random() < 0.25),
        discards=tuple(index for index in range(12) if rng.random() < 0.03),
        stuck_ms=rng.choices((0.0, rng.uniform(5, 40)), (6, 1))[0],
        slow_ms=rng.choices((0.0, rng.uniform(0.1, 1.5)), (5, 1))[0],
        hold=rng.choice(tuple(Hold)),
        hold_ms=rng.choice((0.0, rng.uniform(0, 30))),
        copies=rng.choice((0.0, 0.0, 0.3)),
        serves=rng.random() < 0.4,
        max_waiting=rng.choice((1, 4, 256)),
    )


def _plan_faults(rng: random.Random, family: str) -> tuple[Fault, ...]:
    faults: list[Fault] = []
    ends: set[int | None] = set()
    for _ in range(rng.choices((0, 1, 2, 3), (1, 4, 4, 2))[0]):
        target = rng.choice((None, None, *range(SLOTS)))
        weights = _RECEIVER_FAULTS if target is None else _SENDER_FAULTS
        kind = rng.choices(list(weights), list(weights.values()))[0]
        if any(fault.kind is kind and fault.target == target for fault in faults):
            continue  # the second would end with the first, or never
        if kind in _ENDS:
            if target == ELDERS.get(family, -1) or target in ends:
                continue  # each process ends at most once in a round, and the elder never
            closes = kind is FaultKind.CLOSE or any(fault.kind is FaultKind.CLOSE for fault in faults)
            if closes and (target is None or None in ends) and ends:
                continue  # a sender that is closed does not notice that its receiver ends
            ends.add(target)
        for_ms = rng.choice((rng.uniform(1, 5), rng.uniform(5, 60)))
        faults.append(Fault(kind, target, rng.uniform(0, 12), for_ms))
    if ends and FAMILIES[family] == "messages":
        # ZeroMQ ends the process of a server that has no descriptor for a new connection.
        starved = (FaultKind.NO_DESCRIPTORS, None)
        faults = [fault for fault in faults if (fault.kind, fault.target) != starved]
    return tuple(faults)


def _plan_faults_of_network(rng: random.Random) -> tuple[Fault, ...]:
    faults: dict[tuple[int | None, FaultKind], Fault] = {}
    ends: set[int] = set()
    for _ in range(rng.choices((0, 1, 2, 3, 4), (1, 4, 4, 2, 1))[0]):
        target = rng.randrange(SLOTS + ENGINES)
        weights = _CLIENT_FAULTS if target < SLOTS else _ENGINE_FAULTS
        kind = rng.choices(list(weights), list(weights.values()))[0]
        if kind in _ENDS and target in ends:
            continue  # each process ends at most once in a round
        ends |= {target} if kind in _ENDS else set()
        for_ms, how = rng.uniform(1, 60), ""
        if kind is FaultKind.STOP and rng.random() < 0.15:
            for_ms = rng.uniform(700, 1500)  # longer than heartbeats allow
        if kind is FaultKind.ATTACK:
            for_ms, how = rng.uniform(30, 400), rng.choice(_ATTACKS)
        faults[target, kind] = Fault(kind, target, rng.uniform(0, 12), for_ms, how)
    if rng.random() < 0.2:  # it takes long
        longest_ms = rng.choice((300, 300, 1000, 3000))
        partition = FaultKind.PARTITION
        faults[None, partition] = Fault(
            partition, None, rng.uniform(0, 20), rng.uniform(50, longest_ms), rng.choice(_DIRECTIONS)
        )
    return tuple(faults.values())
