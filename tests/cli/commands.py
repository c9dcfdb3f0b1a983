"""How to start the command in a process of its own."""

import sys

import coverage

__all__ = ["aiotensor"]


def aiotensor(*arguments: str) -> list[str]:
    """Make the command line; what it runs is measured if the tests are."""
    measured = [] if coverage.Coverage.current() is None else ["-m", "coverage", "run"]
    return [sys.executable, "-W", "error", *measured, "-m", "aiotensor.cli", *arguments]
