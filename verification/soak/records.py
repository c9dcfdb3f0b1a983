"""What a soak writes down, as its JSON file holds it. SI units everywhere."""

from collections.abc import Iterator

import msgspec

__all__ = ["LINKS", "Judgement", "Report", "Sample", "series"]

LINKS = ("queue", "unix")


class Sample(msgspec.Struct, frozen=True):
    """What one process had at one time.

    Attributes:
        at_s: seconds since the load began.
        link: of the process.
        process: its name.
        numbers: by name; see `numbers.py`.
    """

    at_s: float
    link: str
    process: str
    numbers: dict[str, float]


class Judgement(msgspec.Struct, frozen=True):
    """One quantity of one process.

    Attributes:
        quantity: its name.
        link: of the process.
        process: its name.
        unit: of the numbers below.
        allowance: how much it may grow in a run.
        level: the median.
        growth: how much it grew after the warm-up.
        least: the lower end of the confidence interval of that.
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
        seconds: for how long there was load.
        seed: draws it again, but for what the machine decides.
        processes: those that lived from the beginning to the end.
        samples: in the order of their taking.
        rest: what each of them had in the end, when everything had come back, by link and process.
        visitors: processes that came and went, by link.
        failures: all that went wrong.
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
    """Give the times and values of one number of one process."""
    found = list(_values(report, link, process, number))
    return [at for at, _ in found], [value for _, value in found]


def _values(report: Report, link: str, process: str, number: str) -> Iterator[tuple[float, float]]:
    for sample in report.samples:
        if (sample.link, sample.process) == (link, process) and number in sample.numbers:
            yield sample.at_s, sample.numbers[number]
