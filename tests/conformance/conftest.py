"""Fixtures that run the suite on each kind of endpoint, each event loop, and in each mode of the loop."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from aiotensor.transports.endpoints import Endpoint
from tests.conformance.makers import PairMaker, pairs_over
from verification import loops
from verification.places import CONFORMING


@pytest.fixture(params=loops.MODES, autouse=True)
async def mode(request: pytest.FixtureRequest, nothing_left_behind: None) -> AsyncIterator[str]:
    """Run a test with plain, debug and eager tasks, without remaining tasks or warnings of the loop."""
    name: str = request.param
    with loops.complaints() as complaints:
        loops.set_mode(asyncio.get_running_loop(), name)
        before = asyncio.all_tasks() - {asyncio.current_task()}
        yield name
        left = asyncio.all_tasks() - {asyncio.current_task()} - before
    assert not left, f"tasks left behind: {left}"
    assert not complaints, "\n".join(complaints)


@pytest.fixture(params=CONFORMING)
def pairs(request: pytest.FixtureRequest) -> Iterator[PairMaker]:
    """Make pairs over each kind of endpoint."""
    with pairs_over(request.param) as pairs:
        yield pairs


@pytest.fixture
def endpoint(pairs: PairMaker) -> Endpoint:
    """Return the endpoint of the pairs, for tests that open the objects themselves."""
    return pairs.endpoint
