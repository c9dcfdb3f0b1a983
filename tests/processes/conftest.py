"""The loop of tests with several processes, and their endpoints."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from verification import loops
from verification.places import LINKS


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run each async test on one loop, also in its child processes: tests/conformance runs on both."""
    return {"uvloop": loops.FACTORIES["uvloop"]}


@pytest.fixture
def address() -> Iterator[str]:
    """Name a place for a receiver; afterwards there may be a killed one's socket, and nothing else."""
    with LINKS["unix"].place() as place:
        yield str(place.endpoint)
        assert place.names() in ([], ["s"])
