"""The documents say what is so."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_first_program_of_the_readme_runs_as_pasted(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert found is not None
    program = tmp_path / "program.py"
    program.write_text(found[1])
    # As pasted: the measuring of coverage would say on standard error what it thinks of the program.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.startswith("the engine has (120, 360, 640, 3) brightness 127.")


def test_every_test_that_shows_a_promise_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "promises.md").read_text())
    assert len(named) > 30
    for path, name in named:
        text = (ROOT / path).read_text()
        assert not name or re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), f"{path}::{name}"


def test_all_26_promises_are_listed() -> None:
    numbers = re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "promises.md").read_text(), re.MULTILINE)
    assert [int(number) for number in numbers] == list(range(1, 27))
