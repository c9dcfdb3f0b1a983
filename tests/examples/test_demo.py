"""The demo uploads real videos to a server with workers and an engine, as a user runs it."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from demo.clips import sample_clips
from tests.examples.programs import ROOT
from tests.pages import LIMIT_S

pytestmark = pytest.mark.timeout(LIMIT_S)

# 132, 250 and 120 frames of three clips.
PIXELS = 132 * 1280 * 720 + 250 * 640 * 272 + 120 * 176 * 144


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of the demo's temporary files, and check at the end that it is empty."""
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)
        assert list(Path(folder).iterdir()) == []


@contextmanager
def demo(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Start the command in a new session, as a shell in a new terminal would."""
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "demo", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:  # a test failed half-way
                os.killpg(process.pid, signal.SIGKILL)


def run(*arguments: str | Path) -> tuple[int, dict[str, Any], str]:
    """Run the demo to its end, and return its status, the JSON and standard output."""
    with demo(*arguments) as process:
        output, _ = process.communicate()
    return process.returncode, json.loads(output.splitlines()[-1]), output


def started(process: subprocess.Popen[str]) -> dict[str, int]:
    """Wait for the first upload, and return the process ids of the engine, the server and a worker."""
    assert process.stderr
    children = process.stderr.readline().replace(",", "").split()
    _, _, workers = process.stderr.readline().partition(": ")
    assert process.stderr.readline().startswith("uploading")
    return {"engine": int(children[2]), "server": int(children[-1]), "worker": int(workers.split(",")[0])}


def wait_for_all(session: int) -> None:
    """Wait for the end of all processes of a session."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = entry.read_text().rpartition(")")[2].split()[:4]
            if int(of) != session or state == "Z":
                continue
            with open(os.pidfd_open(int(entry.parent.name)), "rb") as end:
                assert select.select([end], [], [], 30)[0], f"{entry.parent} is still running"
        except (FileNotFoundError, ProcessLookupError):
            continue


@pytest.mark.parametrize(
    ("link", "workers"), [("unix", 2), pytest.param("queue", 1, marks=pytest.mark.extended)]
)
def test_the_demo_transfers_every_video_without_a_copy(temporary: Path, link: str, workers: int) -> None:
    status, last, output = run(
        *("--requests", "3", "--concurrency", "3", "--max-concurrent-videos", "1"),
        *("--link", link, "--workers", str(workers)),
    )

    assert status == 0
    assert (last["videos"], last["frames"]) == (3, 132 + 250 + 120)
    assert (last["refused"], last["failed"], last["lost"], last["mismatched"]) == (0, 0, 0, 0)
    assert (last["link"], len(last["workers"])) == (link, workers)
    for worker in last["workers"]:
        assert worker["videos"] == worker["videos_in_place"]
        assert worker["peak_in_flight"] <= 1
        assert worker["peak_shared_bytes"] <= worker["shared_bytes_limit"]
    assert sum(worker["bytes_in_place"] for worker in last["workers"]) == 3 * PIXELS
    assert "30 (1.20 s), 76 (3.04 s), 137 (5.48 s), 187 (7.48 s), 242 (9.68 s)" in output


@pytest.mark.extended
def test_files_that_are_not_videos_are_refused_and_others_are_processed(
    temporary: Path, tmp_path: Path
) -> None:
    empty, letter = tmp_path / "empty.mp4", tmp_path / "letter.mp4"
    empty.touch()
    letter.write_text("dear friend\n" * 99)

    assert run(empty, letter, "--requests", "2", "--workers", "1")[0] == 1
    status, last, output = run(letter, empty, *sample_clips(), "--requests", "5", "--workers", "1")
    assert status == 0
    assert (last["videos"], last["refused"], last["lost"], last["mismatched"]) == (3, 2, 0, 0)
    assert "the file is empty" in output
    assert "not a video" in output


@pytest.mark.extended
@pytest.mark.parametrize(
    ("victim", "number", "status", "text"),
    [
        ("all", signal.SIGINT, 130, "stopped"),
        ("all", signal.SIGTERM, 143, "stopped"),
        ("engine", signal.SIGKILL, 1, "error: the engine process was killed by SIGKILL"),
        ("server", signal.SIGKILL, 1, "error: the API server process was killed by SIGKILL"),
        ("worker", signal.SIGKILL, 1, "error: a worker of the API server"),
    ],
    ids=["ctrl-c", "sigterm", "engine", "server", "worker"],
)
def test_a_signal_ends_every_process_and_leaves_nothing_behind(
    temporary: Path, victim: str, number: signal.Signals, status: int, text: str
) -> None:
    with demo("--requests", "100000") as process:
        pids = started(process)
        if victim == "all":
            os.killpg(process.pid, number)
        else:
            os.kill(pids[victim], number)
        output, errors = process.communicate()
    assert (process.returncode, output) == (status, "")
    assert errors.startswith(text)
    assert errors.count("\n") == 1
    wait_for_all(process.pid)
