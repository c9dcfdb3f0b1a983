"""The programs of Prometheus."""

import shutil

import pytest

__all__ = ["tool"]


def tool(name: str) -> str:
    """Return the path of a program of Prometheus, or skip the test."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"`{name}` is not installed: it belongs to Prometheus, the Debian package `prometheus`")
    return path
