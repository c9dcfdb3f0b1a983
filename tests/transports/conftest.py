"""Fixtures of the tests of transports."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def path() -> Iterator[Path]:
    """Return a path for a socket."""
    folder = tempfile.mkdtemp(prefix="aiotensor-")  # the folders of pytest are too long for a socket
    yield Path(folder, "s")
    shutil.rmtree(folder)
