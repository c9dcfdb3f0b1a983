"""The command itself, in small real runs, whose speed is not checked."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LIMITS = ["raw-socket", "raw-socket-loop", "memcpy-1"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_quick_run_measures_writes_and_prints(tmp_path: Path) -> None:
    names = [word for name in ("torch-queue", *LIMITS) for word in ("--contender", name)]
    places = ["--results", str(tmp_path), "--json", "-"]
    done = bench("--quick", "--sizes", "4KiB", "--workload", "round-trip", *names, *places)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "latest.json").read_text())
    assert (report["schema"], report["quick"], report["baseline"]) == (3, True, "torch-queue")
    assert (report["failures"], report["skips"]) == ([], [])
    assert {"cores", "cpu", "memory_bytes", "kernel", "python", "versions"} <= report["machine"].keys()
    assert report["machine"]["versions"]["torch"] != "not installed"
    assert [result["contender"] for result in report["results"]] == ["torch-queue", *LIMITS]
    for result in report["results"]:
        numbers = result["numbers"]
        assert (result["size_bytes"], len(result["rounds"])) == (4096, 1)
        assert 0 < numbers["min_s"] <= numbers["median_s"] <= numbers["p99_s"]
        assert result["ratio"] > 0
        assert result["contender"] in done.stderr
    assert "round-trip, round 1 of 1" in done.stderr
    assert "## Goals" in done.stderr
    assert "## Goals" in (tmp_path / "latest.md").read_text()
    assert (tmp_path / "latency.png").exists()


def test_a_contender_that_fails_makes_the_exit_status_1(tmp_path: Path) -> None:
    done = bench(
        *("--quick", "--sizes", "4KiB", "--workload", "round-trip", "--contender", "raw-socket"),
        *("--deadline", "0.001", "--results", str(tmp_path)),
    )
    assert done.returncode == 1
    assert "FAILED raw-socket in round-trip" in done.stdout
    assert "was killed" in done.stdout


def test_a_size_that_cannot_be_read_is_a_usage_error() -> None:
    done = bench("--sizes", "4KB")
    assert done.returncode == 2
    assert "'4KB' is not a size" in done.stderr
