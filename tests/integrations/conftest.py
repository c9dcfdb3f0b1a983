"""Fixtures of the tests of servers."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    # Those of pytest are too long for a socket.
    with tempfile.TemporaryDirectory(prefix="aiotensor-") as path:
        yield Path(path)
