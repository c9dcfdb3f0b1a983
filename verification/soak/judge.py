"""Hold a run against what it may not do: grow, or leave something behind. Pure."""

from collections.abc import Iterator
from typing import NamedTuple

from verification.soak.records import LINKS, Judgement, Report, series
from verification.soak.verdict import grows, trend

__all__ = ["LEAST_SECONDS", "judgements", "leftovers", "passes"]

MIB = 1 << 20

# In a shorter run the allocator still meets new sizes when it ends.
LEAST_SECONDS = 60.0


class Quantity(NamedTuple):
    """What is judged.

    Attributes:
        number: its name in a sample.
        unit: for the reader.
        scale: what makes the number one of that unit.
        allowance: how much it may grow in a run, in the unit.
    """

    number: str
    unit: str
    scale: float
    allowance: float


# Each allowance is a few of the steps in which the quantity goes up and down, and far below what a leak in
# each message would make of it. Waits and throughput are not judged: they are the machine's as well. Nor are
# the bytes that senders keep warm, which go with the throughput; a sender ends when it has given all back. So
# of shared memory the rest is judged: of guests and visitors, and what is not let go.
#
# The own memory is what it is for one setting of the allocator, see `__main__.py`.
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

# What has to be there in the end, when everything has come back. Where there is no such number it is right.
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
    """Judge every quantity of every process; nothing of a run that was too short."""
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
    """Say whether nothing grows and nothing went wrong."""
    return not report.failures and not any(judgement.grows for judgement in report.judgements)


def leftovers(rest: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """Say what processes still had when everything should have come back."""
    return [
        f"{process} ({link}) ended with {name} at {numbers[name]:g} rather than {expected:g}"
        for link, processes in rest.items()
        for process, numbers in processes.items()
        for name, expected in _AT_REST.items()
        if numbers.get(name, expected) != expected
    ]
