"""The records of a soak, as in its JSON file. All numbers are in SI units."""

from collections.abc import Iterator

import msgspec

__all__ = ["LINKS", "Judgement", "Report", "Sample", "series"]

LINKS = ("queue", "unix")


class Sample(msgspec.Struct, frozen=True):
    """The numbers of one process at one time.

    Attributes:
        at_s: seconds since the load began.
        link: the link of the process.
        process: the name of the process.
        numbers: the numbers by name; see `numbers.py`.
    """

    at_s: float
    link: str
    process: str
    numbers: dict[str, float]


class Judgement(msgspec.Struct, frozen=True):
    """The judgement of one quantity of one process.

    Attributes:
        quantity: the name of the quantity.
        link: the link of the process.
        process: the name of the process.
        unit: the unit of all numbers of the judgement.
        allowance: the permitted growth in a run.
        level: the median.
        growth: the growth after the warm-up.
        least: the lower end of its confidence interval.
        most: the upper end.
        grows: the verdict.
    """

    quantity: str
    link: str
    process: str
    unit: str
    allowance: float
    level: float
    growth: float
    least: float
    most: float
    grows: bool


class Report(msgspec.Struct, frozen=True):
    """A whole run.

    Attributes:
        seconds: the duration of the load.
        seed: repeats the same load, apart from the timing.
        processes: the names of the processes that lived for the whole run.
        samples: the samples, in the order of time.
        rest: the numbers of each at the end, after all releases, by link and process.
        visitors: the number of short-lived processes, by link.
        failures: descriptions of all errors.
        judgements: empty if the run was too short for any.
    """

    seconds: float
    seed: int
    processes: list[str]
    samples: list[Sample]
    rest: dict[str, dict[str, dict[str, float]]]
    visitors: dict[str, int]
    failures: list[str]
    judgements: list[Judgement] = []
    schema: int = 1


def series(report: Report, link: str, process: str, number: str) -> tuple[list[float], list[float]]:
    """Return the times and values of one number of one process."""
    found = list(_values(report, link, process, number))
    return [at for at, _ in found], [value for _, value in found]


def _values(report: Report, link: str, process: str, number: str) -> Iterator[tuple[float, float]]:
    for sample in report.samples:
        if (sample.link, sample.process) == (link, process) and number in sample.numbers:
            yield sample.at_s, sample.numbers[number]
