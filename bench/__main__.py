"""The command line: `python -m bench`."""

import sys
from pathlib import Path

import click
import msgspec
from rich.console import Console

from bench import tables
from bench.contenders import BASELINE, CONTENDERS, why_not
from bench.harness import measure
from bench.measure import parse_size
from bench.plan import Options, make_plan
from bench.progress import Reporter
from bench.records import Answer, Loop, Report
from bench.workloads import WORKLOADS, why_unavailable

_SIZES = "4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,150MiB"
_RESULTS = Path(__file__).parent / "results"


def _parse_sizes(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({parse_size(part) for part in text.split(",")}))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option(
    "--quick", is_flag=True, help="Less of everything: fewer contenders and workloads, within a minute."
)
@click.option(
    "--sizes", default=_SIZES, callback=_parse_sizes, help="Tensor sizes of round trips, with commas."
)
@click.option(
    "--rounds", type=click.IntRange(min=1), help="Fresh starts of each contender.  [default: by workload]"
)
@click.option(
    "--loop",
    "loops",
    type=click.Choice(["uvloop", "asyncio"]),
    multiple=True,
    help="Event loop, for contenders that use one; may be repeated.  [default: both, quick: uvloop]",
)
@click.option(
    "--answer",
    type=click.Choice(["own", "same"]),
    default="own",
    help="The far side of a round trip answers with a new tensor, or with the received one.",
)
@click.option(
    "--contender",
    "contenders",
    type=click.Choice(list(CONTENDERS)),
    multiple=True,
    help="Measure only this one; may be repeated.  [default: all]",
)
@click.option(
    "--workload",
    "workloads",
    type=click.Choice(list(WORKLOADS)),
    multiple=True,
    help="Measure only this; may be repeated.  [default: all]",
)
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds for one batch of one contender; beyond it, it is killed and reported as failed.  "
    "[default: by workload]",
)
@click.option(
    "--results",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the JSON, the tables and the plots go.  [default: bench/results for a full run, and "
    "folders in it that git ignores for any other]",
)
@click.option("--json", "target", metavar="PATH", help="Write the JSON there too; - is standard output.")
def main(
    quick: bool,
    sizes: tuple[int, ...],
    rounds: int | None,
    loops: tuple[Loop, ...],
    answer: Answer,
    contenders: tuple[str, ...],
    workloads: tuple[str, ...],
    deadline: float | None,
    folder: Path | None,
    target: str | None,
) -> None:
    """Measure the transfer of tensors between processes, and compare it with the goals of the design.

    The exit status is 1 if a contender failed. A missed goal is not a failure.
    """
    every: tuple[Loop, ...] = ("uvloop",) if quick else ("uvloop", "asyncio")
    options = Options(quick, sizes, loops or every, answer, rounds, deadline, contenders, workloads)
    plan = make_plan(options, CONTENDERS, WORKLOADS, why_not, why_unavailable)
    to_stderr = Console(stderr=True, soft_wrap=True, highlight=False)
    with Reporter(to_stderr, plan) as reporter:
        report = measure(plan, options, baseline=BASELINE, on_step=reporter.step)
    given = click.get_current_context().get_parameter_source
    whole = all(
        given(name) == click.core.ParameterSource.DEFAULT
        for name in ("sizes", "rounds", "loops", "answer", "contenders", "workloads")
    )
    folder = folder or (_RESULTS / "quick" if quick else _RESULTS if whole else _RESULTS / "partial")
    written = write(report, folder)
    if target is not None:
        _write_json(report, target)
    # JSON on standard output must not be mixed with other output.
    _show(report, to_stderr if target == "-" else Console(soft_wrap=True, highlight=False))
    to_stderr.print(f"Written: {', '.join(str(path) for path in written)}", markup=False)
    sys.exit(1 if report.failures else 0)


def write(report: Report, folder: Path) -> list[Path]:
    """Write the JSON, the tables and the plots, and return their paths."""
    # Importing it takes half a second, which --help and a wrong option should not.
    from bench.plots import draw

    folder.mkdir(parents=True, exist_ok=True)
    data, text = folder / "latest.json", folder / "latest.md"
    _write_json(report, str(data))
    text.write_text(tables.markdown(report))
    return [data, text, *draw(report, folder)]


def _show(report: Report, console: Console) -> None:
    # The goals come last, where they can be seen without scrolling.
    parts = [tables.machine(report), *tables.workloads(report), "## Goals", tables.goals(report)]
    for part in parts:
        console.print(part, "", sep="\n", markup=False)
    if lines := tables.skipped(report):
        console.print(f"SKIPPED {lines}", "", sep="\n", style="bold yellow", markup=False)
    if report.failures:
        console.print(tables.failures(report), style="red", markup=False)


def _write_json(report: Report, target: str) -> None:
    text = msgspec.json.encode(report) + b"\n"  # not indented, which would add half of the size
    if target == "-":
        sys.stdout.buffer.write(text)
        sys.stdout.flush()
    else:
        Path(target).write_bytes(text)


if __name__ == "__main__":
    main()
