"""Draw a report: latency, throughput, two hosts, loop lag, senders, requests, broadcast, serving."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.measure import format_rate, format_size
from bench.records import Loop, Report, Result

__all__ = ["draw"]

_WIDTH_IN, _HEIGHT_IN = 10.0, 5.5
_DPI = 110
_MIB = 1 << 20
_COLOURS = (
    *("tab:red", "tab:orange", "tab:blue", "tab:green", "tab:purple"),
    *("tab:cyan", "tab:brown", "black", "tab:pink", "tab:olive"),
)
_LABEL_PT = 8.5
_LIMIT_STYLES = ("-", "--", ":", "-.")
_REQUESTS = {"request-echo": "answer of the same size", "request-answer": "answer of 4 KiB"}
_SERVING = {"serving-decoding": "with decoding", "serving-transfer": "transfer only"}
_SERVED = {  # the number, and the factor of its unit
    "requests a second,\nmore is better": ("requests_per_s", 1.0),
    "latency at p99, s": ("p99_s", 1.0),
    "CPU of a request, ms": ("cpu_s_per_request", 1e3),
    "peak memory, MiB": ("peak_bytes", 1 / _MIB),
    "loop late at p99.9, ms": ("late_p999_s", 1e3),
}
_FEW_READERS, _MANY_READERS = 1, 4
_LAGS = {"p50": "p50", "p99": "p99", "p999": "p99.9", "max": "max"}

_Lines = dict[str, list[Result]]


def draw(report: Report, folder: Path) -> list[Path]:
    """Write the plots into `folder`, if there is data for them, and return their paths."""
    drawings: dict[str, Callable[[Report], Figure | None]] = {
        "latency.png": _latency,
        "throughput.png": _throughput,
        "two-hosts.png": _two_hosts,
        "loop-lag.png": _loop_lag,
        "senders.png": _senders,
        "requests.png": _requests,
        "broadcast-readers.png": _by_readers,
        "broadcast-sizes.png": _by_size,
        "serving.png": _serving,
    }
    written = []
    with mpl.rc_context({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True}):
        for name, drawing in drawings.items():
            figure = drawing(report)
            if figure is not None:
                figure.savefig(folder / name, dpi=_DPI)
                written.append(folder / name)
    return written


def _latency(report: Report) -> Figure | None:
    lines = _lines(report, "round-trip")
    if not lines:
        return None
    figure, axes = _figure("Round trip of a tensor: median, less is better")
    _plot_by_size(report, axes, lines, lambda result: 1e3 * result.numbers["median_s"])
    for name, results in _lines(report, "allocated").items():
        style = _style(report, name) | {"linestyle": "--", "marker": "s", "label": f"{name}, allocated"}
        medians = [1e3 * result.numbers["median_s"] for result in results]
        axes.plot([result.size_bytes for result in results], medians, **style)
    axes.set_ylabel("milliseconds")
    _label_lines(figure, [axes])
    return figure


def _throughput(report: Report) -> Figure | None:
    lines = _lines(report, "round-trip")
    if not lines:
        return None
    figure, axes = _figure("Round trip of a tensor: throughput, both ways counted, more is better")
    _plot_by_size(report, axes, lines, lambda result: result.numbers["gigabytes_per_s"])
    axes.set_ylabel("GB/s")
    _label_lines(figure, [axes])
    return figure


def _two_hosts(report: Report) -> Figure | None:
    lines = _lines(report, "two-hosts")
    if not lines:
        return None
    figure, axes = _figure("Round trip of a tensor between two hosts: median, less is better")
    _plot_by_size(report, axes, lines, lambda result: 1e3 * result.numbers["median_s"])
    axes.set_ylabel("milliseconds")
    _label_lines(figure, [axes])
    return figure


def _loop_lag(report: Report) -> Figure | None:
    results = [result for result in report.results if result.workload == "loop-lag"]
    if not results:
        return None
    figure, axes = _figure("Lateness of a 1 ms ticker, idle (pale) and while sending 150 MiB back to back")
    width = 0.8 / (2 * len(results))
    for place, result in enumerate(results):
        label = f"{result.contender} ({result.loop})"
        for busy, state in enumerate(("idle", "busy")):
            heights = [1e3 * result.numbers[f"{state}_{name}_s"] for name in _LAGS]
            lefts = [group - 0.4 + (2 * place + busy + 0.5) * width for group in range(len(_LAGS))]
            bars = axes.bar(
                lefts,
                heights,
                width,
                color=_COLOURS[place % len(_COLOURS)],
                alpha=1.0 if busy else 0.35,
                label=label if busy else None,
            )
            axes.bar_label(bars, fmt="%.2g", fontsize=7, padding=3, rotation=90)
    axes.set_xticks(range(len(_LAGS)), list(_LAGS.values()))
    axes.margins(y=0.1)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("milliseconds late, less is better")
    axes.legend(loc="upper left", fontsize=9)
    return figure


def _senders(report: Report) -> Figure | None:
    lines = _lines(report, "fan-in")
    sizes = sorted({result.size_bytes for results in lines.values() for result in results})
    if not sizes:
        return None
    figure = Figure((_WIDTH_IN, _HEIGHT_IN), layout="constrained")
    figure.suptitle("Rate by senders to one receiver, more is better")
    panels = figure.subplots(1, len(sizes), squeeze=False)[0]
    counts = sorted({result.peers for results in lines.values() for result in results})
    for axes, size in zip(panels, sizes, strict=True):
        small = size < _MIB
        number = "tensors_per_s" if small else "gigabytes_per_s"
        for name, results in lines.items():
            mine = [result for result in results if result.size_bytes == size]
            places = [counts.index(result.peers) for result in mine]
            axes.plot(places, [result.numbers[number] for result in mine], **_style(report, name))
        axes.set_xticks(range(len(counts)), [str(count) for count in counts])
        axes.set_xlabel("senders")
        axes.set_title(format_size(size))
        axes.set_ylabel("tensors a second" if small else "GB/s")
        if small:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:,g}")
        else:
            axes.set_ylim(bottom=0)
    _label_lines(figure, panels)
    return figure


def _requests(report: Report) -> Figure | None:
    panels = {name: lines for name in _REQUESTS if (lines := _lines(report, name))}
    if not panels:
        return None
    figure = Figure((_WIDTH_IN, _HEIGHT_IN), layout="constrained")
    figure.suptitle("Request and reply: median, less is better")
    row = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (name, lines) in zip(row, panels.items(), strict=True):
        _plot_by_size(report, axes, lines, lambda result: 1e3 * result.numbers["median_s"])
        axes.set_title(_REQUESTS[name])
    row[0].set_ylabel("milliseconds")
    _label_lines(figure, row)
    return figure


def _by_readers(report: Report) -> Figure | None:
    lines = _lines(report, "broadcast")
    results = [result for each in lines.values() for result in each]
    if not results:
        return None
    sizes = sorted({result.size_bytes for result in results})
    counts = sorted({result.peers for result in results})
    figure = Figure((_WIDTH_IN, _HEIGHT_IN), layout="constrained")
    figure.suptitle("Until all readers have touched a tensor, by their number: median, less is better")
    ends = list(dict.fromkeys((sizes[0], sizes[-1])))
    panels = figure.subplots(1, len(ends), squeeze=False)[0]
    for axes, size in zip(panels, ends, strict=True):
        for name, each in lines.items():
            mine = [result for result in each if result.size_bytes == size]
            places = [counts.index(result.peers) for result in mine]
            axes.plot(places, [1e3 * result.numbers["median_s"] for result in mine], **_style(report, name))
        axes.set_xticks(range(len(counts)), [str(count) for count in counts])
        axes.set_xlabel("readers")
        axes.set_title(format_size(size))
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")  # the readers of one size may lie within a decade
    panels[0].set_ylabel("milliseconds")
    _label_lines(figure, panels)
    return figure


def _by_size(report: Report) -> Figure | None:
    lines = _lines(report, "broadcast")
    counts = [count for count in (_FEW_READERS, _MANY_READERS) if _of_readers(lines, count)]
    if not counts:
        return None
    figure = Figure((_WIDTH_IN, _HEIGHT_IN), layout="constrained")
    figure.suptitle("Until all readers have touched a tensor, by its size: median, less is better")
    panels = figure.subplots(1, len(counts), squeeze=False, sharey=True)[0]
    for axes, count in zip(panels, counts, strict=True):
        _plot_by_size(
            report, axes, _of_readers(lines, count), lambda result: 1e3 * result.numbers["median_s"]
        )
        axes.set_title(f"{count} reader{'s' if count > 1 else ''}")
    panels[0].set_ylabel("milliseconds")
    _label_lines(figure, panels)
    return figure


def _serving(report: Report) -> Figure | None:
    rows = {name: lines for name in _SERVING if (lines := _lines(report, name))}
    if not rows:
        return None
    figure = Figure((_WIDTH_IN, _HEIGHT_IN), layout="constrained")
    figure.suptitle("Three API servers and one engine; less is better, unless stated otherwise")
    names = list(dict.fromkeys(name for lines in rows.values() for name in lines))
    panels = figure.subplots(len(rows), len(_SERVED), squeeze=False)
    for row, (workload, lines) in zip(panels, rows.items(), strict=True):
        for axes, (title, (number, scale)) in zip(row, _SERVED.items(), strict=True):
            for name, (result,) in lines.items():
                height = result.numbers[number] * scale
                color = _style(report, name)["color"]
                bars = axes.bar(names.index(name), height, color=color, label=name)
                axes.bar_label(bars, fmt=format_rate, fontsize=8, padding=2)
            axes.set_xlim(-0.6, len(names) - 0.4)
            axes.set_xticks([])
            axes.margins(y=0.15)
            axes.grid(visible=False, axis="x")
            if axes in panels[0]:
                axes.set_title(title, fontsize=9)
        row[0].set_ylabel(_SERVING[workload])
    handles = {
        label: handle
        for axes in panels.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(names), fontsize=9)
    return figure


def _of_readers(lines: _Lines, count: int) -> _Lines:
    chosen = {name: [result for result in each if result.peers == count] for name, each in lines.items()}
    return {name: results for name, results in chosen.items() if results}


def _figure(title: str) -> tuple[Figure, Axes]:
    figure = Figure((_WIDTH_IN, _HEIGHT_IN), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    return figure, axes


def _lines(report: Report, workload: str) -> _Lines:
    # One line for each contender, on uvloop if there are two loops: more lines would be illegible.
    wanted: dict[str, Loop | None] = {}
    mine = [result for result in report.results if result.workload == workload]
    for result in mine:
        if result.contender not in wanted or result.loop == "uvloop":
            wanted[result.contender] = result.loop
    return {
        name: [result for result in mine if (result.contender, result.loop) == (name, loop)]
        for name, loop in wanted.items()
    }


def _plot_by_size(report: Report, axes: Axes, lines: _Lines, value: Callable[[Result], float]) -> None:
    for name, results in lines.items():
        axes.plot(
            [result.size_bytes for result in results], list(map(value, results)), **_style(report, name)
        )
    sizes = sorted({result.size_bytes for results in lines.values() for result in results})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(sizes, [format_size(size) for size in sizes], rotation=45)
    axes.minorticks_off()
    axes.set_xlabel("size of the tensor")


def _style(report: Report, name: str) -> dict[str, Any]:
    # Contenders that never share a plot may look the same.
    (carries,) = [one.carries for one in report.contenders if one.name == name]
    alike = [one for one in report.contenders if one.carries == carries]
    limits = [one.name for one in alike if one.is_limit]
    if name in limits:
        linestyle = _LIMIT_STYLES[limits.index(name) % len(_LIMIT_STYLES)]
        return {"label": f"limit: {name}", "color": "0.65", "linestyle": linestyle, "linewidth": 1.2}
    if not (name.startswith("aiotensor") or name == report.baseline):
        return {"label": name, "color": "0.65", "marker": "o", "markersize": 3, "linewidth": 1.2, "zorder": 2}
    important = [one.name for one in alike if one.name.startswith("aiotensor") or one.name == report.baseline]
    return {
        "label": name,
        "color": _COLOURS[important.index(name) % len(_COLOURS)],
        "marker": "o",
        "markersize": 5,
        "linewidth": 2.2,
        "zorder": 3,
    }


def _label_lines(figure: Figure, panels: Sequence[Axes]) -> None:
    """Write the name of each line next to its right end in the last panel, and keep the names apart.

    A legend names the lines that are missing in the last panel.
    """
    axes = panels[-1]
    names = {line.get_label() for line in axes.lines}
    for panel in panels[:-1]:
        only_here = [line for line in panel.lines if line.get_label() not in names]
        if only_here:
            panel.legend(handles=only_here, loc="upper left", fontsize=_LABEL_PT)
    figure.draw_without_rendering()  # the positions of the ends are known after the layout
    right = axes.get_xlim()[1]
    ends = []
    for line in axes.lines:
        x, y = (np.asarray(values, float)[-1] for values in line.get_data())
        at = axes.transData.transform((x, y))[1]
        ends.append((at, y, line))
    gap = _LABEL_PT * figure.dpi / 72 * 1.15
    heights = _apart([at for at, *_ in sorted(ends, key=lambda end: end[0])], gap)
    for (at, y, line), height in zip(sorted(ends, key=lambda end: end[0]), heights, strict=True):
        axes.annotate(
            str(line.get_label()),
            (right, y),
            ((6, (height - at) * 72 / figure.dpi)),
            textcoords="offset points",
            va="center",
            fontsize=_LABEL_PT,
            color=line.get_color(),
            annotation_clip=False,
        )


def _apart(heights: list[float], gap: float) -> list[float]:
    """Move ascending heights apart, so that neighbours differ by a gap; groups stay near their places."""
    groups: list[list[float]] = []  # the heights of neighbours that touch, by their wanted places
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _bottom(groups[-1], gap) < _bottom(groups[-2], gap) + gap * len(groups[-2]):
            last = groups.pop()
            groups[-1] += last
    return [_bottom(group, gap) + gap * number for group in groups for number in range(len(group))]


def _bottom(group: list[float], gap: float) -> float:
    return sum(group) / len(group) - gap * (len(group) - 1) / 2
