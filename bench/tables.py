"""Write a report as Markdown: the goals, one or two tables for each workload, and the failures."""

from collections.abc import Iterator, Sequence

from bench.measure import format_count, format_seconds, format_size
from bench.records import Loop, Participant, Report, Skip, Verdict
from bench.views import VIEWS, Cell, Flat, Pivot
from bench.workloads import WORKLOADS

__all__ = ["failures", "goals", "machine", "markdown", "skipped", "workloads"]

_NOT_MEASURED = "-"
_MET, _MISSED = "met", "MISSED"


def markdown(report: Report) -> str:
    """Return the whole report, the goals first."""
    parts = ["# Benchmark", machine(report), "## Goals", goals(report), *workloads(report)]
    if report.failures:
        parts += ["## Failures", failures(report)]
    return "\n\n".join([*parts, "## Contenders", _participants(report)]) + "\n"


def goals(report: Report) -> str:
    """Return a summary with the missed goals, and the table of all goals with their measured numbers."""
    rows = [
        [
            verdict.work,
            verdict.against,
            verdict.goal or "(for comparison)",
            _measured(verdict),
            _outcome(verdict),
        ]
        for verdict in report.goals
    ]
    outcomes = [row[-1] for row in rows if row[-1]]
    table = _table(["work", "against", "goal", "measured", ""], rows)
    meaning = "Measured is the middle round, in brackets the lowest and the highest."
    summary = f"{outcomes.count(_MET)} of {len(outcomes)} goals met. {meaning}"
    missed = [
        f"- {verdict.work}{_against(verdict)}: {_measured(verdict)}; the goal is {verdict.goal}"
        for verdict in report.goals
        if _outcome(verdict) == _MISSED
    ]
    return "\n\n".join([summary, *(["Missed:\n\n" + "\n".join(missed)] if missed else []), table])


def workloads(report: Report) -> Iterator[str]:
    """Return a heading and the tables of each workload, with a list of missing contenders."""
    for name in report.workloads:
        yield f"## {WORKLOADS[name].title}"
        for view in VIEWS[name]:
            if not any(result.workload == name for result in report.results):
                yield "No contender was measured."
                break
            yield view.caption
            yield _pivot(report, name, view) if isinstance(view, Pivot) else _flat(report, name, view)
        names = {one.name for one in _participants_in(report, name)}
        skips = [skip for skip in report.skips if skip.workload in (name, None) and skip.contender in names]
        if missing := _reasons(skips):
            yield f"Not measured (`{_NOT_MEASURED}`): {missing}"


def skipped(report: Report) -> str:
    """Name the contenders that were left out of the whole run, and why; empty if there are none."""
    return _reasons([skip for skip in report.skips if skip.workload is None])


def failures(report: Report) -> str:
    """Return the failures, each with its reason and output."""
    texts: dict[str, list[str]] = {}
    for failure in report.failures:
        # A contender that never works fails every workload in the same way; it is shown once.
        texts.setdefault(failure.output, []).append(
            f"FAILED {_label(failure.contender, failure.loop)} in {failure.workload}, "
            f"round {failure.round + 1}: it {failure.reason}."
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
    answers = "with a new tensor" if report.answer == "own" else "with the tensor it received"
    return (
        f"{kind} of {report.seconds:.0f} s on {it.cores} cores ({it.cpu}), {it.memory_bytes / 2**30:.0f} GiB "
        f"of memory, Linux {it.kernel}, Python {it.python}; {versions}. Load {it.load_before:.1f} before and "
        f"{it.load_after:.1f} after. In round trips the far side answers {answers}. The baseline is "
        f"{report.baseline} unless stated otherwise. Each contender runs in fresh processes, in "
        "alternating rounds: read the ratios, not the times."
    )


def _participants(report: Report) -> str:
    return _table(["name", "description"], [[one.name, one.what] for one in report.contenders])


def _participants_in(report: Report, workload: str) -> list[Participant]:
    return [one for one in report.contenders if WORKLOADS[workload].admits(one)]


def _measured(verdict: Verdict) -> str:
    if verdict.measured is None or verdict.lowest is None or verdict.highest is None:
        return _NOT_MEASURED
    text, low, high = (
        _write(value, verdict.unit) for value in (verdict.measured, verdict.lowest, verdict.highest)
    )
    return text if low == high else f"{text} ({low} to {high})"


def _outcome(verdict: Verdict) -> str:
    if not verdict.goal:
        return ""
    return "not measured" if verdict.met is None else _MET if verdict.met else _MISSED


def _against(verdict: Verdict) -> str:
    return f", against {verdict.against}" if verdict.against else ""


def _write(value: float, unit: str) -> str:
    if unit == "s":
        return format_seconds(value)
    if unit == "calls":
        return f"{value:.0f}"
    return f"{value:.2f} %" if unit == "%" else f"{format_count(value)}x"


class _Grid:
    """The part of a report on one workload."""

    def __init__(self, report: Report, workload: str) -> None:
        self._found = {
            (result.contender, result.loop, result.size_bytes, result.peers): result
            for result in report.results
            if result.workload == workload
        }
        self._failed = [
            (failure.contender, failure.loop) for failure in report.failures if failure.workload == workload
        ]
        self._participants = _participants_in(report, workload)

    @property
    def cases(self) -> list[tuple[int, int]]:
        """Return the measured sizes and numbers of peers."""
        return sorted({(size, peers) for _, _, size, peers in self._found})

    def rows(self) -> Iterator[tuple[str, Loop | None]]:
        """Return every contender on each loop, even without results, but limits only with results."""
        known = [key[:2] for key in self._found]
        for one in self._participants:
            loops = list(dict.fromkeys(loop for name, loop in [*known, *self._failed] if name == one.name))
            for loop in loops or ([] if one.is_limit else [None]):
                yield one.name, loop

    def cell(self, row: tuple[str, Loop | None], case: tuple[int, int], write: Cell) -> str:
        result = self._found.get((*row, *case))
        if result is not None:
            return write(result)
        return "failed" if row in self._failed else _NOT_MEASURED


def _pivot(report: Report, workload: str, view: Pivot) -> str:
    grid = _Grid(report, workload)
    several = len({peers for _, peers in grid.cases}) > 1
    peer = WORKLOADS[workload].peer if several else None
    headings = [_case(size, peers, peer) for size, peers in grid.cases]
    rows = [[_label(*row), *(grid.cell(row, case, view.cell) for case in grid.cases)] for row in grid.rows()]
    return _table(["", *headings], rows)


def _flat(report: Report, workload: str, view: Flat) -> str:
    grid = _Grid(report, workload)
    rows = [
        [
            _label(*row),
            format_size(case[0]),
            *(grid.cell(row, case, write) for write in view.columns.values()),
        ]
        for case in grid.cases
        for row in grid.rows()
    ]
    return _table(["", "size", *view.columns], rows)


def _case(size: int, peers: int, peer: str | None) -> str:
    if peer is None:
        return format_size(size)
    return f"{format_size(size)}, {peers} {peer}{'s' if peers > 1 else ''}"


def _label(contender: str, loop: Loop | None) -> str:
    return contender if loop is None else f"{contender} ({loop})"


def _reasons(skips: Sequence[Skip]) -> str:
    grouped: dict[str, list[str]] = {}
    for skip in skips:
        grouped.setdefault(skip.reason, []).append(skip.contender)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in grouped.items())


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    lines = [headings, ["-" * width for width in widths], *rows]
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |"
        for line in lines
    )
