"""The program of docs/migrating.md, also with a producer and a consumer that are killed."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PROGRAM = next(
    program
    for program in re.findall(r"```python\n(.*?)```", (ROOT / "docs/migrating.md").read_text(), re.DOTALL)
    if "MessageQueue" in program and "__main__" in program
)
MESSAGES, _MANY = 50, 300
LIMIT_S = 100
ALL = {name: list(range(MESSAGES)) for name in "abc"}


class Program:
    """A running program, whose lines are collected.

    Args:
        text: the source of the program.
        folder: a folder for its file and its temporary files.
        method: the start method of its children.
    """

    def __init__(self, text: str, folder: Path, method: str) -> None:
        path = folder / "program.py"
        path.write_text(text.replace('"spawn"', f'"{method}"'))
        (folder / "tmp").mkdir()
        excluded = ("COVERAGE_", "PYTHONUNBUFFERED")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(excluded)}
        self._errors = folder / "errors.txt"
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", str(path)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**environment, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp")},
            )
        self._watchdog = threading.Timer(LIMIT_S, self.process.kill)
        self._watchdog.start()
        self.lines: list[str] = []

    def _printed(self) -> Iterator[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            yield line

    def read_until(self, text: str) -> None:
        """Read lines until one contains a text."""
        if not any(text in line for line in self._printed()):
            raise AssertionError(f"the program never printed {text!r}: {self.lines}")

    def kill(self, name: str) -> None:
        """Kill a child."""
        [pid] = [int(line.split()[-1]) for line in self.lines if line.startswith(f"{name} is ")]
        os.kill(pid, signal.SIGKILL)

    def finish(self) -> str:
        """Wait for the end, and return the text of standard error."""
        with self.process:
            for _ in self._printed():
                pass
        self._watchdog.cancel()
        errors = self._errors.read_text()
        assert self.process.returncode == 0, errors
        return errors

    def taken(self) -> dict[str, list[int]]:
        """Return the numbers of the messages of each producer that the consumers took."""
        taken: dict[str, list[int]] = {"a": [], "b": [], "c": []}
        for line in self.lines:
            if " took " in line:
                _, _, producer, number, mean = line.split()
                assert int(number) % 256 == int(mean)
                taken[producer].append(int(number))
        return taken


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.extended)])
def test_the_program_delivers_every_message_once(folder: Path, method: str) -> None:
    program = Program(PROGRAM, folder, method)
    assert program.finish() == ""
    assert {name: sorted(of) for name, of in program.taken().items()} == ALL
    assert os.listdir(folder / "tmp") == []


def _waiting_to_be_killed(program: str) -> str:
    """Return a program with more messages, in which a producer and a consumer never finish."""
    for old, new in (
        (f"MESSAGES = {MESSAGES}\n", f"import signal\n\nMESSAGES = {_MANY}\n"),
        (
            "    for number in range(MESSAGES):\n",
            "    for number in range(MESSAGES):\n"
            f"        if name == 'a' and number == {_MANY // 2}:\n"
            "            signal.pause()\n",
        ),
        (
            "    for message in queue:\n",
            "    for message in queue:\n"
            f"        if name == 'x' and message['number'] >= {_MANY // 2}:\n"
            "            signal.pause()\n",
        ),
    ):
        assert old in program
        program = program.replace(old, new)
    return program


@pytest.mark.extended
def test_the_program_survives_a_killed_producer_and_a_killed_consumer(folder: Path) -> None:
    program = Program(_waiting_to_be_killed(PROGRAM), folder, "spawn")
    program.read_until("took a 3 ")
    program.kill("a")
    program.read_until("x took")
    program.kill("x")
    errors = program.finish()
    taken = program.taken()
    missing = [(name, number) for name in "bc" for number in set(range(_MANY)) - set(taken[name])]
    # The killed consumer may have taken a message that it did not print.
    assert len(missing) <= 1, missing
    assert len(set(taken["a"])) < _MANY
    assert errors.count("PeerLostError") == 1
    assert "1 of the 3 producers of this queue ended without closing" in errors
    assert os.listdir(folder / "tmp") == []
