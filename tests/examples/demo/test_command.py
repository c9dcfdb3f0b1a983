import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from demo.command import demo
from tests.examples.programs import ROOT


def test_make_demo_shows_the_options_of_the_demo() -> None:
    make = ["make", "--silent", "demo", "ARGS=--help"]
    # With this interpreter, and without installing anything.
    make += [f"BIN={Path(sys.executable).parent}", "--old-file=.venv/.demo"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(make, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    for word in ("CLIPS", "--requests", "--concurrency", "--max-concurrent-videos", "--workers", "--link"):
        assert word in done.stdout


@pytest.mark.parametrize("option", ["--requests", "--concurrency", "--max-concurrent-videos", "--workers"])
def test_a_limit_of_zero_is_refused_by_name(option: str) -> None:
    result = CliRunner().invoke(demo, [option, "0"])

    assert result.exit_code == 2
    assert option in result.output


def test_a_queue_with_several_workers_is_a_usage_error() -> None:
    result = CliRunner().invoke(demo, ["--link", "queue", "--workers", "2"])

    assert result.exit_code == 2
    assert "--link queue serves one worker, not 2" in result.output
    assert "--link unix" in result.output


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(demo, [str(tmp_path / "no.mp4")], env={"COLUMNS": "1000"})

    assert result.exit_code == 2
    assert str(tmp_path / "no.mp4") in result.output
    assert "does not exist" in result.output


def test_a_folder_instead_of_a_clip_is_a_usage_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(demo, [str(tmp_path)])

    assert result.exit_code == 2
    assert "is a directory" in result.output
