"""The plot of a run: a row for each quantity, a column for each link, a line for each process."""

from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from verification.soak.records import LINKS, Report, series
from verification.soak.verdict import WARM_UP

__all__ = ["draw"]

_WIDTH_IN, _ROW_IN = 12.0, 1.75
_DPI = 110
_MIB = 1 << 20
_RATES = (
    60  # points of a rate, each over several samples: a single interval may contain one large tensor or none
)
_COLOURS = ("tab:red", "tab:blue", "tab:green")


class _Row(NamedTuple):
    number: str
    title: str
    scale: float = 1.0
    is_rate: bool = False  # the number is a counter, whose increase per second is drawn
    from_zero: bool = True  # unless the variation is small compared with the values


_ROWS = (
    _Row("own memory", "anonymous\nmemory, MiB", _MIB),
    _Row("shared memory", "shared memory\nresident, MiB", _MIB),
    _Row("other shared memory", "the same without\nwhat is kept warm,\nMiB", _MIB),
    _Row("object blocks", "Python's memory\nblocks, thousands", 1000, from_zero=False),
    _Row("descriptors", "descriptors"),
    _Row("threads", "threads"),
    _Row("mappings", "mappings", from_zero=False),
    _Row("fragmentation", "fragmentation\nof free bytes, %", 0.01),
    _Row("bytes in use", "arena bytes\nin use, MiB", _MIB),
    _Row("bytes", "throughput,\nMiB a second", _MIB, is_rate=True),
    _Row("most wait", "longest wait\nof a send, s"),
)


def draw(report: Report, path: Path) -> None:
    """Write the plot as PNG."""
    with mpl.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True}):
        figure = Figure((_WIDTH_IN, _ROW_IN * len(_ROWS) + 1), layout="constrained")
        figure.suptitle(
            f"Soak of {report.seconds:g} s, seed {report.seed}; the warm-up, which is not judged, is grey"
        )
        panels = figure.subplots(len(_ROWS), len(LINKS), sharex=True, sharey="row", squeeze=False)
        for row, axes_of_row in zip(_ROWS, panels, strict=True):
            for link, axes in zip(LINKS, axes_of_row, strict=True):
                _panel(report, link, row, axes)
            axes_of_row[0].set_ylabel(row.title)
            if row.from_zero:
                axes_of_row[0].set_ylim(bottom=0)  # of both links, which share the axis
        for link, axes in zip(LINKS, panels[0], strict=True):
            axes.set_title(f"{link} link, {report.visitors[link]} visiting processes", fontsize=10)
        for axes in panels[-1]:
            axes.set_xlabel("seconds")
        handles = {line.get_label(): line for axes in panels.flat for line in axes.get_lines() if axes.lines}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
        figure.savefig(path, dpi=_DPI)


def _panel(report: Report, link: str, row: _Row, axes: Axes) -> None:
    axes.axvspan(0, WARM_UP * report.seconds, color="0.5", alpha=0.12, linewidth=0)
    for process, colour in zip(report.processes, _COLOURS, strict=True):
        times, values = series(report, link, process, row.number)
        if row.is_rate:
            step = max(1, len(times) // _RATES)
            times, values = times[::step], values[::step]
            rates = [
                (value - before) / (time - earlier)
                for earlier, time, before, value in zip(times, times[1:], values, values[1:], strict=False)
            ]
            times, values = times[1:], rates
        if times:
            scaled = [value / row.scale for value in values]
            axes.plot(times, scaled, color=colour, label=process, linewidth=0.9, alpha=0.85)
    axes.set_xlim(0, report.seconds)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.tick_params(labelleft=True)
