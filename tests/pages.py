"""The programs of the documents, and processes that run them as a reader does."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

LIMIT_S = 300  # each program imports torch, which takes long on a loaded machine
READY = "the engine is ready\n"

ROOT = Path(__file__).parent.parent

# The interpreter of the programs. Another one than ours tests an installed wheel.
_PYTHON = os.environ.get("AIOTENSOR_TEST_PYTHON")


def blocks(kind: str, page: str) -> list[str]:
    """Return the blocks of one language on a page."""
    return re.findall(rf"^```{kind}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


class Folder:
    """An empty folder in which a reader saves and runs the programs of a page."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.started: list[subprocess.Popen[str]] = []
        # Without coverage, which writes to standard error, and without proxies for local addresses.
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("COVERAGE_") and not name.lower().endswith("_proxy")
        }
        self.environment["PYTHONPATH"] = str(ROOT)
        if _PYTHON is not None:
            del self.environment["PYTHONPATH"]

    def save(self, name: str, program: str) -> None:
        """Save a program. Its sockets lie in this folder: several runs of these tests may be in progress."""
        (self.path / name).write_text(program.replace(":///tmp/", f"://{self.path}/"))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a program, or with `-m` a module; its output is one stream."""
        process = subprocess.Popen(
            [_PYTHON or sys.executable, *arguments],
            cwd=self.path,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.started.append(process)
        return process

    def start_until(self, line: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a program, and wait until it has printed a line that contains a text."""
        process, printed = self.start(*arguments), ""
        assert process.stdout is not None
        while line not in (last := process.stdout.readline()):
            printed += last
            assert last, printed
        return process

    def run(self, *arguments: str) -> str:
        """Run a program to its end, and return its output."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, output
        return output


def upload(port: int, body: bytes) -> tuple[int, str]:
    """Upload a file, as curl does on the pages, and return the status and the text of the response."""
    connection = HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request("POST", "/videos", body)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@contextmanager
def folder() -> Iterator[Folder]:
    """Create a folder with a path that is short enough for sockets, and kill its programs at the end."""
    path = Path(tempfile.mkdtemp(prefix="aiotensor-"))
    made = Folder(path)
    try:
        yield made
    finally:
        for process in made.started:
            process.kill()
            process.communicate()
        shutil.rmtree(path)
