"""Rounds of comparisons with parts of vLLM, each way in fresh processes, and their tables."""

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, TypeAlias

import click
import torch

from bench.measure import format_seconds, format_size, parse_size

_RESULTS = Path(__file__).parent / "results"
_READING = (
    "Medians over all rounds, p99 in brackets; the multiple is that of the medians of each round: the middle "
    "one, in brackets the lowest and the highest."
)
_LARGE = 16 << 20


class Result(NamedTuple):
    """Seconds of one size in one round.

    Attributes:
        way: the name of the contender.
        nbytes: the size of the tensor.
        trips: the times until the tensor was received.
        calls: the times of the call that sends it.
    """

    way: str
    nbytes: int
    trips: list[float]
    calls: list[float]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Return the tensors to send; the times of the first ones are dropped."""
        count = 10 if self.nbytes > _LARGE else 300
        warm_up = max(3, count // 10)
        for number in range(warm_up + count):
            if number == warm_up:
                self.trips.clear()
                self.calls.clear()
            yield torch.full((self.nbytes,), number % 251, dtype=torch.uint8)

    def add(self, tensor: torch.Tensor, answers: set[int], began: float, called: float, ended: float) -> None:
        """Check the answers of the receivers, which contain the last byte, and add the times."""
        if answers != {int(tensor[-1])}:
            raise RuntimeError(f"{self.way}: a tensor arrived with other values")
        self.trips.append(ended - began)
        self.calls.append(called - began)


# Measures a way with several sizes, and sends a list of results.
Measure: TypeAlias = Callable[[str, Sequence[int], Connection], None]


def prepare() -> None:
    """Set the variables that vLLM reads when it is imported; to be called in each process."""
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    torch.set_num_threads(1)


def comparison(
    name: str, introduction: str, ways: Sequence[str], measure: Measure, trip: str, call: str
) -> click.Command:
    """Return the command of a comparison. It measures all ways in each round, in an alternating order.

    Args:
        name: the name of the file of the table.
        introduction: the introduction of the file, with a title.
        ways: the contenders; the last one is aiotensor.
        measure: measures one of them.
        trip: the heading of the trips.
        call: the heading of the calls.
    """

    @click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
    @click.option("--rounds", type=click.IntRange(min=1), default=5, help="Fresh processes of each way.")
    @click.option("--sizes", default="4KiB,1MiB,150MiB", help="Bytes of the tensor, with commas.")
    @click.option(
        "--results", type=click.Path(path_type=Path), default=_RESULTS, help="The folder of the table."
    )
    def main(rounds: int, sizes: str, results: Path) -> None:
        nbytes = [parse_size(size) for size in sizes.split(",")]
        found = _compare(ways, measure, nbytes, rounds)
        text = f"{introduction} {_READING}\n\n{_table(found, ways, nbytes, trip, call)}"
        click.echo(text)
        results.mkdir(parents=True, exist_ok=True)
        (results / name).write_text(text)

    return main


def _compare(ways: Sequence[str], measure: Measure, sizes: Sequence[int], rounds: int) -> list[Result]:
    context = torch.multiprocessing.get_context("spawn")
    found: list[Result] = []
    for number in range(rounds):
        for way in ways if number % 2 else reversed(ways):
            ours, theirs = context.Pipe()
            process = context.Process(target=measure, args=(way, sizes, theirs))
            process.start()
            theirs.close()
            found += ours.recv()
            process.join()
            click.echo(f"round {number + 1} of {rounds}: {way}", err=True)
    return found


def _table(results: list[Result], ways: Sequence[str], sizes: Sequence[int], trip: str, call: str) -> str:
    *others, ours = ways
    lines = [
        f"| tensor | way | {trip} | {call} | {trip}, as a multiple of {ours} |",
        "|---|---|---|---|---|",
    ]
    for nbytes in sizes:
        rounds = {way: [one for one in results if (one.way, one.nbytes) == (way, nbytes)] for way in ways}
        for way in ways:
            trips = sorted(seconds for one in rounds[way] for seconds in one.trips)
            calls = sorted(seconds for one in rounds[way] for seconds in one.calls)
            ratios = sorted(
                statistics.median(other.trips) / statistics.median(own.trips)
                for other, own in zip(rounds[way], rounds[ours], strict=True)
            )
            ratio = f"{statistics.median(ratios):.2g} ({ratios[0]:.2g} to {ratios[-1]:.2g})"
            lines.append(
                f"| {format_size(nbytes)} | {way} | {_summary(trips)} | {_summary(calls)} "
                f"| {ratio if way in others else ''} |"
            )
    return "\n".join(lines) + "\n"


def _summary(ordered: list[float]) -> str:
    p99 = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    return f"{format_seconds(statistics.median(ordered))} ({format_seconds(p99)})"
