"""Fixtures for publishers and subscribers."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Iterator

import pytest

from aiotensor.transports.endpoints import Endpoint
from tests import selection
from tests.broadcast.audiences import Broadcasts
from verification import loops, places
from verification.processes import watch


@pytest.fixture(autouse=True)
async def mode(nothing_left_behind: None) -> AsyncIterator[None]:
    """Fail a test that leaves tasks behind, or makes asyncio log complaints."""
    with loops.complaints() as complaints:
        before = asyncio.all_tasks() - {asyncio.current_task()}
        yield
        left = asyncio.all_tasks() - {asyncio.current_task()} - before
    if watch.memfds(os.getpid()):
        gc.collect()  # tracebacks of expected errors refer to tensors, whose memory the next test would count
    assert not left, f"tasks left behind: {left}"
    assert not complaints, "\n".join(complaints)


@pytest.fixture(params=selection.LINKS)
def endpoint(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    """Return an endpoint for a publisher, of most kinds."""
    with places.endpoint(request.param) as place:
        yield place


@pytest.fixture
def broadcasts(endpoint: Endpoint) -> Broadcasts:
    """Make publishers with subscribers."""
    return Broadcasts(endpoint)
