"""The planning of rounds. A plan is determined only by a seed and the number of the round.

So a failed round can be repeated alone, with the same plan. The timing of its steps depends on the machine.
"""

import random

import msgspec

from verification.chaos.plan import (
    ELDERS,
    ENDS,
    ENGINES,
    FAMILIES,
    MAX_SUBSCRIBERS,
    MAX_TENSORS,
    PARTS,
    PEER_TIMEOUT_S,
    SLOTS,
    Fault,
    FaultKind,
    Hold,
    Order,
    PublisherPlan,
    Round,
    SenderPlan,
    TakerPlan,
    key_of,
)

__all__ = ["plan_round"]

_FAMILY_WEIGHTS = (9, 9, 6, 6, 4, 5, 5, 4, 4, 4, 3, 3)

_SMALL, _MIDDLE, _LARGE, _HUGE = 10, 10_000, 100_000, 600_000  # elements of 8 bytes
_FRAME = 900  # sent inline; a few dozen of them fill the socket

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
_LANDING_FAULTS = {FaultKind.NO_SPACE: 2, FaultKind.FILE_SIZE: 1}  # of a receiver with its own memory
_PUBLISHER_FAULTS = {
    FaultKind.KILL: 4,
    FaultKind.KILL_WITH_FORK: 1,
    FaultKind.STOP: 3,
    FaultKind.CLOSE: 4,
    FaultKind.NO_SPACE: 2,
    FaultKind.FILE_SIZE: 1,
    FaultKind.NO_ADDRESSES: 1,
    FaultKind.NO_DESCRIPTORS: 1,
    FaultKind.CLOCK: 1,
    FaultKind.FORK: 1,
    FaultKind.COLLECT: 1,
}
_SUBSCRIBER_FAULTS = {
    FaultKind.KILL: 6,
    FaultKind.KILL_WITH_FORK: 1,
    FaultKind.STOP: 6,
    FaultKind.CLOSE: 4,
    FaultKind.NO_ADDRESSES: 1,
    FaultKind.NO_DESCRIPTORS: 1,
    FaultKind.CLOCK: 1,
    FaultKind.FORK: 1,
    FaultKind.COLLECT: 1,
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
_DIRECTIONS = ("both", "both", "to the listening side", "to the connecting side")

# A stop that heartbeats survive, and one after which the connection is lost, in milliseconds.
_LONG_STOPS = ((200, 500 * PEER_TIMEOUT_S), (1700 * PEER_TIMEOUT_S, 2500 * PEER_TIMEOUT_S))


def plan_round(seed: int, number: int, only: str | None = None) -> Round:
    """Plan one round, of any family or only of one."""
    rng = random.Random(f"{seed}/{number}")
    family = rng.choices(list(FAMILIES), _FAMILY_WEIGHTS)[0]
    family = only or family
    if FAMILIES[family].work == "broadcast":
        return _plan_broadcast(rng, number, family)
    floods = rng.random() < 0.15
    senders = tuple(_plan_sender(rng, number, slot, family, floods=floods) for slot in range(SLOTS))
    if FAMILIES[family].work == "engines":
        takers = [_plan_taker(rng) for _ in range(ENGINES)]
        return Round(number, family, senders, takers[0], _plan_faults_of_network(rng), tuple(takers[1:]))
    faults = _plan_faults(rng, family)
    if floods:  # the sender's socket fills while the receiver is stopped
        faults = (*faults, Fault(FaultKind.STOP, None, rng.uniform(0, 2), rng.uniform(10, 40)))
    return Round(number, family, senders, _plan_taker(rng), faults)


def _plan_sender(rng: random.Random, number: int, slot: int, family: str, *, floods: bool) -> SenderPlan:
    asks = FAMILIES[family].work in ("questions", "engines")
    plan_one = _plan_question if asks else _plan_order
    parts = []
    for part in range(PARTS):
        count = rng.randint(0, 10) if part == 0 else rng.randint(1, 3)
        orders = [plan_one(rng, key_of(number, slot, part, index)) for index in range(count)]
        if FAMILIES[family].work == "engines":
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
    how = rng.choices(("send", "nowait", "post", "message", "allocate"), (8, 2, 4, 3, 3))[0]
    tensors = rng.randint(1, MAX_TENSORS) if how == "message" else 1
    counts = _plan_counts(rng, tensors)
    # Cancelling the wait for a posted tensor has no effect on it.
    fates = ("", "discard", "cancel") if how not in ("nowait", "post") else ("", "discard")
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
        weights = _SENDER_FAULTS if target is not None else _receiver_faults(_RECEIVER_FAULTS, family)
        kind = rng.choices(list(weights), list(weights.values()))[0]
        if any(fault.kind is kind and fault.target == target for fault in faults):
            continue  # the second would end with the first, or never
        if kind in ENDS:
            if target == ELDERS.get(family, -1) or target in ends:
                continue  # each process ends at most once in a round, and the elder never
            closes = kind is FaultKind.CLOSE or any(fault.kind is FaultKind.CLOSE for fault in faults)
            if closes and (target is None or None in ends) and ends:
                continue  # a sender that is closed does not notice that its receiver ends
            ends.add(target)
        faults.append(Fault(kind, target, rng.uniform(0, 12), _plan_for_ms(rng, kind, family)))
    if FAMILIES[family].has_timeout and rng.random() < 0.2:
        faults.append(_plan_partition(rng))
    if ends and FAMILIES[family].work == "questions":
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
        if kind in ENDS and target in ends:
            continue  # each process ends at most once in a round
        ends |= {target} if kind in ENDS else set()
        for_ms, how = rng.uniform(1, 60), ""
        if kind is FaultKind.STOP and rng.random() < 0.15:
            for_ms = rng.uniform(700, 1500)  # longer than heartbeats allow
        if kind is FaultKind.ATTACK:
            for_ms, how = rng.uniform(30, 400), rng.choice(_ATTACKS)
        faults[target, kind] = Fault(kind, target, rng.uniform(0, 12), for_ms, how)
    if rng.random() < 0.2:  # it takes long
        faults[None, FaultKind.PARTITION] = _plan_partition(rng)
    return tuple(faults.values())


def _plan_partition(rng: random.Random) -> Fault:
    longest_ms = rng.choice((300, 300, 1000, 3000))
    return Fault(
        FaultKind.PARTITION, None, rng.uniform(0, 20), rng.uniform(50, longest_ms), rng.choice(_DIRECTIONS)
    )


def _receiver_faults(usual: dict[FaultKind, int], family: str) -> dict[FaultKind, int]:
    return {**usual, **_LANDING_FAULTS} if FAMILIES[family].lands else usual


def _plan_for_ms(rng: random.Random, kind: FaultKind, family: str) -> float:
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
    taker, *others = (_plan_taker(rng) for _ in range(subscribers))
    faults = _plan_faults_of_broadcast(rng, family, subscribers)
    return Round(number, family, (publisher,), taker, faults, tuple(others), options)


def _plan_publication(rng: random.Random, key: int) -> Order:
    how = rng.choices(("publish", "nowait", "allocate", "drain"), (8, 2, 3, 2))[0]
    counts = _plan_counts(rng, rng.choice((0, 1, 1, 2, MAX_TENSORS)))
    if how == "allocate":  # leaves memory for the publications of other calls
        counts = tuple(min(count, _MIDDLE) for count in counts)
    fate = rng.choices(("", "cancel"), (5, 1))[0] if how != "nowait" else ""
    return Order(key, how, counts, fate, _plan_after_ms(rng))


def _plan_faults_of_broadcast(rng: random.Random, family: str, subscribers: int) -> tuple[Fault, ...]:
    faults: dict[tuple[int | None, FaultKind], Fault] = {}
    ends: set[int] = set()
    for _ in range(rng.choices((0, 1, 2, 3, 4), (1, 4, 4, 2, 1))[0]):
        target = rng.choice((0, *(SLOTS + rng.randrange(subscribers) for _ in range(2))))
        weights = _receiver_faults(_SUBSCRIBER_FAULTS, family) if target else _PUBLISHER_FAULTS
        kind = rng.choices(list(weights), list(weights.values()))[0]
        if kind in ENDS:
            if target in ends or (kind is not FaultKind.CLOSE and target == ELDERS.get(family, -1)):
                continue  # each process ends at most once in a round, and the elder is only closed
            ends.add(target)
        faults[target, kind] = Fault(kind, target, rng.uniform(0, 25), _plan_for_ms(rng, kind, family))
    if FAMILIES[family].has_timeout and rng.random() < 0.2:
        faults[None, FaultKind.PARTITION] = _plan_partition(rng)
    return tuple(faults.values())
