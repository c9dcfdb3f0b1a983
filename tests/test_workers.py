"""Runs of tests with dying workers, and a run that starts with ignored signals."""

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

CONFTEST = "from tests.workers import configure as pytest_configure"
DEADLY = "def test_dies(): os._exit(1)"


class Run(NamedTuple):
    status: int
    output: str

    def count(self, what: str) -> int:
        """Return the number of tests with an outcome, such as "passed" or "failed"."""
        found = re.search(rf"(\d+) {what}", self.output.splitlines()[-1])
        return 0 if found is None else int(found.group(1))

    @property
    def never_ran(self) -> list[str]:
        return re.findall(r"^NEVER RAN (\S+)$", self.output, re.MULTILINE)


def _of(*tests: str) -> str:
    return "\n".join(["import os, signal, subprocess, sys", *map(dedent, tests)])


def run(folder: Path, *options: str, ignored: str = "", **modules: str) -> Run:
    """Run a test suite of the given modules, with the same setup as this suite.

    It loads no plugins but xdist: in each worker, loading others would take longer than the tests.

    Args:
        folder: the folder for the modules.
        options: the options of pytest.
        ignored: a signal that is ignored when the run begins.
        modules: the text of each.
    """
    for name, text in {"conftest": CONFTEST, **modules}.items():
        (folder / f"{name}.py").write_text(text)
    names = (*(f"PYTEST_{name}" for name in ("ADDOPTS", "XDIST_WORKER", "XDIST_WORKER_COUNT")), "COLUMNS")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-m", "pytest", "--rootdir", str(folder), "-c", os.devnull]
    if ignored:
        command = ["/bin/sh", "-c", f'trap "" {ignored}; exec "$@"', "sh", *command]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-p", "xdist.plugin", *options],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=90,  # of a run that never ends
    )
    return Run(done.returncode, done.stdout.rstrip())


def spread(restarts: int, workers: int = 2) -> list[str]:
    """Return the options with which the Makefile spreads the tests."""
    return ["--numprocesses", f"{workers}", "--dist", "loadfile", "--max-worker-restart", f"{restarts}"]


def test_the_tests_that_a_dead_worker_was_given_run_elsewhere(tmp_path: Path) -> None:
    many = [f"def test_{number}(): pass" for number in range(5)]
    modules = {f"test_{name}": _of(*many) for name in "abcdef"}
    deadly = _of("def test_before(): pass", DEADLY, "def test_behind(): pass")

    done = run(tmp_path, *spread(restarts=8), **modules, test_deadly=deadly)

    assert (done.count("passed"), done.count("failed")) == (32, 1), done.output
    assert "crashed while running 'test_deadly.py::test_dies'" in done.output
    assert done.status == 1
    assert done.never_ran == []


@pytest.mark.parametrize("workers", [1, 2])
def test_several_deaths_end_no_run_and_no_test_is_tried_twice(tmp_path: Path, workers: int) -> None:
    modules = {f"test_{name}": _of(DEADLY, "def test_behind(): pass") for name in "abc"}

    done = run(tmp_path, *spread(8, workers), **modules, test_one=_of("def test_alone(): pass"))

    assert (done.count("passed"), done.count("failed")) == (4, 3), done.output
    assert done.never_ran == []


def test_tests_that_never_ran_are_listed_and_fail_the_run(tmp_path: Path) -> None:
    modules = {f"test_{name}": _of(DEADLY, "def test_behind(): pass") for name in "abc"}

    done = run(tmp_path, *spread(restarts=1, workers=1), **modules)

    assert done.status == 1
    assert done.never_ran == ["test_b.py::test_behind", "test_c.py::test_dies", "test_c.py::test_behind"]
    assert "3 of 6 tests never ran" in done.output


def test_of_many_tests_that_never_ran_some_are_listed(tmp_path: Path) -> None:
    many = [f"def test_{number}(): pass" for number in range(60)]

    done = run(tmp_path, *spread(restarts=0, workers=1), test_one=_of(DEADLY, *many))

    assert len(done.never_ran) == 50
    assert "\n... and 10 more\n" in done.output


def test_a_worker_that_dies_behind_its_last_test_fails_the_run(tmp_path: Path) -> None:
    dies_late = """
        import atexit, pytest
        @pytest.hookimpl(tryfirst=True)
        def pytest_sessionfinish(session):
            if hasattr(session.config, "workerinput"):
                os._exit(1)
    """
    text = f"import os\n{CONFTEST}\n{dedent(dies_late)}"

    done = run(tmp_path, *spread(restarts=1, workers=1), test_one=_of("def test_one(): pass"), conftest=text)

    assert (done.count("passed"), done.status) == (1, 1), done.output


@pytest.mark.parametrize("options", [[], spread(8)], ids=["one process", "workers"])
def test_a_run_that_leaves_nothing_out_lists_nothing(tmp_path: Path, options: list[str]) -> None:
    done = run(tmp_path, *options, test_one=_of("def test_one(): pass", "def test_two(): assert False"))

    assert (done.count("passed"), done.count("failed"), done.status) == (1, 1, 1)
    assert "never ran" not in done.output


@pytest.mark.parametrize("options", [[], spread(8)], ids=["one process", "workers"])
def test_child_processes_receive_signals_that_the_run_ignores(tmp_path: Path, options: list[str]) -> None:
    text = _of(
        """
        def test_a_child_is_interrupted():
            program = "import signal; print(flush=True); signal.pause()"
            with subprocess.Popen([sys.executable, "-c", program], stdout=-1, stderr=-1) as child:
                child.stdout.readline()
                child.send_signal(signal.SIGINT)
                errors = child.communicate(timeout=20)[1]
            assert errors.endswith(b"KeyboardInterrupt\\n")

        def test_the_run_itself_goes_on():
            os.kill(os.getpid(), signal.SIGINT)
            if "PYTEST_XDIST_WORKER" in os.environ:
                os.kill(os.getppid(), signal.SIGINT)
        """
    )

    done = run(tmp_path, *options, ignored="INT", test_signals=text)

    assert (done.count("passed"), done.status) == (2, 0), done.output
