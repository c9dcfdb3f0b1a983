"""The documents say what is so."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def _run_program(which: int, folder: Path) -> str:
    """Run a program of the README as pasted, and return what it printed."""
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    program = folder / "program.py"
    # At a place of its own: another run of these tests may be at the one that the README names.
    place = tempfile.mkdtemp(prefix="aiotensor-")
    program.write_text(programs[which].replace("/tmp/engine", f"{place}/engine"))
    # As pasted: the measuring of coverage would say on standard error what it thinks of the program.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, check=False, cwd=folder, env=environment
    )
    shutil.rmtree(place)
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout


def test_the_first_program_of_the_readme_runs_as_pasted(tmp_path: Path) -> None:
    printed = _run_program(0, tmp_path)
    assert printed.startswith("the engine has (120, 360, 640, 3) brightness 127.")


def test_a_request_with_a_video_in_it_takes_less_than_40_lines_and_runs_as_pasted(tmp_path: Path) -> None:
    printed = _run_program(1, tmp_path)
    assert re.match(r"the embedding of the video is tensor\(\[127\.\d+, 127\.\d+, 127\.\d+\]\)\n$", printed)
    assert len((tmp_path / "program.py").read_text().splitlines()) < 40


def test_every_test_that_shows_a_promise_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "promises.md").read_text())
    assert len(named) > 30
    for path, name in named:
        text = (ROOT / path).read_text()
        assert not name or re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), f"{path}::{name}"


def test_all_26_promises_are_listed() -> None:
    numbers = re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "promises.md").read_text(), re.MULTILINE)
    assert [int(number) for number in numbers] == list(range(1, 27))
