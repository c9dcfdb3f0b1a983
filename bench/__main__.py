"""The command line: `python -m bench`."""

import sys
from pathlib import Path

import click
import msgspec
from rich.console import Console

from bench import tables
from bench.contenders import CONTENDERS
from bench.harness import measure
from bench.measure import parse_size
from bench.plan import Options, make_plan
from bench.progress import Reporter
from bench.records import Loop, Report
from bench.workloads import WORKLOADS

_SIZES = "4KiB,64KiB,1MiB,16MiB,150MiB"
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
    type=click.Choice(["uvloop", "asyncio"]),
    default="uvloop",
    help="Event loop of all processes.",
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
    "deadline_s",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds for one batch of one contender; beyond it, it is killed and reported as failed.  "
    "[default: by workload]",
)
@click.option(
    "--results",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the JSON, the tables and the plots go.  [default: bench/results for a full run, and "
    "bench/results/partial, which git ignores, for any other]",
)
def main(
    quick: bool,
    sizes: tuple[int, ...],
    rounds: int | None,
    loop: Loop,
    contenders: tuple[str, ...],
    workloads: tuple[str, ...],
    deadline_s: float | None,
    folder: Path | None,
) -> None:
    """Measure the transfer of tensors between processes, and compare it with the goals of the design.

    The exit status is 1 if a contender failed. A missed goal is not a failure.
    """
    options = Options(quick, sizes, loop, rounds, deadline_s, contenders, workloads)
    plan = make_plan(options, CONTENDERS, WORKLOADS)
    with Reporter(Console(stderr=True, soft_wrap=True, highlight=False), plan.batches) as reporter:
        report = measure(plan, options, reporter.step)
    given = click.get_current_context().get_parameter_source
    whole = all(
        given(name) == click.core.ParameterSource.DEFAULT
        for name in ("quick", "sizes", "rounds", "loop", "contenders", "workloads")
    )
    written = write(report, folder or (_RESULTS if whole else _RESULTS / "partial"))
    console = Console(soft_wrap=True, highlight=False)
    # The goals come last, where they can be seen without scrolling.
    for part in (tables.machine(report), *tables.workloads(report), "## Goals", tables.goals(report)):
        console.print(part, "", sep="\n", markup=False)
    for skip in report.skips:
        console.print(f"SKIPPED {skip.name}: {skip.reason}", style="bold yellow", markup=False)
    if report.failures:
        console.print(tables.failures(report), style="red", markup=False)
    console.print(f"Written: {', '.join(str(path) for path in written)}", markup=False)
    sys.exit(1 if report.failures else 0)


def write(report: Report, folder: Path) -> list[Path]:
    """Write the JSON, the tables and the plots, and return their paths."""
    # Importing it takes half a second, which --help and a wrong option should not.
    from bench.plots import draw

    folder.mkdir(parents=True, exist_ok=True)
    data, text = folder / "latest.json", folder / "latest.md"
    data.write_bytes(msgspec.json.encode(report) + b"\n")  # not indented, which would add half of the size
    text.write_text(tables.markdown(report))
    return [data, text, *draw(report, folder)]


if __name__ == "__main__":
    main()
