"""Draw a report: one picture for each kind of workload."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.measure import format_rate, format_size
from bench.records import Report, Result
from bench.workloads import WORKLOADS

_SIZE_IN = (10.0, 5.5)
_DPI = 110
_MIB = 1 << 20
_OURS = ("tab:red", "tab:orange", "tab:blue", "tab:purple", "tab:pink")
_OTHERS = ("tab:green", "tab:cyan", "tab:brown", "tab:olive", "black", "tab:gray")
_LIMIT_STYLES = ("-", "--", ":", "-.")


class _Panel(NamedTuple):
    """Lines of a workload, by the size of tensors, or by the number of peers if a size is given."""

    workload: str
    title: str
    size: int | None = None
    number: str = "median_s"
    scale: float = 1e3
    unit: str = "milliseconds"


_LINES = {
    "latency.png": (
        "Round trip of a tensor: median, less is better",
        (
            _Panel("round-trip", "from ordinary memory"),
            _Panel("allocated", "allocated in the contender's memory"),
        ),
    ),
    "two-hosts.png": (
        "Round trip of a tensor between two hosts: median, less is better",
        (_Panel("two-hosts", "two network namespaces"),),
    ),
    "requests.png": (
        "Request and answer: median, less is better",
        (_Panel("request-echo", "answer of the same size"), _Panel("request-answer", "answer of 4 KiB")),
    ),
    "senders.png": (
        "Rate by senders to one receiver, more is better",
        (
            _Panel("fan-in", "4 KiB", 4 << 10, "tensors_per_s", 1, "tensors a second"),
            _Panel("fan-in", "1 MiB", _MIB, "gigabytes_per_s", 1, "GB/s"),
        ),
    ),
    "broadcast-readers.png": (
        "Until all readers have touched a tensor, by their number: median, less is better",
        (_Panel("broadcast", "4 KiB", 4 << 10), _Panel("broadcast", "150 MiB", 150 * _MIB)),
    ),
}

# The workload of each row, with the prefix of its numbers; the number of each column, with a factor.
_BARS: dict[str, tuple[str, dict[str, tuple[str, str]], dict[str, tuple[str, float]]]] = {
    "loop-lag.png": (
        "Lateness of a 1 ms ticker while 150 MiB are sent back to back, in ms; less is better",
        {"idle": ("loop-lag", "idle_"), "sending": ("loop-lag", "busy_")},
        {"p50": ("p50_s", 1e3), "p99": ("p99_s", 1e3), "p99.9": ("p999_s", 1e3), "max": ("max_s", 1e3)},
    ),
    "serving.png": (
        "Three API servers and one engine; less is better, unless stated otherwise",
        {"with decoding": ("serving-decoding", ""), "transfer only": ("serving-transfer", "")},
        {
            "requests a second,\nmore is better": ("requests_per_s", 1.0),
            "latency at p99, s": ("p99_s", 1.0),
            "CPU of a request, ms": ("cpu_s_per_request", 1e3),
            "peak memory, MiB": ("peak_bytes", 1 / _MIB),
            "loop late at p99.9, ms": ("late_p999_s", 1e3),
        },
    ),
}


def draw(report: Report, folder: Path) -> list[Path]:
    """Write the plots into `folder`, if there is data for them, and return their paths."""
    written = []
    with mpl.rc_context({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True}):
        for name in (*_LINES, *_BARS):
            figure = _lines(report, name) if name in _LINES else _bars(report, name)
            if figure is not None:
                figure.savefig(folder / name, dpi=_DPI)
                written.append(folder / name)
    return written


def _lines(report: Report, name: str) -> Figure | None:
    title, panels = _LINES[name]
    panels = tuple(panel for panel in panels if _results(report, panel.workload, panel.size))
    if not panels:
        return None
    names = _contenders(result for panel in panels for result in _results(report, panel.workload, panel.size))
    figure = Figure(_SIZE_IN, layout="constrained")
    figure.suptitle(title)
    row = figure.subplots(1, len(panels), squeeze=False, sharey=panels[0].size is None)[0]
    for axes, panel in zip(row, panels, strict=True):
        results = _results(report, panel.workload, panel.size)
        values = sorted({_place(result, panel) for result in results})
        for contender in _contenders(results):
            mine = [result for result in results if result.contender == contender]
            places = [values.index(_place(result, panel)) for result in mine]
            heights = [result.numbers[panel.number] * panel.scale for result in mine]
            axes.plot(places, heights, label=contender, **_style(report, contender, names))
        labels = [format_size(value) if panel.size is None else str(value) for value in values]
        axes.set_xticks(range(len(values)), labels)
        peers = "readers" if WORKLOADS[panel.workload].broadcasts else "senders"
        axes.set_xlabel("size of the tensor" if panel.size is None else peers)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.set_title(panel.title)
        axes.set_ylabel(panel.unit)
    _add_legend(figure, row)
    return figure


def _bars(report: Report, name: str) -> Figure | None:
    title, rows, columns = _BARS[name]
    rows = {label: row for label, row in rows.items() if _results(report, row[0])}
    if not rows:
        return None
    figure = Figure(_SIZE_IN, layout="constrained")
    figure.suptitle(title)
    contenders = _contenders(result for workload, _ in rows.values() for result in _results(report, workload))
    panels = figure.subplots(len(rows), len(columns), squeeze=False)
    for row, (label, (workload, prefix)) in zip(panels, rows.items(), strict=True):
        for axes, (heading, (number, scale)) in zip(row, columns.items(), strict=True):
            for result in _results(report, workload):
                place, height = contenders.index(result.contender), result.numbers[prefix + number] * scale
                color = _style(report, result.contender, contenders)["color"]
                bars = axes.bar(place, height, color=color, label=result.contender)
                axes.bar_label(bars, fmt=format_rate, fontsize=8, padding=2)
            axes.set_xlim(-0.6, len(contenders) - 0.4)
            axes.set_xticks([])
            axes.margins(y=0.15)
            axes.grid(visible=False, axis="x")
            if axes in panels[0]:
                axes.set_title(heading, fontsize=9)
        row[0].set_ylabel(label)
    _add_legend(figure, panels.flat)
    return figure


def _results(report: Report, workload: str, size: int | None = None) -> list[Result]:
    return [
        result
        for result in report.results
        if result.workload == workload and size in (None, result.size_bytes)
    ]


def _contenders(results: Iterable[Result]) -> list[str]:
    return list(dict.fromkeys(result.contender for result in results))


def _place(result: Result, panel: _Panel) -> int:
    return result.size_bytes if panel.size is None else result.peers


def _style(report: Report, name: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the style of one of the contenders of a picture."""
    limits = [one.name for one in report.contenders if one.is_limit]
    if name in limits:
        style = _LIMIT_STYLES[limits.index(name)]
        return {"color": "0.65", "linestyle": style, "marker": ".", "linewidth": 1.2}
    ours = name.startswith("aiotensor")
    alike = [one for one in names if one not in limits and one.startswith("aiotensor") == ours]
    color = (_OURS if ours else _OTHERS)[alike.index(name)]
    return {"color": color, "marker": "o", "markersize": 4, "linewidth": 2.2 if ours else 1.2}


def _add_legend(figure: Figure, panels: Iterable[Axes]) -> None:
    handles = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=9)
