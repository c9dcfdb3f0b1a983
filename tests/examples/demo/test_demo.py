"""The demo in a separate process, as a user runs it."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from tests.examples.programs import ROOT

UNFLUSHED = 120  # the status since Python 3.14, if the interpreter cannot flush standard error at its end
RED, BLUE = (220, 20, 20), (20, 20, 220)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the demo's temporary files."""
    # Not under `tmp_path`, which may be too long for the paths of sockets.
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@contextmanager
def demo(
    *arguments: str | Path,
    stdout: int | IO[bytes] = subprocess.PIPE,
    stderr: int | IO[bytes] = subprocess.PIPE,
) -> Iterator[subprocess.Popen[str]]:
    """Start the command in a new session, as a shell in a new terminal would."""
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "demo", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"},
        stdout=stdout,
        stderr=stderr,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:  # a test failed half-way
                for pid in processes_in_session(process.pid):
                    os.kill(pid, signal.SIGKILL)


def run(*arguments: str | Path) -> tuple[int, dict[str, Any], str, str]:
    """Run the demo to its end, and return its status, the JSON, standard output and standard error."""
    with demo(*arguments) as process:
        output, errors = process.communicate()
    return process.returncode, json.loads(output.splitlines()[-1]), output, errors


def pids_of_children(process: subprocess.Popen[str]) -> tuple[int, int]:
    """Read the line with the process ids of the engine and the server."""
    assert process.stderr
    words = process.stderr.readline().replace(",", "").split()
    assert words[0] == "engine:"
    return int(words[2]), int(words[-1])


def wait_for_uploads(process: subprocess.Popen[str]) -> list[int]:
    """Read the lines up to the first upload, and return the process ids of the workers."""
    assert process.stderr
    name, _, pids = process.stderr.readline().partition(": ")
    assert name == "its workers"
    assert process.stderr.readline().startswith("uploading")
    return [int(pid) for pid in pids.split(",")]


