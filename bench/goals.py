"""The goals of the design, and whether a run has reached them. Without I/O.

Both sides of a comparison come from the same round of the same run. The median of the rounds decides.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from bench.records import Result, Verdict

_KIB, _MIB = 1 << 10, 1 << 20
_SMALL, _LARGE = 4 * _KIB, 150 * _MIB


class Reading(NamedTuple):
    """One number that a run has measured."""

    workload: str
    contender: str
    size_bytes: int
    number: str = "median_s"
    peers: int = 1


class _Kind(NamedTuple):
    words: str
    unit: Literal["x", "s", "%"]
    at: Literal["least", "most"]
    inverted: bool  # whether the quotient is theirs by ours


_KINDS = {
    "faster": _Kind("at least {:g}x faster", "x", "least", inverted=True),
    "speed": _Kind("at least {:g}x the speed", "x", "least", inverted=True),
    "time": _Kind("at most {:g}x its time", "x", "most", inverted=False),
    "rate": _Kind("at least {:g}x the rate", "x", "least", inverted=False),
    "amount": _Kind("at most {:g}x as much", "x", "most", inverted=False),
    "late": _Kind("a 1 ms ticker at most 5 ms later at p99.9", "s", "most", inverted=False),
    "cpu": _Kind("0.0 % CPU", "%", "most", inverted=False),
}


class Goal(NamedTuple):
    """A row of the table.

    Attributes:
        work: the measured work.
        against: the reference of the comparison; empty if there is none.
        kind: how the two numbers are compared.
        bound: the bound; None for a number that is only shown beside a goal.
        ours: the measured number.
        theirs: the number of the reference; None if there is none.
    """

    work: str
    against: str
    kind: str
    bound: float | None
    ours: Reading
    theirs: Reading | None = None


_NAMES = {
    "torch-queue": "torch.multiprocessing.Queue",
    "torch-queue-handles": "torch.multiprocessing.Queue with handles",
    "zmq-ipc": "bare ZeroMQ over `ipc://`, a blocking PAIR",
    "zmq-tcp": "bare ZeroMQ over TCP, a blocking PAIR",
    "zmq-request": "plain pyzmq, `copy=False`",
    "zmq-xpub": "ZeroMQ XPUB, pickle 5, out of band",
    "zmq-pickle-videos": "pickle 5 over ZeroMQ, out of band",
    "gloo": "gloo",
    "raw-socket": "raw Unix socket echo, blocking",
    "raw-socket-loop": "echo of msgspec frames over a Unix socket, in callbacks of the event loop",
    "tcp-socket": "TCP socket, blocking, into warm memory",
    "memcpy": "memcpy into warm memory, 2 threads, as `unix://` copies",
}


def _versus(kind: str, bound: float | None, work: str, ours: Reading, them: str) -> Goal:
    return Goal(work, _NAMES[them], kind, bound, ours, ours._replace(contender=them))


def _late(role: str, workload: str, contender: str, number: str, peers: int = 1) -> Goal:
    reading = Reading(workload, contender, _LARGE, number, peers)
    return Goal(f"event loop of a {role}", "the same loop, idle", "late", 0.005, reading)


def _trip(size: int, contender: str = "aiotensor-unix") -> Reading:
    return Reading("round-trip", contender, size)


def _published(size: int, readers: int) -> Reading:
    return Reading("broadcast", "aiotensor-publisher", size, peers=readers)


def _by_sizes(work: str, workload: str, contender: str) -> list[Goal]:
    named = [("4 KiB", _SMALL), ("64 KiB", 64 * _KIB), ("1 MiB", _MIB), ("16 MiB", 16 * _MIB)]
    return [
        _versus("faster", 1, f"{name} {work}", Reading(workload, contender, size), "gloo")
        for name, size in (*named, ("150 MiB", _LARGE))
    ]


_SERVED = (
    ("requests a second", "rate", "requests_per_s"),
    ("latency at p99", "amount", "p99_s"),
    ("CPU time", "amount", "cpu_s_per_request"),
    ("peak memory", "amount", "peak_bytes"),
    ("lateness of the event loop at p99.9", "amount", "late_p999_s"),
)
_IDLE = 0.05  # percent; this number and lower ones are shown as 0.0 %
_ALLOCATED = Reading("allocated", "aiotensor-unix", _LARGE)
_CHAIN = Reading("chain", "aiotensor-chain", _LARGE, peers=2)
_REQUEST = Reading("request-echo", "aiotensor-channel", _SMALL)

GOALS: tuple[Goal, ...] = (
    _versus("faster", 6, "4 KiB round trip, `unix://`", _trip(_SMALL), "torch-queue"),
    _versus("time", 0.7, "4 KiB round trip, `unix://`", _trip(_SMALL), "zmq-ipc"),
    _versus("time", 2, "4 KiB round trip, `unix://`", _trip(_SMALL), "raw-socket-loop"),
    _versus("time", 1.7, "4 KiB round trip, `unix://`", _trip(_SMALL), "raw-socket"),
    _versus("faster", 6, "16 MiB, copied", _trip(16 * _MIB), "torch-queue"),
    _versus("faster", 6, "150 MiB, copied", _trip(_LARGE), "torch-queue"),
    _versus("time", 1.25, "150 MiB, copied", _trip(_LARGE), "memcpy"),
    Goal("150 MiB from `allocate()`", "our own 4 KiB round trip", "time", 1.5, _ALLOCATED, _trip(_SMALL)),
    Goal(
        "150 MiB, sent on by two further processes",
        "4 KiB, sent on by them",
        *("time", 1.5, _CHAIN, _CHAIN._replace(size_bytes=_SMALL)),
    ),
    _versus(
        *("rate", 40, "4 KiB, 64 in flight"),
        Reading("pipelined", "aiotensor-unix", _SMALL, "tensors_per_s"),
        "torch-queue",
    ),
    _versus("speed", 0.85, "150 MiB, `tcp://` on the loopback", _trip(_LARGE, "aiotensor-tcp"), "tcp-socket"),
    Goal(
        "150 MiB, `tcp://` with keys",
        "`tcp://` without keys",
        *("time", None, _trip(_LARGE, "aiotensor-curve"), _trip(_LARGE, "aiotensor-tcp")),
    ),
    _versus("time", 2, "4 KiB round trip, `tcp://`", _trip(_SMALL, "aiotensor-tcp"), "zmq-tcp"),
    *_by_sizes("round trip, `tcp://`", "round-trip", "aiotensor-tcp"),
    *_by_sizes("round trip between ranks, one host", "round-trip", "aiotensor-ranks"),
    *_by_sizes("round trip between ranks, two hosts", "two-hosts", "aiotensor-ranks"),
    _late("sender, 150 MiB tensors over `unix://`", "loop-lag", "aiotensor-unix", "beyond_p999_s"),
    _late("sender, 150 MiB tensors over `tcp://`", "loop-lag", "aiotensor-tcp", "beyond_p999_s"),
    _late("receiver, 150 MiB tensors over `tcp://`", "loop-lag", "aiotensor-tcp", "receiver_beyond_p999_s"),
    Goal("idle pair", "", "cpu", _IDLE, Reading("idle", "aiotensor-unix", _SMALL, "cpu_percent")),
    _versus("time", 0.7, "4 KiB request and answer", _REQUEST, "zmq-ipc"),
    _versus("time", 2, "4 KiB request and answer", _REQUEST, "raw-socket-loop"),
    *(
        _versus(
            *("faster", 5, f"150 MiB request and answer, {answer}"),
            Reading(workload, "aiotensor-channel", _LARGE),
            "zmq-request",
        )
        for workload, answer in (("request-echo", "echo"), ("request-answer", "small answer"))
    ),
    _versus("faster", 18, "150 MiB to 4 readers", _published(_LARGE, 4), "zmq-xpub"),
    _versus("time", 1, "4 KiB to 4 readers", _published(_SMALL, 4), "zmq-xpub"),
    Goal(
        "150 MiB to 8 readers",
        "the same to one reader",
        *("time", 1.6, _published(_LARGE, 8), _published(_LARGE, 1)),
    ),
    *(
        _late(f"{role}, 150 MiB to 4 readers", "broadcast-lag", "aiotensor-publisher", number, 4)
        for role, number in (("publisher", "beyond_p999_s"), ("reader", "receiver_beyond_p999_s"))
    ),
    Goal(
        "idle publisher with 8 readers",
        *("", "cpu", _IDLE),
        Reading("broadcast-idle", "aiotensor-publisher", _SMALL, "cpu_percent", 8),
    ),
    *(
        _versus(kind, 1, f"serving, {task}: {work}", Reading(workload, ours, 9 * _MIB // 2, number, 3), them)
        for workload, task, ours in (
            ("serving-decoding", "decoding and transfer", "aiotensor-in-place"),
            ("serving-transfer", "transfer", "aiotensor-copying"),
        )
        for them in ("torch-queue-handles", "zmq-pickle-videos")
        for work, kind, number in _SERVED
    ),
)


def judge(results: Sequence[Result], goals: Sequence[Goal] = GOALS) -> list[Verdict]:
    """Compare the results with the goals; a goal whose contender was not measured has no number."""
    found = {
        Reading(result.workload, result.contender, result.size_bytes, name, result.peers): [
            each[name] for each in result.rounds
        ]
        for result in results
        for name in result.rounds[0]
    }
    measured = {result.workload for result in results}
    return [_verdict(goal, found) for goal in goals if goal.ours.workload in measured]


def _verdict(goal: Goal, found: Mapping[Reading, Sequence[float]]) -> Verdict:
    kind = _KINDS[goal.kind]
    values = list(found.get(goal.ours, ()))
    if goal.theirs is not None:
        pairs = zip(values, found.get(goal.theirs, ()), strict=False)
        values = [theirs / ours if kind.inverted else ours / theirs for ours, theirs in pairs]
    words = "" if goal.bound is None else kind.words.format(goal.bound)
    if not values:
        return Verdict(goal.work, goal.against, words, kind.unit)
    measured = statistics.median(values)
    met = None
    if goal.bound is not None:
        met = measured >= goal.bound if kind.at == "least" else measured <= goal.bound
    return Verdict(goal.work, goal.against, words, kind.unit, measured, min(values), max(values), met)
