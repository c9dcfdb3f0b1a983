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
    """Return an address for a receiver; at the end, only the socket of a killed one may be left there."""
    with LINKS["unix"].place() as place:
        yield str(place.endpoint)
        assert place.names() in ([], ["s"])