def processes_in_session(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(its_session) == session and state != "Z":
                found.append(int(entry.name))
    return found


def assert_all_ended(pids: list[int]) -> None:
    """Wait for processes that are ending, such as the resource tracker, which ends after its parent."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with open(descriptor, "rb") as end:
            assert select.select([end], [], [], 30)[0], f"process {pid} is still running"


@pytest.mark.parametrize(("link", "workers"), [("unix", 2), ("queue", 1)])
def test_the_demo_transfers_every_video_without_a_copy(temporary: Path, link: str, workers: int) -> None:
    status, last, output, errors = run(
        *("--requests", "6", "--concurrency", "5", "--max-concurrent-videos", "2"),
        *("--link", link, "--workers", str(workers)),
    )

    assert status == 0
    assert last["videos"] == 6
    assert last["frames"] == 2 * (132 + 250 + 120)
    pixels = 132 * 1280 * 720 + 250 * 640 * 272 + 120 * 176 * 144
    assert last["bytes"] == 2 * (3 * pixels + 8 * (132 + 250 + 120))
    assert (last["refused"], last["failed"], last["lost"], last["mismatched"]) == (0, 0, 0, 0)
    assert last["max_concurrent_videos"] == 2
    if workers == 1:
        assert last["peak_in_flight"] == 2  # five uploads at once fill the permits
    assert (last["link"], len(last["workers"])) == (link, workers)
    for worker in last["workers"]:
        assert worker["videos"] == worker["videos_in_place"]
        assert worker["peak_in_flight"] <= 2
        assert worker["peak_shared_bytes"] <= worker["shared_bytes_limit"]
    assert sum(worker["videos"] for worker in last["workers"]) == 6
    assert sum(worker["bytes_in_place"] for worker in last["workers"]) == 2 * 3 * pixels
    assert "bikes.mp4" in output
    assert "30 (1.20 s), 76 (3.04 s), 137 (5.48 s), 187 (7.48 s), 242 (9.68 s)" in output
    assert [line.split()[0] for line in errors.splitlines()] == ["engine:", "its", "uploading"]
    assert list(temporary.iterdir()) == []


def test_files_that_are_not_videos_are_refused_and_others_are_processed(
    temporary: Path, tmp_path: Path, make_video: Callable[..., bytes]
) -> None:
    good, empty, letter = (tmp_path / name for name in ("good.mp4", "empty.mp4", "letter.mp4"))
    good.write_bytes(make_video([RED] * 10 + [BLUE] * 8))
    empty.touch()
    letter.write_text("dear friend\n" * 99)

    status, last, output, _ = run(letter, good, empty, "--requests", "6", "--workers", "1")

    assert status == 0
    assert (last["videos"], last["refused"], last["lost"], last["mismatched"]) == (2, 4, 0, 0)
    lines = output.splitlines()
    assert any("refused" in line and "empty.mp4" in line and "the file is empty" in line for line in lines)
    assert any("refused" in line and "letter.mp4" in line and "not a video" in line for line in lines)
    assert any("good.mp4 at frame 10 (0.40 s)" in line for line in lines)


def test_the_demo_fails_if_no_video_was_answered(temporary: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.mp4"
    empty.touch()

    status, last, _, _ = run(empty, "--requests", "1", "--workers", "1")

    assert status == 1
    assert (last["videos"], last["refused"]) == (0, 1)


@pytest.mark.parametrize(
    ("moment", "number", "status"),
    [("at the start", signal.SIGINT, 130), ("while uploading", signal.SIGTERM, 143)],
)
def test_ctrl_c_ends_every_process_and_leaves_nothing_behind(
    temporary: Path, moment: str, number: signal.Signals, status: int
) -> None:
    with demo("--requests", "100000") as process:
        pids_of_children(process)
        if moment == "while uploading":
            wait_for_uploads(process)
        os.killpg(process.pid, number)
        output, errors = process.communicate()

    assert process.returncode == status
    assert output == ""
    assert errors == "stopped\n"
    assert_all_ended(processes_in_session(process.pid))
    assert list(temporary.iterdir()) == []


# The engine is a process of the same kind with each link, like the API server with a queue.
@pytest.mark.parametrize(
    ("link", "victim", "name", "moment"),
    [
        ("unix", 0, "engine", "while uploading"),
        ("queue", 1, "API server", "at the start"),
        ("unix", 1, "API server", "while uploading"),
    ],
)
def test_a_killed_child_ends_the_run_and_is_named(
    temporary: Path, victim: int, name: str, moment: str, link: str
) -> None:
    with demo("--requests", "100000", "--link", link) as process:
        children = pids_of_children(process)
        if moment == "while uploading":
            wait_for_uploads(process)
        os.kill(children[victim], signal.SIGKILL)
        output, errors = process.communicate()

    assert process.returncode == 1
    assert output == ""
    assert errors == f"error: the {name} process was killed by SIGKILL before the work was done\n"
    assert_all_ended(processes_in_session(process.pid))
    assert list(temporary.iterdir()) == []


def test_a_killed_worker_ends_the_run_and_is_named(temporary: Path) -> None:
    with demo("--requests", "100000") as process:
        pids_of_children(process)
        victim = wait_for_uploads(process)[1]
        os.kill(victim, signal.SIGKILL)
        output, errors = process.communicate()

    assert process.returncode == 1
    assert output == ""
    assert errors == f"error: a worker of the API server (process {victim}) died before the work was done\n"
    assert_all_ended(processes_in_session(process.pid))
    assert list(temporary.iterdir()) == []


def test_a_full_standard_output_leaves_nothing_behind(
    temporary: Path, tmp_path: Path, make_video: Callable[..., bytes]
) -> None:
    video = tmp_path / "video.mp4"
    video.write_bytes(make_video([RED] * 10))
    with open("/dev/full", "wb") as full, demo(video, "--workers", "1", stdout=full) as process:
        _, errors = process.communicate()

    assert process.returncode != 0
    assert [line.split()[0] for line in errors.splitlines()[:3]] == ["engine:", "its", "uploading"]
    assert "No space left on device" in errors
    assert_all_ended(processes_in_session(process.pid))
    assert list(temporary.iterdir()) == []


def test_a_full_standard_error_leaves_nothing_behind(temporary: Path) -> None:
    with open("/dev/full", "wb") as full, demo(stderr=full) as process:
        output, _ = process.communicate()

    assert process.returncode in (1, UNFLUSHED)
    assert output == ""
    assert_all_ended(processes_in_session(process.pid))
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(("link", "moment"), [("queue", "at the start"), ("unix", "while uploading")])
def test_no_child_outlives_a_command_that_was_killed(temporary: Path, link: str, moment: str) -> None:
    with demo("--requests", "100000", "--link", link) as process:
        pids_of_children(process)
        if moment == "while uploading":
            wait_for_uploads(process)
        process.kill()
        process.wait()
        assert_all_ended(processes_in_session(process.pid))

    assert list(temporary.glob("**/*.sock")) == []


def test_a_temporary_folder_with_a_too_long_path_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))

    with demo() as process:
        output, errors = process.communicate()

    assert process.returncode == 1
    assert output == ""
    assert errors.startswith(f"error: the path {deep}")
    assert errors.count("\n") == 1
