import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from aiotensor.cli.command import aiotensor
from aiotensor.cli.extras import missing_extra


def test_the_help_of_the_demo_shows_its_options() -> None:
    result = CliRunner().invoke(aiotensor, ["demo", "--help"])

    assert result.exit_code == 0
    for word in ("CLIPS", "--requests", "--concurrency", "--max-concurrent-videos", "--workers", "--link"):
        assert word in result.output


def test_the_version_is_one_line() -> None:
    result = CliRunner().invoke(aiotensor, ["--version"])

    assert result.exit_code == 0
    assert result.output.startswith("aiotensor ")
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("option", ["--requests", "--concurrency", "--max-concurrent-videos", "--workers"])
def test_a_limit_of_zero_is_refused_by_name(option: str) -> None:
    result = CliRunner().invoke(aiotensor, ["demo", option, "0"])

    assert result.exit_code == 2
    assert option in result.output


def test_a_queue_with_several_workers_is_refused_with_what_to_do() -> None:
    result = CliRunner().invoke(aiotensor, ["demo", "--link", "queue", "--workers", "2"])

    assert result.exit_code == 2
    assert "--link queue serves one worker, not 2" in result.output
    assert "--link unix" in result.output


def test_a_file_that_does_not_exist_is_named_before_anything_starts(tmp_path: Path) -> None:
    result = CliRunner().invoke(aiotensor, ["demo", str(tmp_path / "no.mp4")], env={"COLUMNS": "1000"})

    assert result.exit_code == 2
    assert str(tmp_path / "no.mp4") in result.output
    assert "does not exist" in result.output


def test_a_folder_is_no_clip(tmp_path: Path) -> None:
    result = CliRunner().invoke(aiotensor, ["demo", str(tmp_path)])

    assert result.exit_code == 2
    assert "is a directory" in result.output


@pytest.mark.parametrize("module", ["click", "fastapi"])
def test_a_missing_dependency_is_one_sentence_with_what_to_install(module: str) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; from aiotensor.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code, "demo"], capture_output=True, text=True, check=False)

    assert result.returncode == 1
    assert result.stdout == ""
    assert module in result.stderr
    assert f"pip install 'aiotensor[{'cli' if module == 'click' else 'demo'}]'" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("module", ["av", "httpx", "python_multipart", "rich", "uvicorn", "uvloop"])
def test_everything_the_demo_needs_is_looked_for_before_it_starts(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)

    result = CliRunner().invoke(aiotensor, ["demo"])

    assert result.exit_code == 1
    assert result.output == f"Error: `aiotensor demo` needs {module}: pip install 'aiotensor[demo]'\n"


def test_all_that_is_missing_is_named() -> None:
    sentence = missing_extra("aiotensor", ["click", "not_here", "nor_this"], extra="cli")

    assert sentence == "`aiotensor` needs not_here, nor_this: pip install 'aiotensor[cli]'"


def test_nothing_is_said_when_nothing_is_missing() -> None:
    assert missing_extra("aiotensor", ["click", "rich"], extra="cli") is None
