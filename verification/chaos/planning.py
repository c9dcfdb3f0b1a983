"""The planning of rounds. A plan is determined only by a seed and the number of the round.

So a failed round can be repeated alone, with the same plan. The timing of its steps depends on the machine.
"""

import random

from verification.chaos.plan import (
    ELDERS,
    ENDS,
    FAMILIES,
    MAX_SUBSCRIBERS,
    MAX_TENSORS,
    PARTS,
    PEER_TIMEOUT_S,
    SLOTS,
    Fault,
    FaultKind,
    Hold,
    Kind,
    Order,
    PublisherPlan,
    Round,
    SenderPlan,
    TakerPlan,
    key_of,
)

__all__ = ["plan_round"]

# How often each family has a round.
_WEIGHTS = {"unix": 6, "tcp": 4, "hosts": 3}

_SMALL, _MIDDLE, _LARGE, _HUGE = 10, 10_000, 100_000, 600_000  # elements of 8 bytes
_FRAME = 900  # sent inline; a few dozen of them fill the socket

_FAULTS = {
    FaultKind.KILL: 5,
    FaultKind.KILL_WITH_FORK: 1,
    FaultKind.STOP: 5,
    FaultKind.CLOSE: 3,
    FaultKind.NO_ADDRESSES: 1,
    FaultKind.NO_DESCRIPTORS: 1,
    FaultKind.CLOCK: 2,
    FaultKind.FORK: 2,
    FaultKind.COLLECT: 2,
}
_FAULTS_OF_MEMORY = {FaultKind.NO_SPACE: 3, FaultKind.FILE_SIZE: 2}  # of a process with its own memory
_ATTACKS = ("hang up", "greet", "say nothing")
_DIRECTIONS = ("both", "both", "to the listening side", "to the connecting side")

# A stop that heartbeats survive, and one after which the connection is lost, in milliseconds.
_LONG_STOPS = ((200, 500 * PEER_TIMEOUT_S), (1700 * PEER_TIMEOUT_S, 2500 * PEER_TIMEOUT_S))


def plan_round(seed: int, number: int, only: str | None = None) -> Round:
    """Plan one round, of any family or only of one."""
    rng = random.Random(f"{seed}/{number}")
    family = rng.choices(list(FAMILIES), [_WEIGHTS[kind.link] for kind in FAMILIES.values()])[0]
    family = only or family
    kind = FAMILIES[family]
    if kind.work == "broadcast":
        return _plan_broadcast(rng, number, family)
    floods = rng.random() < 0.15
    senders = tuple(_plan_sender(rng, number, slot, kind, floods=floods) for slot in range(SLOTS))
    takers = tuple(_plan_taker(rng, index, kind.work) for index in range(kind.listeners))
    if kind.work == "tensors":
        faults = _plan_faults_of_tensors(rng, family)
    else:
        faults = _plan_faults(rng, family, SLOTS, kind.listeners)
    if floods:  # the sender's socket fills while the receiver is stopped
        faults = (*faults, Fault(FaultKind.STOP, SLOTS, rng.uniform(0, 2), rng.uniform(10, 40)))
    return Round(number, family, senders, takers, faults)


def _plan_sender(rng: random.Random, number: int, slot: int, kind: Kind, *, floods: bool) -> SenderPlan:
    asks = kind.work == "requests"
    parts = []
    for part in range(PARTS):
        count = rng.randint(0, 10) if part == 0 else rng.randint(1, 3)
        keys = [key_of(number, slot, part, index) for index in range(count)]
        orders = [_plan_question(rng, key, kind.listeners) if asks else _plan_order(rng, key) for key in keys]
        if floods and part == 0:
            how = "one-way" if asks else "send"
            more = range(count, count + rng.randint(30, 60))
            orders += [Order(key_of(number, slot, part, index), how, (_FRAME,), "", 0.0) for index in more]
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
    how = rng.choices(("send", "nowait", "post", "message", "allocate"), (8, 2, 4, 3, 3))[0]
    tensors = rng.randint(1, MAX_TENSORS) if how == "message" else 1
    counts = _plan_counts(rng, tensors)
    # Cancelling the wait for a posted tensor has no effect on it.
    fates = ("", "discard", "cancel") if how not in ("nowait", "post") else ("", "discard")
    fate = rng.choices(fates, (12, 1, 2)[: len(fates)])[0]
    if how == "message" and rng.random() < 0.1:
        fate = "raise"
    return Order(key, how, counts, fate, _plan_after_ms(rng))


