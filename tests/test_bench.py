"""The benchmark: its arithmetic, its report of failures, and one quick run. No test looks at how fast."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench.contenders import BASELINE, CONTENDERS
from bench.contenders.base import Contender
from bench.harness import measure
from bench.measure import format_seconds, format_size, parse_size, percentile, summarize
from bench.records import Effort, Report, Spec
from bench.report import show

ContenderOf = Callable[[str, str], Contender]

ROOT = Path(__file__).parent.parent
SPEC = Spec("round-trip", (64, 4096), Effort(bytes=1 << 16, most=2, fewest=1), "own", "asyncio")


@pytest.mark.parametrize(
    ("text", "size"),
    [("4KiB", 4096), ("1 MiB", 1 << 20), ("1.5kib", 1536), ("150MiB", 150 << 20), ("7", 7), ("12 B", 12)],
)
def test_a_size_is_read_with_and_without_a_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-4KiB", "4KB", "four", "0.3 B", "4 KiB 2", "1e3"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(1, "1 B"), (1023, "1023 B"), (4096, "4 KiB"), (1536, "1.5 KiB"), (150 << 20, "150 MiB")],
)
def test_a_size_is_written_in_its_largest_unit(size: int, text: str) -> None:
    assert format_size(size) == text
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.234e-6, "1.23 us"),
        (999.4e-6, "999 us"),
        (999.6e-6, "1.00 ms"),
        (9.996e-3, "10.0 ms"),
        (0.1234, "123 ms"),
        (2.5, "2.50 s"),
    ],
)
def test_a_duration_is_written_with_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, 99) == 99
    assert percentile(values, 50) == 50
    assert percentile(values, 0) == 1
    assert percentile(values, 100) == 100
    assert percentile([3.0, 1.0, 2.0], 99) == 3


@given(st.lists(st.integers(0, 1000), min_size=1), st.floats(0, 100))
def test_a_percentile_is_the_smallest_value_that_enough_values_do_not_exceed(
    values: list[int], percent: float
) -> None:
    found = percentile(values, percent)
    needed = percent * len(values) / 100
    assert sum(value <= found for value in values) >= needed
    below = [value for value in values if value < found]
    assert not below or len(below) < needed


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_a_percentile_that_means_nothing_is_refused(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, percent)


def test_a_summary_is_in_seconds_and_its_rate_is_that_of_the_median() -> None:
    summary = summarize([2_000_000, 1_000_000, 9_000_000], bytes_per_trip=4_000_000)
    assert (summary.trips, summary.median_s, summary.p99_s, summary.min_s) == (3, 0.002, 0.009, 0.001)
    assert summary.gigabytes_per_second == pytest.approx(2.0)


def test_large_tensors_make_fewer_trips() -> None:
    effort = Effort(bytes=1 << 20, most=100, fewest=3)
    assert [effort.trips(size) for size in (1, 1 << 16, 1 << 20)] == [100, 16, 3]


def test_the_baseline_is_a_contender() -> None:
    assert BASELINE in CONTENDERS


@pytest.fixture
def contender_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ContenderOf:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))

    def write(name: str, body: str) -> Contender:
        (tmp_path / f"{name}.py").write_text(dedent(body))
        return Contender(name, name, "made by a test")

    return write


async def report_of(contender: Contender, deadline_s: float) -> Report:
    return await measure([contender], SPEC, baseline=BASELINE, rounds=2, deadline_s=deadline_s)


def shown(report: Report) -> str:
    text = StringIO()
    show(report, Console(file=text, width=140))
    return text.getvalue()


async def test_a_contender_that_crashes_is_reported_with_what_it_wrote(contender_of: ContenderOf) -> None:
    report = await report_of(contender_of("crashing", "def pair(): raise RuntimeError('out of luck')"), 60)
    assert report.results == []
    (failure,) = report.failures
    assert (failure.contender, failure.round, failure.size_bytes) == ("crashing", 0, 64)
    assert "exit status 1" in failure.reason
    assert "out of luck" in failure.output
    assert "FAILED crashing" in shown(report)
    assert "out of luck" in shown(report)


async def test_a_contender_that_hangs_is_killed_and_reported(contender_of: ContenderOf) -> None:
    report = await report_of(contender_of("hanging", "import threading; threading.Event().wait()"), 0.5)
    (failure,) = report.failures
    assert "did not finish 64 B" in failure.reason
    assert "FAILED hanging" in shown(report)


async def test_a_far_side_that_dies_is_reported_though_the_near_side_would_wait_for_ever(
    contender_of: ContenderOf,
) -> None:
    dying = """
        import os, threading
        from contextlib import asynccontextmanager

        class Port:
            async def send(self, tensor): pass
            async def receive(self): threading.Event().wait()

        class Near:
            @asynccontextmanager
            async def open(self): yield Port()

        class Far:
            def open(self): os._exit(7)

        def pair(): return Near(), Far()
    """
    report = await report_of(contender_of("dying", dying), 100)
    (failure,) = report.failures
    assert "the answering process ended with exit status 7" in failure.output


async def test_an_answer_with_another_content_is_reported(contender_of: ContenderOf) -> None:
    wrong = """
        from bench.contenders import raw_socket

        class Port(raw_socket.SocketPort):
            async def receive(self): return (await super().receive()).fill_(255)

        raw_socket.SocketPort = Port
        pair = raw_socket.pair
    """
    report = await report_of(contender_of("wrong", wrong), 60)
    (failure,) = report.failures
    assert "brought back another tensor" in failure.output


def test_a_quick_run_writes_json_alone_to_standard_output() -> None:
    command = [sys.executable, "-m", "bench", "--quick", "--sizes", "4KiB", "--json", "-"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["failures"] == []
    assert (report["schema"], report["workload"], report["rounds"]) == (1, "round-trip", 2)
    assert report["baseline"] == BASELINE
    assert (report["loop"], report["answer"]) == ("uvloop", "own")
    assert {"cores", "cpu", "memory_bytes", "kernel", "python", "versions"} <= report["machine"].keys()
    assert report["machine"]["versions"]["torch"] != "not installed"
    assert [result["contender"] for result in report["results"]] == list(CONTENDERS)
    for result in report["results"]:
        summary = result["summary"]
        assert result["size_bytes"] == 4096
        assert summary["trips"] > 0
        assert 0 < summary["min_s"] <= summary["median_s"] <= summary["p99_s"]
        assert summary["gigabytes_per_second"] > 0
        assert result["ratio"] > 0
        assert len(result["round_medians_s"]) == len(result["round_ratios"]) == 2
        assert result["contender"] in done.stderr


def test_a_size_that_cannot_be_read_is_a_usage_error() -> None:
    command = [sys.executable, "-m", "bench", "--sizes", "4KB"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'4KB' is not a size" in done.stderr
