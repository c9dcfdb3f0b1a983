"""The goals of the design, and whether a run has reached them. Without I/O.

Both sides of a comparison come from the same round of the same run, on uvloop if they use an event loop. The
median of the rounds decides.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from bench.records import Result, Verdict

__all__ = ["GOALS", "Goal", "Reading", "judge"]

_KIB, _MIB = 1 << 10, 1 << 20
_LOOP = "uvloop"


class Reading(NamedTuple):
    """One number that a run has measured."""

    workload: str
    contender: str
    size_bytes: int
    number: str
    peers: int = 1


class Goal(NamedTuple):
    """A row of the table.

    Attributes:
        work: the measured work.
        against: the reference of the comparison; empty if there is none.
        ours: the measured number.
        theirs: its divisor; None if there is none.
        at: whether the bound is a minimum or a maximum.
        bound: the bound in the unit; None for a number that is only shown beside a goal.
        unit: ``"x"`` for a quotient; ``"s"`` or ``"%"`` for a number that stands alone.
        words: the goal in words; empty if there is none.
        inverted: whether the quotient is theirs by ours, as "times faster" is for durations.
    """

    work: str
    against: str
    ours: Reading
    theirs: Reading | None
    at: Literal["least", "most"]
    bound: float | None
    unit: Literal["x", "s", "%"]
    words: str
    inverted: bool = False


def _trip(contender: str, size: int, workload: str = "round-trip") -> Reading:
    return Reading(workload, contender, size, "median_s")


def _published(size: int, readers: int, contender: str = "aiotensor-publisher") -> Reading:
    return Reading("broadcast", contender, size, "median_s", readers)


def _rate(contender: str) -> Reading:
    return Reading("pipelined", contender, 4 * _KIB, "tensors_per_s")


def _faster(work: str, against: str, ours: Reading, theirs: Reading, times: float | None) -> Goal:
    words = "" if times is None else f"at least {times:g}x faster"
    return Goal(work, against, ours, theirs, "least", times, "x", words, inverted=True)


def _faster_than_queue(work: str, size: int, times: float) -> Goal:
    ours, theirs = _trip("aiotensor-unix", size), _trip("torch-queue", size)
    return _faster(work, "torch.multiprocessing.Queue", ours, theirs, times)


def _no_slower(work: str, against: str, ours: Reading, theirs: Reading, times: float | None) -> Goal:
    words = "" if times is None else f"at most {times:g}x its time"
    return Goal(work, against, ours, theirs, "most", times, "x", words)


def _at_speed(work: str, against: str, ours: Reading, theirs: Reading, times: float) -> Goal:
    words = f"at least {times:g}x the speed"
    return Goal(work, against, ours, theirs, "least", times, "x", words, inverted=True)


def _serving(
    task: str, workload: str, contenders: tuple[str, str], against: str, work: str, number: str
) -> Goal:
    ours, theirs = (Reading(workload, one, 9 * _MIB // 2, number, 3) for one in contenders)
    work = f"serving, {task}: {work}"
    if number == "requests_per_s":
        return Goal(work, against, ours, theirs, "least", 1, "x", "at least 1x the rate")
    return Goal(work, against, ours, theirs, "most", 1, "x", "at most 1x as much")


_SIZES = (
    ("4 KiB", 4 * _KIB),
    ("64 KiB", 64 * _KIB),
    ("1 MiB", _MIB),
    ("16 MiB", 16 * _MIB),
    ("150 MiB", 150 * _MIB),
)

GOALS: tuple[Goal, ...] = (
    _faster_than_queue("4 KiB round trip, `unix://`", 4 * _KIB, 6),
    *(
        _no_slower(
            "4 KiB round trip, `unix://`",
            against,
            _trip("aiotensor-unix", 4 * _KIB),
            _trip(limit, 4 * _KIB),
            1.7,
        )
        for limit, against in (
            ("raw-socket", "raw Unix socket echo, blocking"),
            ("raw-socket-loop", "raw Unix socket echo, on the event loop"),
        )
    ),
    _no_slower(
        "4 KiB round trip, `unix://`",
        "ZeroMQ over `ipc://`, blocking",
        _trip("aiotensor-unix", 4 * _KIB),
        _trip("zmq-ipc", 4 * _KIB),
        1,
    ),
    _faster_than_queue("16 MiB, copied", 16 * _MIB, 6),
    _faster_than_queue("150 MiB, copied", 150 * _MIB, 6),
    *(
        _no_slower(
            "150 MiB, copied",
            f"memcpy into warm memory, {threads}",
            _trip("aiotensor-unix", 150 * _MIB),
            _trip(limit, 150 * _MIB),
            times,
        )
        for limit, threads, times in (
            ("memcpy-2", "2 threads, as `unix://` copies", 1.25),
            ("memcpy-1", "1 thread", None),
        )
    ),
    _no_slower(
        "150 MiB from `allocate()`",
        "our own 4 KiB round trip",
        _trip("aiotensor-unix", 150 * _MIB, "allocated"),
        _trip("aiotensor-unix", 4 * _KIB),
        1.5,
    ),
    _no_slower(
        "150 MiB, sent on by two further processes",
        "4 KiB, sent on by them",
        Reading("chain", "aiotensor-chain", 150 * _MIB, "median_s", 2),
        Reading("chain", "aiotensor-chain", 4 * _KIB, "median_s", 2),
        1.5,
    ),
    Goal(
        "4 KiB, 64 in flight",
        "torch.multiprocessing.Queue",
        _rate("aiotensor-unix"),
        _rate("torch-queue"),
        "least",
        25,
        "x",
        "at least 25x the rate",
    ),
    _at_speed(
        "150 MiB, `tcp://` on the loopback",
        "TCP socket, blocking, into warm memory",
        _trip("aiotensor-tcp", 150 * _MIB),
        _trip("tcp-socket", 150 * _MIB),
        0.85,
    ),
    _no_slower(
        "150 MiB, `tcp://` with keys",
        "`tcp://` without keys",
        _trip("aiotensor-curve", 150 * _MIB),
        _trip("aiotensor-tcp", 150 * _MIB),
        None,
    ),
    _no_slower(
        "4 KiB round trip, `tcp://`",
        "bare ZeroMQ over TCP, blocking",
        _trip("aiotensor-tcp", 4 * _KIB),
        _trip("zmq-tcp", 4 * _KIB),
        2.0,
    ),
    *(
        _faster(f"{work} round trip, `tcp://`", "gloo", _trip("aiotensor-tcp", size), _trip("gloo", size), 1)
        for work, size in _SIZES
    ),
    *(
        _faster(
            f"{work} round trip between ranks, one host",
            "gloo",
            _trip("aiotensor-ranks", size),
            _trip("gloo", size),
            1,
        )
        for work, size in _SIZES
    ),
    *(
        _faster(
            f"{work} round trip between ranks, two hosts",
            "gloo",
            _trip("aiotensor-ranks", size, "two-hosts"),
            _trip("gloo", size, "two-hosts"),
            1 if size <= _MIB else None,
        )
        for work, size in _SIZES[:-1]
    ),
    _at_speed(
        "150 MiB round trip between ranks, two hosts",
        "gloo",
        _trip("aiotensor-ranks", 150 * _MIB, "two-hosts"),
        _trip("gloo", 150 * _MIB, "two-hosts"),
        0.95,
    ),
    _no_slower(
        "150 MiB round trip between ranks, two hosts, encrypted",
        "not encrypted",
        _trip("aiotensor-ranks-curve", 150 * _MIB, "two-hosts"),
        _trip("aiotensor-ranks", 150 * _MIB, "two-hosts"),
        None,
    ),
    *(
        Goal(
            f"event loop of a {role} while 150 MiB tensors move over `tcp://`",
            "the same loop, idle",
            Reading("loop-lag", "aiotensor-tcp", 150 * _MIB, number),
            None,
            "most",
            0.005,
            "s",
            "a 1 ms ticker at most 5 ms later at p99.9",
        )
        for role, number in (("sender", "beyond_p999_s"), ("receiver", "receiver_beyond_p999_s"))
    ),
    Goal(
        "event loop while sending 150 MiB tensors back to back",
        "the same loop, idle",
        Reading("loop-lag", "aiotensor-unix", 150 * _MIB, "beyond_p999_s"),
        None,
        "most",
        0.005,
        "s",
        "a 1 ms ticker at most 5 ms later at p99.9",
    ),
    Goal(
        "idle pair",
        "",
        Reading("idle", "aiotensor-unix", 4 * _KIB, "cpu_percent"),
        None,
        "most",
        0.05,  # this number and lower ones are shown as 0.0 %
        "%",
        "0.0 % CPU",
    ),
    *(
        _no_slower(
            "4 KiB request and reply, `ipc://`",
            against,
            _trip("aiotensor-channel", 4 * _KIB, "request-echo"),
            _trip(limit, 4 * _KIB, "request-echo"),
            1.5,
        )
        for limit, against in (
            ("zmq-echo", "bare ZeroMQ echo, blocking"),
            ("zmq-echo-loop", "bare ZeroMQ echo, in callbacks of the event loop"),
            ("zmq-echo-asyncio", "bare ZeroMQ echo, by `zmq.asyncio`, DEALER to ROUTER"),
        )
    ),
    *(
        _faster(
            f"150 MiB request and reply, {answer}",
            against,
            _trip("aiotensor-channel", 150 * _MIB, workload),
            _trip(them, 150 * _MIB, workload),
            5,
        )
        for workload, answer in (("request-echo", "echo"), ("request-answer", "small answer"))
        for them, against in (
            ("zmq-request", "plain pyzmq, `copy=False`"),
            ("zmq-pickle", "pickle 5, out of band"),
        )
    ),
    _faster(
        "150 MiB to 4 readers",
        "ZeroMQ XPUB, pickle 5, out of band",
        _published(150 * _MIB, 4),
        _published(150 * _MIB, 4, "zmq-xpub"),
        20,
    ),
    *(
        _no_slower(f"{work} readers", against, _published(size, readers), theirs, times)
        for work, size, readers, against, theirs, times in (
            (
                "150 MiB to 4",
                150 * _MIB,
                4,
                "our own one-to-one transport, to one reader",
                _published(150 * _MIB, 1, "aiotensor-senders"),
                1.4,
            ),
            ("150 MiB to 8", 150 * _MIB, 8, "the same to one reader", _published(150 * _MIB, 1), 1.5),
            (
                "4 KiB to 4",
                4 * _KIB,
                4,
                "ZeroMQ XPUB, pickle 5, out of band",
                _published(4 * _KIB, 4, "zmq-xpub"),
                1.0,
            ),
        )
    ),
    *(
        Goal(
            f"event loop of a {role} while 150 MiB tensors go to 4 readers",
            "the same loop, idle",
            Reading("broadcast-lag", "aiotensor-publisher", 150 * _MIB, number, 4),
            None,
            "most",
            0.005,
            "s",
            "a 1 ms ticker at most 5 ms later at p99.9",
        )
        for role, number in (("publisher", "beyond_p999_s"), ("reader", "subscriber_beyond_p999_s"))
    ),
    Goal(
        "idle publisher with 8 readers",
        "",
        Reading("broadcast-idle", "aiotensor-publisher", 4 * _KIB, "cpu_percent", 8),
        None,
        "most",
        0.05,  # this number and lower ones are shown as 0.0 %
        "%",
        "0.0 % CPU",
    ),
    *(
        _serving(task, workload, (ours, theirs), against, work, number)
        for workload, task, ours in (
            ("serving-decoding", "decoding and transfer", "aiotensor-in-place"),
            ("serving-transfer", "transfer", "aiotensor-copying"),
        )
        for theirs, against in (
            ("torch-queue-handles", "torch.multiprocessing.Queue with handles"),
            ("zmq-pickle-videos", "pickle 5 over ZeroMQ, out of band"),
        )
        for work, number in (
            ("requests a second", "requests_per_s"),
            ("latency at p99", "p99_s"),
            ("CPU time", "cpu_s_per_request"),
            ("peak memory", "peak_bytes"),
            ("lateness of the event loop at p99.9", "late_p999_s"),
        )
    ),
)


def judge(results: Sequence[Result], goals: Sequence[Goal] = GOALS) -> list[Verdict]:
    """Compare the results with the goals; a goal that this run did not measure has no number."""
    found = {
        Reading(result.workload, result.contender, result.size_bytes, name, result.peers): [
            each[name] for each in result.rounds
        ]
        for result in results
        if result.loop in (None, _LOOP)
        for name in result.rounds[0]
    }
    return [_verdict(goal, found) for goal in goals]


def _verdict(goal: Goal, found: Mapping[Reading, Sequence[float]]) -> Verdict:
    values = list(found.get(goal.ours, ()))
    if goal.theirs is not None:
        pairs = zip(values, found.get(goal.theirs, ()), strict=False)
        values = [theirs / ours if goal.inverted else ours / theirs for ours, theirs in pairs]
    if not values:
        return Verdict(goal.work, goal.against, goal.words, goal.unit)
    measured = statistics.median(values)
    met = None
    if goal.bound is not None:
        met = measured >= goal.bound if goal.at == "least" else measured <= goal.bound
    return Verdict(goal.work, goal.against, goal.words, goal.unit, measured, min(values), max(values), met)
