"""Judge a run: no quantity may grow, and no resource may be held at the end. Without I/O."""

from collections.abc import Iterator
from typing import NamedTuple

from verification.soak.records import LINKS, Judgement, Report, series
from verification.soak.verdict import grows, trend

__all__ = ["LEAST_SECONDS", "judgements", "leftovers", "passes"]

MIB = 1 << 20

# At the end of a shorter run, tensors still have sizes that are new to the allocator.
LEAST_SECONDS = 60.0


class Quantity(NamedTuple):
    """A quantity to judge.

    Attributes:
        number: its name in a sample.
        unit: the unit in the report.
        scale: the scale of this unit, by which the number is divided.
        allowance: the permitted growth in a run, in the unit.
    """

    number: str
    unit: str
    scale: float
    allowance: float


# Each allowance is a small multiple of the usual variation of the quantity, and far below the growth from a
# leak in every message. Waits and throughput are not judged, since they depend on the machine. Warm bytes of
# senders depend on the throughput, so shared memory is judged without them; each sender ends after it has
# released them.
# The judgement of "own memory" requires the setting of the allocator in `__main__.py`.
_QUANTITIES = (
    Quantity("own memory", "MiB", MIB, 16),
    Quantity("other shared memory", "MiB", MIB, 40),
    Quantity("object blocks", "thousand", 1000, 2),
    Quantity("descriptors", "", 1, 3),
    Quantity("threads", "", 1, 2),
    Quantity("mappings", "", 1, 16),
    Quantity("leases", "", 1, 16),
    Quantity("permits", "", 1, 2),
    Quantity("bytes in use", "MiB", MIB, 32),
    Quantity("fragmentation", "%", 0.01, 30),
)

# The expected numbers at the end, for each process that reports them.
_AT_REST: dict[str, float] = {
    "leases": 0,
    "leased bytes": 0,
    "unclaimed tensors": 0,
    "left over by the iteration": 0,
    "senders lost": 0,
    "senders refused": 0,
    "permits": 0,
    "waiting": 0,
    "bytes in use": 0,
    "free runs": 1,
    "fragmentation": 0,
    "receivers lost": 0,
}


def judgements(report: Report) -> list[Judgement]:
    """Judge every quantity of every process; return nothing for a run that was too short."""
    return list(_judgements(report)) if report.seconds >= LEAST_SECONDS else []


def _judgements(report: Report) -> Iterator[Judgement]:
    for number, unit, scale, allowance in _QUANTITIES:
        for link in LINKS:
            for process in report.processes:
                times, values = series(report, link, process, number)
                found = trend(times, [value / scale for value in values])
                if found is not None:
                    yield Judgement(
                        quantity=number,
                        link=link,
                        process=process,
                        unit=unit,
                        allowance=allowance,
                        level=found.level,
                        growth=found.growth,
                        least=found.least,
                        most=found.most,
                        grows=grows(found, allowance),
                    )


def passes(report: Report) -> bool:
    """Return whether a run had no growth and no failures."""
    return not report.failures and not any(judgement.grows for judgement in report.judgements)


def leftovers(rest: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """Return descriptions of the resources that processes still held at the end."""
    return [
        f"{process} ({link}) ended with {name} at {numbers[name]:g} rather than {expected:g}"
        for link, processes in rest.items()
        for process, numbers in processes.items()
        for name, expected in _AT_REST.items()
        if numbers.get(name, expected) != expected
    ]
