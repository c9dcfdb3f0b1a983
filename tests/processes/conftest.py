"""Endpoints for tests with several processes."""

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from aiotensor import TensorQueue
from aiotensor.links import Endpoint


@pytest.fixture
def address() -> Iterator[str]:
    """Name a place for a receiver; afterwards there may be a killed one's socket, and nothing else."""
    folder = tempfile.mkdtemp(prefix="aiotensor-")  # the folders of pytest are too long for a socket
    try:
        yield f"unix://{folder}/s"
        left = os.listdir(folder)
        assert left in ([], ["s"])
    finally:
        shutil.rmtree(folder)


@pytest.fixture(params=["queue", "unix"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    """Join a sender and a receiver by each of the links."""
    if request.param == "unix":
        yield str(request.getfixturevalue("address"))
    else:
        queue = TensorQueue()
        yield queue
        queue.close()