def _plan_question(rng: random.Random, key: int, servers: int) -> Order:
    return Order(
        key,
        rng.choices(("request", "inside", "idempotent", "one-way"), (10, 4, 2, 4))[0],
        _plan_counts(rng, rng.choice((0, 1, 1, 2, MAX_TENSORS))),
        rng.choices(("", "cancel"), (4, 1))[0],
        _plan_after_ms(rng),
        rng.choices(("answer", "echo", "raise", "drop"), (14, 3, 1, 1))[0],
        _plan_counts(rng, rng.choice((0, 1, 1, 3))),
        rng.choice((None, None, None, *range(servers))),
    )


def _plan_counts(rng: random.Random, tensors: int) -> tuple[int, ...]:
    sizes = (_SMALL, _MIDDLE, _LARGE, 2 * _LARGE, _HUGE)
    return tuple(rng.choices(sizes, (6, 5, 5, 3, 1))[0] for _ in range(tensors))


def _plan_after_ms(rng: random.Random) -> float:
    return rng.choice((0.0, rng.uniform(0, 1), rng.uniform(0, 10)))


def _plan_taker(rng: random.Random, number: int, work: str) -> TakerPlan:
    # Requests are sent to another server, or cancelled, only while their server does not take them.
    not_stuck = 1 if work == "requests" else 6
    return TakerPlan(
        number,
        seed=rng.getrandbits(32),
        uvloop=rng.random() < 0.5,
        iterators=rng.choice((1, 1, 3)),
        by_handle=tuple(index for index in range(12) if rng.random() < 0.25),
        discards=tuple(index for index in range(12) if rng.random() < 0.03),
        stuck_ms=rng.choices((0.0, rng.uniform(5, 60)), (not_stuck, 1))[0],
        slow_ms=rng.choices((0.0, rng.uniform(0.1, 1.5)), (5, 1))[0],
        hold=rng.choice(tuple(Hold)),
        hold_ms=rng.choice((0.0, rng.uniform(0, 30))),
        copies=rng.choice((0.0, 0.0, 0.3)),
        serves=rng.random() < 0.4,
        max_waiting=rng.choice((1, 4, 256)),
    )


def _plan_faults_of_tensors(rng: random.Random, family: str) -> tuple[Fault, ...]:
    faults: list[Fault] = []
    ends: set[int] = set()
    for _ in range(rng.choices((0, 1, 2, 3), (1, 4, 4, 2))[0]):
        target = rng.choice((SLOTS, SLOTS, *range(SLOTS)))
        kind = _plan_kind(rng, family, target)
        if any(fault.kind is kind and fault.target == target for fault in faults):
            continue  # the second would end with the first, or never
        if kind in ENDS:
            if target == ELDERS.get(family) or target in ends:
                continue  # each process ends at most once in a round, and the elder never
            closes = kind is FaultKind.CLOSE or any(fault.kind is FaultKind.CLOSE for fault in faults)
            if closes and (target == SLOTS or SLOTS in ends) and ends:
                continue  # a sender that is closed does not notice that its receiver ends
            ends.add(target)
        faults.append(Fault(kind, target, rng.uniform(0, 12), _plan_for_ms(rng, kind, family)))
    return (*faults, *_plan_partition(rng, family))


