"""The command: its version, startup and dependencies."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

import aiotensor as package
from aiotensor.cli.command import aiotensor


def test_the_version_is_one_line() -> None:
    result = CliRunner().invoke(aiotensor, ["--version"])

    assert result.exit_code == 0
    assert result.output == f"aiotensor {package.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["--help"],
        ["top", "--help"],
        ["top", "unix:///run/no/such/folder/engine"],
        ["top", "tcp://127.0.0.1:1", "--patience", "0.1"],
        ["doctor", "--help"],
    ],
    ids=" ".join,
)
def test_the_command_does_not_import_torch_or_numpy(arguments: list[str]) -> None:
    code = """
import sys
from aiotensor.cli import main
try:
    main()
finally:
    print("imported:", *{"torch", "numpy"} & sys.modules.keys(), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )

    assert "imported:\n" in done.stderr


def test_a_missing_dependency_prints_one_line_with_an_install_command() -> None:
    code = "import sys; sys.modules['click'] = None; from aiotensor.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == "`aiotensor` needs click: pip install 'aiotensor[cli]'\n"


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("fastapi", "starlette"),
        ("aiohttp", "aiohttp"),
        ("prometheus", "prometheus_client"),
        ("opentelemetry", "opentelemetry-api"),
    ],
)
def test_the_error_of_a_missing_package_names_it_and_the_command_that_installs_it(
    module: str, package: str
) -> None:
    imported = package.removesuffix("-api")
    code = f"import sys; sys.modules[{imported!r}] = None; import aiotensor.integrations.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: aiotensor.integrations.{module} needs {package}: pip install {package}"
    )
    assert "During handling" not in done.stderr
