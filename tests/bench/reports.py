"""Contenders, workloads and reports for the tests of the benchmark."""

from bench.contenders.base import Contender
from bench.goals import judge
from bench.records import Effort, Failure, Loop, Machine, Participant, Report, Result, Skip
from bench.workloads.base import Workload

__all__ = [
    "CHANNEL",
    "IN_PLACE",
    "KIB",
    "MIB",
    "OURS",
    "PUBLISHER",
    "RANKS",
    "contender",
    "report",
    "result",
    "served",
    "trips",
    "workload",
]

KIB, MIB = 1 << 10, 1 << 20
UVLOOP: Loop = "uvloop"
OURS, RANKS = "aiotensor-unix", "aiotensor-ranks"
CHANNEL, PUBLISHER = "aiotensor-channel", "aiotensor-publisher"
IN_PLACE = "aiotensor-in-place"

MACHINE = Machine(
    cores=2,
    cpu="a processor",
    memory_bytes=8 << 30,
    kernel="6.1",
    python="3.11.7",
    versions={"torch": "2.13.0", "ray": "not installed"},
    load_before=0.5,
    load_after=1.0,
)


def contender(name: str, **fields: object) -> Contender:
    values: dict[str, object] = {"name": name, "module": name, "what": f"{name}, made by a test"}
    return Contender(**(values | fields))  # type: ignore[arg-type]


def workload(name: str = "round-trip", **fields: object) -> Workload:
    values: dict[str, object] = {
        "name": name,
        "module": "bench.workloads.round_trip",
        "title": "Made by a test",
        "score": "median_s",
        "more_is_better": False,
        "full": Effort(rounds=3),
        "quick": Effort(rounds=2),
    }
    return Workload(**(values | fields))  # type: ignore[arg-type]


