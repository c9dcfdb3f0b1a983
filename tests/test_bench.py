"""The benchmarks count calls and measure real runs; their speed is not checked here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.calls import KINDS, Kind, count

ROOT = Path(__file__).parents[1]
MEASURED = ["torch-queue", "raw-socket", "raw-socket-loop", "memcpy"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_step_takes_no_more_calls_than_its_goal_allows(kind: Kind) -> None:
    assert 10 < count(kind) <= kind.most


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.extended
def test_a_quick_run_measures_writes_and_prints(tmp_path: Path) -> None:
    names = [word for name in MEASURED for word in ("--contender", name)]
    done = _bench(
        *("--quick", "--sizes", "4KiB", "--workload", "round-trip"), *names, *("--results", str(tmp_path))
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "latest.json").read_text())
    assert (report["failures"], report["skips"]) == ([], [])
    assert [result["contender"] for result in report["results"]] == MEASURED
    for result in report["results"]:
        numbers = result["numbers"]
        assert (result["size_bytes"], len(result["rounds"])) == (4096, 1)
        assert 0 < numbers["median_s"] <= numbers["p99_s"]
        assert len(result["ratios"]) == 1
        assert result["contender"] in done.stderr  # the progress
    assert "## Goals" in (tmp_path / "latest.md").read_text()
    assert (tmp_path / "latency.png").exists()


@pytest.mark.extended
def test_a_contender_that_fails_makes_the_exit_status_1(tmp_path: Path) -> None:
    done = _bench(
        *("--quick", "--sizes", "4KiB", "--workload", "round-trip", "--contender", "raw-socket"),
        *("--deadline", "0.001", "--results", str(tmp_path)),
    )
    assert done.returncode == 1
    assert "FAILED raw-socket in round-trip, round 1" in done.stdout
    assert "was killed" in done.stdout
