"""Run the `aiotensor` command in a separate process."""

import sys

import coverage

__all__ = ["aiotensor"]


def aiotensor(*arguments: str) -> list[str]:
    """Return a command line, which measures coverage if the tests do."""
    measured = [] if coverage.Coverage.current() is None else ["-m", "coverage", "run"]
    return [sys.executable, "-W", "error", *measured, "-m", "aiotensor.cli", *arguments]
