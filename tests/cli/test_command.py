import subprocess
import sys

from click.testing import CliRunner

from aiotensor.cli.command import aiotensor
from aiotensor.cli.extras import missing_extra


def test_the_version_is_one_line() -> None:
    result = CliRunner().invoke(aiotensor, ["--version"])

    assert result.exit_code == 0
    assert result.output.startswith("aiotensor ")
    assert result.output.count("\n") == 1


def test_a_missing_dependency_is_one_sentence_with_what_to_install() -> None:
    code = "import sys; sys.modules['click'] = None; from aiotensor.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == "`aiotensor` needs click: pip install 'aiotensor[cli]'\n"


def test_all_that_is_missing_is_named() -> None:
    sentence = missing_extra("aiotensor", ["click", "not_here", "nor_this"], extra="cli")

    assert sentence == "`aiotensor` needs not_here, nor_this: pip install 'aiotensor[cli]'"


def test_nothing_is_said_when_nothing_is_missing() -> None:
    assert missing_extra("aiotensor", ["click", "rich"], extra="cli") is None
