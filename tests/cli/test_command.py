import subprocess
import sys

from click.testing import CliRunner

from aiotensor.cli.command import aiotensor


def test_the_version_is_one_line() -> None:
    result = CliRunner().invoke(aiotensor, ["--version"])

    assert result.exit_code == 0
    assert result.output.startswith("aiotensor ")
    assert result.output.count("\n") == 1


def test_a_missing_dependency_prints_one_line_with_an_install_command() -> None:
    code = "import sys; sys.modules['click'] = None; from aiotensor.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == "`aiotensor` needs click: pip install 'aiotensor[cli]'\n"