def result(
    workload: str,
    contender: str,
    size: int,
    rounds: list[dict[str, float]],
    *,
    loop: Loop | None = None,
    peers: int = 1,
    ratios: list[float] | None = None,
) -> Result:
    """Return a result with the numbers of its middle round."""
    ratios = ratios or []
    return Result(
        workload=workload,
        contender=contender,
        loop=loop,
        size_bytes=size,
        peers=peers,
        trips=len(rounds),
        numbers=rounds[len(rounds) // 2],
        rounds=rounds,
        ratio=ratios[len(ratios) // 2] if ratios else None,
        round_ratios=ratios,
    )


def trips(
    contender: str,
    size: int,
    *medians: float,
    workload: str = "round-trip",
    loop: Loop | None = None,
    peers: int = 1,
) -> Result:
    """Return a result of round trips with these medians, in seconds."""
    rounds = [
        {
            "median_s": median,
            "p99_s": 2 * median,
            "min_s": median / 2,
            "gigabytes_per_s": 2 * size / median / 1e9,
            "allocate_median_s": median / 10,
        }
        for median in medians
    ]
    return result(workload, contender, size, rounds, loop=loop, peers=peers, ratios=[4.0, 5.0, 6.0])


def _lag(contender: str, loop: Loop) -> Result:
    numbers = {
        f"{side}{state}_{name}_s": late
        for side in ("", "receiver_")
        for state, late in (("idle", 0.001), ("busy", 0.003), ("beyond", 0.002))
        for name in ("p50", "p99", "p999", "max")
    }
    return result("loop-lag", contender, 150 * MIB, [numbers | {"gigabytes_per_s": 5.0}], loop=loop)


def served(workload: str, contender: str, rate: float) -> Result:
    """Return a result of API servers that answer `rate` requests per second."""
    numbers = {
        "requests_per_s": rate,
        "median_s": 40 / rate,
        "p99_s": 80 / rate,
        "cpu_s_per_request": 1 / rate,
        "peak_bytes": 50.0 * MIB,
        "after_private_bytes": 2.0 * MIB,
        "after_shared_bytes": 0.0,
        **{
            f"late_{name}_s": late
            for name, late in (("p50", 1e-4), ("p99", 2e-3), ("p999", 5e-3), ("max", 9e-3))
        },
    }
    return result(workload, contender, 9 * MIB // 2, [numbers], loop=UVLOOP, peers=3, ratios=[rate / 100])


def report(failures: list[Failure] | None = None, skips: list[Skip] | None = None) -> Report:
    """Return a complete report with results of every kind."""
    results = [
        *(trips(OURS, size, 0.001, 0.002, 0.003, loop="uvloop") for size in (4 * KIB, 150 * MIB)),
        *(trips("torch-queue", size, 0.01, 0.01, 0.01) for size in (4 * KIB, 150 * MIB)),
        trips("raw-socket", 4 * KIB, 0.001, 0.001, 0.001),
        trips(OURS, 150 * MIB, 0.002, 0.002, 0.002, workload="allocated", loop="uvloop"),
        *(
            trips(name, 150 * MIB, *[median] * 3, workload="two-hosts", loop=loop)
            for name, median, loop in ((RANKS, 0.3, UVLOOP), ("gloo", 0.6, None))
        ),
        *(
            result(
                "fan-in",
                name,
                size,
                [{"tensors_per_s": 1000.0 * peers, "gigabytes_per_s": 1.5 * peers}],
                loop="uvloop" if name == OURS else None,
                peers=peers,
                ratios=[2.0],
            )
            for name in (OURS, "torch-queue")
            for size in (4 * KIB, MIB)
            for peers in (1, 16)
        ),
        *(_lag(OURS, loop) for loop in ("uvloop", "asyncio")),
        result("idle", OURS, 4 * KIB, [{"cpu_percent": 0.004}], loop="uvloop"),
        *(
            answered
            for workload in ("request-echo", "request-answer")
            for size in (4 * KIB, 150 * MIB)
            for answered in (
                trips(CHANNEL, size, 0.001, 0.001, 0.001, workload=workload, loop="uvloop"),
                trips("zmq-request", size, 0.006, 0.006, 0.006, workload=workload),
            )
        ),
        trips("zmq-echo", 4 * KIB, 0.0005, 0.0005, 0.0005, workload="request-echo"),
        *(
            trips(name, size, *[median] * 3, workload="broadcast", loop=loop, peers=peers)
            for name, median, loop in ((PUBLISHER, 0.001, UVLOOP), ("zmq-xpub", 0.03, None))
            for size in (4 * KIB, 150 * MIB)
            for peers in (1, 4)
        ),
        *(
            served(workload, name, rate)
            for name, rate in ((IN_PLACE, 300.0), ("torch-queue-handles", 100.0))
            for workload in ("serving-decoding", "serving-transfer")
            if (name, workload) != (IN_PLACE, "serving-transfer")
        ),
    ]
    names = [OURS, "torch-queue", "ray", "raw-socket"]
    return Report(
        quick=False,
        answer="own",
        baseline="torch-queue",
        contenders=[
            *(Participant(name, f"what {name} is", name == "raw-socket") for name in names),
            *(Participant(name, f"what {name} is", spans_hosts=True) for name in (RANKS, "gloo")),
            *(
                Participant(name, f"what {name} is", name == "zmq-echo", "messages")
                for name in (CHANNEL, "zmq-request", "zmq-pickle", "zmq-echo")
            ),
            *(
                Participant(name, f"what {name} is", carries="publications")
                for name in (PUBLISHER, "zmq-xpub")
            ),
            *(
                Participant(name, f"what {name} is", carries="videos")
                for name in (IN_PLACE, "torch-queue-handles")
            ),
        ],
        workloads=[
            *("round-trip", "allocated", "two-hosts", "fan-in", "loop-lag", "idle"),
            *("request-echo", "request-answer", "broadcast", "serving-decoding", "serving-transfer"),
        ],
        seconds=12.3,
        machine=MACHINE,
        results=results,
        goals=judge(results),
        failures=failures or [],
        skips=skips or [],
    )
