"""Show a report as a table, and its failures aloud. The table is valid Markdown."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.measure import format_seconds, format_size
from bench.records import Failure, Report, Result

__all__ = ["show"]


def show(report: Report, console: Console) -> None:
    """Print the table, what it means, and every contender that failed."""
    table = Table(box=box.MARKDOWN)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("contender", no_wrap=True)
    for heading in ("median", "p99", "fastest", "GB/s", f"against {report.baseline}", "trips"):
        table.add_column(heading, justify="right", no_wrap=True)
    results = {(result.contender, result.size_bytes): result for result in report.results}
    for size in report.sizes_bytes:
        for name in report.contenders:
            result = results.get((name, size))
            cells = ["failed"] if result is None else _cells(result, report.baseline)
            table.add_row(format_size(size), name, *cells)
    console.print(table)
    for paragraph in (_explanation(report), _machine(report), *map(_failure, report.failures)):
        console.print()
        console.print(paragraph, soft_wrap=True)


def _cells(result: Result, baseline: str) -> list[str]:
    summary = result.summary
    ratio = "" if result.ratio is None else "1" if result.contender == baseline else f"{result.ratio:.2f}x"
    if len(result.round_ratios) > 1 and result.contender != baseline:
        ratio += f" ({min(result.round_ratios):.2f} to {max(result.round_ratios):.2f})"
    return [
        format_seconds(summary.median_s),
        format_seconds(summary.p99_s),
        format_seconds(summary.min_s),
        f"{summary.gigabytes_per_second:#.3g}",
        ratio,
        str(summary.trips),
    ]


def _explanation(report: Report) -> Text:
    answer = "a tensor of its own" if report.answer == "own" else "the tensor it received"
    return Text(
        f"Round trips, answered with {answer}. Rounds in fresh processes: {report.rounds}. "
        "GB/s counts both ways. Of fewer than 100 trips, p99 is the slowest. Ratios are of medians, 2.00x is "
        "twice as fast: the middle round, and in brackets the lowest and the highest."
    )


def _machine(report: Report) -> Text:
    machine = report.machine
    return Text(
        f"{machine.cores} cores ({machine.cpu}), Linux {machine.kernel}, Python {machine.python}, "
        f"torch {machine.versions['torch']}, {report.loop}; load {machine.load_before:.1f} before and "
        f"{machine.load_after:.1f} after."
    )


def _failure(failure: Failure) -> Text:
    text = Text("FAILED ", style="bold red")
    text.append(
        f"{failure.contender}, round {failure.round + 1}: it {failure.reason}.", style="not bold default"
    )
    if failure.output:
        text.append(f"\n{failure.output}", style="not bold default")
    return text
