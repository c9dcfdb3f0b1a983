"""Write a report as Markdown: the goals, a table for each workload, and the failures."""

from collections.abc import Iterator, Sequence

from bench.measure import format_count, format_seconds, format_size
from bench.records import Report, Verdict
from bench.views import VIEWS
from bench.workloads import WORKLOADS

_MET, _MISSED = "met", "MISSED"


def markdown(report: Report) -> str:
    """Return the whole report, the goals first."""
    parts = ["# Benchmark", machine(report), "## Goals", goals(report), *workloads(report)]
    if report.failures:
        parts += ["## Failures", failures(report)]
    if report.skips:
        parts += ["## Not measured", *(f"- {skip.name}: {skip.reason}" for skip in report.skips)]
    contenders = _table(["name", "description"], [[one.name, one.what] for one in report.contenders])
    return "\n\n".join([*parts, "## Contenders", contenders]) + "\n"


def goals(report: Report) -> str:
    """Return a summary, and the table of all goals with their measured numbers."""
    rows = [
        [goal.work, goal.against, goal.goal or "(for comparison)", _measured(goal), _outcome(goal)]
        for goal in report.goals
    ]
    outcomes = [row[-1] for row in rows if row[-1]]
    meaning = "Measured is the middle round, in brackets the lowest and the highest."
    summary = f"{outcomes.count(_MET)} of {len(outcomes)} goals met. {meaning}"
    return f"{summary}\n\n{_table(['work', 'against', 'goal', 'measured', ''], rows)}"


def workloads(report: Report) -> Iterator[str]:
    """Return a heading and the table of each workload."""
    for name in report.workloads:
        workload, (caption, columns) = WORKLOADS[name], VIEWS[name]
        results = [result for result in report.results if result.workload == name]
        results.sort(key=lambda result: (result.size_bytes, result.peers))  # keeps the order of contenders
        yield f"## {workload.title}"
        yield f"{caption} The baseline is {workload.baseline}."
        several = len(workload.peers) > 1
        rows = [
            [
                *(
                    result.contender,
                    format_size(result.size_bytes),
                    *([str(result.peers)] if several else []),
                ),
                *(write(result) for write in columns.values()),
            ]
            for result in results
        ]
        peers = "readers" if workload.broadcasts else "senders"
        yield _table(["", "size", *([peers] if several else []), *columns], rows)


def failures(report: Report) -> str:
    """Return the failures, each with its reason and output."""
    texts: dict[str, list[str]] = {}
    for failure in report.failures:
        # A contender that never works fails every workload in the same way; it is shown once.
        texts.setdefault(failure.output, []).append(
            f"FAILED {failure.contender} in {failure.workload}, round {failure.round + 1}: "
            f"it {failure.reason}."
        )
    return "\n\n".join(
        "\n".join(lines) + (f"\n\n```text\n{output}\n```" if output else "")
        for output, lines in texts.items()
    )


def machine(report: Report) -> str:
    """Describe the machine and the method of the measurements."""
    it = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in it.versions.items())
    kind = "A quick run" if report.quick else "A run"
    return (
        f"{kind} of {report.seconds:.0f} s on {it.cores} cores ({it.cpu}), {it.memory_bytes / 2**30:.0f} GiB "
        f"of memory, Linux {it.kernel}, Python {it.python} with {report.loop}; {versions}. "
        f"Load {it.load_before:.1f} before and {it.load_after:.1f} after. Each contender runs in fresh "
        "processes, in alternating rounds: read the ratios, not the times. Times are the median and p99 of "
        "all rounds; of fewer than 100, p99 is the slowest. Against the baseline, a contender is so many "
        "times better: the middle round, in brackets the lowest and the highest."
    )


def _measured(verdict: Verdict) -> str:
    if verdict.measured is None or verdict.lowest is None or verdict.highest is None:
        return "-"
    values = (verdict.measured, verdict.lowest, verdict.highest)
    text, low, high = (_write(value, verdict.unit) for value in values)
    return text if low == high else f"{text} ({low} to {high})"


def _outcome(verdict: Verdict) -> str:
    if not verdict.goal:
        return ""
    return "not measured" if verdict.met is None else _MET if verdict.met else _MISSED


def _write(value: float, unit: str) -> str:
    if unit == "s":
        return format_seconds(value)
    if unit == "calls":
        return f"{value:.0f}"
    return f"{value:.2f} %" if unit == "%" else f"{format_count(value)}x"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    lines = [headings, ["-" * width for width in widths], *rows]
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |"
        for line in lines
    )
