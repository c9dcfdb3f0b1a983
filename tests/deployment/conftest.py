"""Fixtures of the tests of deployment."""

import os
from pathlib import Path

import pytest

from tests.deployment.containers import USER, problem


@pytest.fixture
def needs_containers() -> None:
    """Skip a test on a machine that cannot run containers."""
    if found := problem():
        pytest.skip(found)


@pytest.fixture
def sockets(folder: Path) -> Path:
    """Return the folder that containers share, as a volume."""
    path = folder / "sockets"
    path.mkdir(mode=0o700)
    os.chown(path, USER, USER)
    return path
