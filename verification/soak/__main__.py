"""The command line: `python -m verification.soak`."""

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from verification.soak.judge import LEAST_SECONDS, passes
from verification.soak.records import LINKS, Judgement, Report
from verification.soak.run import soak

# The allocator of the C library keeps large freed blocks for each thread, and with tensors of mixed sizes
# this memory grows for a long time, which would hide a leak. With this setting large blocks are allocated
# from the system, and returned to it when they are freed. The environment may override it.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}

_RESULTS = Path(__file__).parent.parent.parent / "build" / "soak"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--seconds", type=click.FloatRange(min=1), default=60.0, help="How long there is load.")
@click.option("--seed", type=int, help="Draws the same load again.  [default: another each time]")
@click.option(
    "--results",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=_RESULTS,
    help="The folder for the JSON, the plot and the output to standard error.",
)
def main(seconds: float, seed: int | None, folder: Path) -> None:
    """Send and receive in every way over both links, and check whether the use of any resource grows.

    The exit status is 1 if a quantity grows, a process fails, a value is wrong, resources are still held at
    the end, or anything is written to standard error.
    """
    from verification.soak.plot import draw  # slow to import, which --help should not be

    folder.mkdir(parents=True, exist_ok=True)
    console = Console(width=120, highlight=False)
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    console.print(f"seed {seed}, {seconds:g} s")
    for name, value in _ALLOCATOR.items():
        os.environ.setdefault(name, value)  # for the processes that will be started
    errors = folder / "stderr.txt"
    with _stderr_into(errors):
        report = asyncio.run(soak(seconds, seed))
    if text := errors.read_text(errors="replace"):
        failures = [*report.failures, f"something was written to standard error:\n{text}"]
        report = msgspec.structs.replace(report, failures=failures)
    data, plot = folder / "soak.json", folder / "soak.png"
    data.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    draw(report, plot)
    _show(report, console)
    console.print(f"Written: {data}, {plot}", markup=False)
    sys.exit(0 if passes(report) else 1)


@contextlib.contextmanager
def _stderr_into(path: Path) -> Iterator[None]:
    """Redirect standard error of this process and its children to a file."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with path.open("wb") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def _show(report: Report, console: Console) -> None:
    if report.judgements:
        console.print(_table(report.judgements))
        console.print("Each row shows the process in which the quantity grew most; brackets hold 99 %.")
    else:
        console.print(f"Nothing is judged in less than {LEAST_SECONDS:g} s.")
    _show_work(report, console)
    for failure in report.failures:
        console.print(f"FAILED {failure}", style="red", markup=False)


def _table(judgements: list[Judgement]) -> Table:
    table = Table("link", "quantity", "unit", "process", box=box.SIMPLE)
    for heading in ("median", "grew by", "may grow by"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for link in LINKS:
        mine = [one for one in judgements if one.link == link]
        for name in dict.fromkeys(one.quantity for one in mine):
            worst = max(
                (one for one in mine if one.quantity == name), key=lambda one: (one.grows, one.growth)
            )
            table.add_row(
                link,
                name,
                worst.unit,
                worst.process,
                f"{worst.level:,.1f}",
                f"{worst.growth:+,.1f} ({worst.least:+,.1f} to {worst.most:+,.1f})",
                f"{worst.allowance:g}",
                "[bold red]GROWS[/]" if worst.grows else "[green]flat[/]",
            )
    return table


def _show_work(report: Report, console: Console) -> None:
    for link, processes in report.rest.items():
        done = processes.get("engine")
        if done is not None:
            console.print(
                f"{link}: {done['tensors checked']:,.0f} tensors checked, {done['bytes'] / 2**30:,.1f} GiB, "
                f"{done['messages discarded']:,.0f} messages discarded, {report.visitors[link]} visitors"
            )


if __name__ == "__main__":
    main()
