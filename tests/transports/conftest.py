"""Fixtures of the tests of transports."""

import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.transports.ends import End, end_of, open_sockets, record_pair


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    before = open_sockets()  # the loop of a test is created and closed in between
    yield
    assert open_sockets() == before


@pytest.fixture
def path() -> Iterator[Path]:
    """Return a path for a socket."""
    folder = tempfile.mkdtemp(prefix="aiotensor-")  # the folders of pytest are too long for a socket
    yield Path(folder, "s")
    shutil.rmtree(folder)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[End, socket.socket]]:
    """Return an end on the loop, and the socket at the other end."""
    near, far = record_pair()
    end = end_of(near)
    with far:
        yield end, far
        end.transport.close()
