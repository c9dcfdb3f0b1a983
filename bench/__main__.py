"""The command line: `python -m bench`."""

import asyncio
import sys
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.contenders import BASELINE, CONTENDERS
from bench.harness import measure
from bench.measure import format_size, parse_size
from bench.records import Answer, Effort, Report, Spec
from bench.report import show

_FULL = Effort(bytes=256 << 20, most=400, fewest=5)
_QUICK = Effort(bytes=96 << 20, most=150, fewest=3)
_WIDTH_IN_A_FILE = 140


def _parse_sizes(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({parse_size(part) for part in text.split(",")}))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--quick", is_flag=True, help="Fewer trips and two rounds: under a minute.")
@click.option(
    "--sizes",
    default="4KiB,64KiB,1MiB,16MiB,150MiB",
    callback=_parse_sizes,
    help="Tensor sizes, with commas.",
)
@click.option(
    "--rounds", type=click.IntRange(min=1), help="Fresh starts of each contender.  [default: 5, quick: 2]"
)
@click.option(
    "--loop", type=click.Choice(["uvloop", "asyncio"]), default="uvloop", help="Event loop of both sides."
)
@click.option(
    "--answer",
    type=click.Choice(["own", "same"]),
    default="own",
    help="The far side answers with a fresh tensor of its own, or with the same one that it received.",
)
@click.option(
    "--contender",
    "names",
    type=click.Choice(list(CONTENDERS)),
    multiple=True,
    help="Measure only this one; may be repeated.  [default: all]",
)
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    help="Seconds for one size of one contender; beyond it the contender is killed and reported as failed.",
)
@click.option("--json", "target", metavar="PATH", help="Write the report as JSON; - is standard output.")
def main(
    quick: bool,
    sizes: tuple[int, ...],
    rounds: int | None,
    loop: str,
    answer: Answer,
    names: tuple[str, ...],
    deadline: float,
    target: str | None,
) -> None:
    """Time the round trip of a tensor between two processes, by size and by contender."""
    contenders = [contender for name, contender in CONTENDERS.items() if not names or name in names]
    rounds = rounds or (2 if quick else 5)
    spec = Spec(
        workload="round-trip",
        sizes=sizes,
        effort=_QUICK if quick else _FULL,
        answer=answer,
        loop=loop,
    )
    to_stderr = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=to_stderr, transient=True, disable=not to_stderr.is_terminal) as progress:
        task = progress.add_task("starting", total=rounds * len(contenders) * len(sizes))

        def advance(name: str, number: int, size: int) -> None:
            doing = f"round {number + 1}: {name} has done {format_size(size)}"
            progress.update(task, advance=1, description=doing)

        report = asyncio.run(
            measure(contenders, spec, baseline=BASELINE, rounds=rounds, deadline_s=deadline, on_batch=advance)
        )
    # JSON on standard output stays alone there.
    show(report, _wide(to_stderr if target == "-" else Console()))
    if target is not None:
        _write(report, target)
    sys.exit(1 if report.failures else 0)


def _wide(console: Console) -> Console:
    if not console.is_terminal:
        console.width = _WIDTH_IN_A_FILE
    return console


def _write(report: Report, target: str) -> None:
    text = msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
    if target == "-":
        sys.stdout.buffer.write(text)
        sys.stdout.flush()
    else:
        Path(target).write_bytes(text)


if __name__ == "__main__":
    main()