def _plan_faults(rng: random.Random, family: str, senders: int, takers: int) -> tuple[Fault, ...]:
    faults: dict[tuple[int, FaultKind], Fault] = {}
    ends: set[int] = set()
    for _ in range(rng.choices((0, 1, 2, 3, 4), (1, 4, 4, 2, 1))[0]):
        target = rng.choice((rng.randrange(senders), SLOTS + rng.randrange(takers)))
        kind = _plan_kind(rng, family, target)
        if kind in ENDS:
            if target in ends or (kind is not FaultKind.CLOSE and target == ELDERS.get(family)):
                continue  # each process ends at most once in a round, and the elder is only closed
            ends.add(target)
        how = rng.choice(_ATTACKS) if kind is FaultKind.ATTACK else ""
        for_ms = _plan_for_ms(rng, kind, family)
        faults[target, kind] = Fault(kind, target, rng.uniform(0, 20), for_ms, how)
    return (*faults.values(), *_plan_partition(rng, family))


def _plan_kind(rng: random.Random, family: str, target: int) -> FaultKind:
    kind, faults = FAMILIES[family], dict(_FAULTS)
    if kind.lands or kind.work == "requests" or target < SLOTS:
        faults |= _FAULTS_OF_MEMORY
    if kind == Kind("requests", "hosts", kind.listeners) and target >= SLOTS:
        faults[FaultKind.ATTACK] = 4
    return rng.choices(list(faults), list(faults.values()))[0]


def _plan_partition(rng: random.Random, family: str) -> tuple[Fault, ...]:
    if not FAMILIES[family].has_timeout or rng.random() > 0.2:
        return ()
    longest_ms, how = rng.choice((300, 300, 1000, 3000)), rng.choice(_DIRECTIONS)
    return (Fault(FaultKind.PARTITION, None, rng.uniform(0, 20), rng.uniform(50, longest_ms), how),)


def _plan_for_ms(rng: random.Random, kind: FaultKind, family: str) -> float:
    if kind is FaultKind.ATTACK:
        return rng.uniform(30, 400)
    if kind is FaultKind.STOP and FAMILIES[family].has_timeout and rng.random() < 0.3:
        return rng.uniform(*rng.choice(_LONG_STOPS))
    return rng.choice((rng.uniform(1, 5), rng.uniform(5, 60)))


def _plan_broadcast(rng: random.Random, number: int, family: str) -> Round:
    subscribers = rng.choices((1, 2, 4, MAX_SUBSCRIBERS), (3, 4, 3, 2))[0]
    max_behind = rng.choice((1, 2, 4, 16))
    parts = []
    for part in range(PARTS):
        count = rng.randint(1, 20) if part == 0 else rng.randint(1, 6)
        parts.append(tuple(_plan_publication(rng, key_of(number, 0, part, i)) for i in range(count)))
    publisher = SenderPlan(
        0,
        permits=0,
        keep_warm_s=rng.choice((0.005, 0.02, 30.0)),
        uvloop=rng.random() < 0.5,
        width=rng.choice((1, 1, 2, 8)),
        parts=tuple(parts),
    )
    options = PublisherPlan(
        slow=rng.choice(("wait", "drop", "disconnect")),
        max_behind=max_behind,
        max_held_bytes=rng.choice((None, None, 1 << 20, 6 << 20)),
        history=rng.choice((0, rng.randrange(max_behind))),
        max_wait_s=rng.choice((None, None, rng.uniform(0.001, 0.05))),
    )
    takers = tuple(_plan_taker(rng, index, "broadcast") for index in range(subscribers))
    return Round(number, family, (publisher,), takers, _plan_faults(rng, family, 1, subscribers), options)


def _plan_publication(rng: random.Random, key: int) -> Order:
    how = rng.choices(("publish", "nowait", "allocate", "drain"), (8, 2, 3, 2))[0]
    counts = _plan_counts(rng, rng.choice((0, 1, 1, 2, MAX_TENSORS)))
    if how == "allocate":  # leaves memory for the publications of other calls
        counts = tuple(min(count, _MIDDLE) for count in counts)
    fate = rng.choices(("", "cancel"), (5, 1))[0] if how != "nowait" else ""
    return Order(key, how, counts, fate, _plan_after_ms(rng))
