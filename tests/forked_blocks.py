"""Helpers for tests of forked children that leave a block of their parent, with asyncio or blocking calls."""

from collections.abc import Callable

import pytest

__all__ = ["by_each_exception", "check_told_of_fork", "in_each_block_of"]

by_each_exception = pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt("3"), LookupError("3")], ids=repr
)


def in_each_block_of(*makes: Callable[..., object]) -> pytest.MarkDecorator:
    """Run a test in a block of each kind.

    Args:
        makes: functions that open a block, each named after its kind; the parameter `make` of the test.
    """
    return pytest.mark.parametrize("make", makes, ids=[make.__name__.strip("_") for make in makes])


def check_told_of_fork(report: str) -> None:
    """Check that an error names the fork as its cause."""
    assert report.startswith("UsageError: this ")
    assert "was inherited by a forked process" in report
