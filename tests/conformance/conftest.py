"""What every sentence of the suite runs over: each link, each event loop, and each mode of the loop."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from aiotensor.transports.endpoints import Endpoint
from tests.conformance.makers import PairMaker, pairs_over
from verification import loops
from verification.places import LINKS


@pytest.fixture(params=loops.MODES, autouse=True)
async def mode(request: pytest.FixtureRequest, nothing_left_behind: None) -> AsyncIterator[str]:
    """Run a test with plain, debug and eager tasks; nothing of it may run on, and nobody may complain."""
    name: str = request.param
    with loops.complaints() as complaints:
        loops.set_mode(asyncio.get_running_loop(), name)
        before = asyncio.all_tasks() - {asyncio.current_task()}
        yield name
        left = asyncio.all_tasks() - {asyncio.current_task()} - before
    assert not left, f"tasks left behind: {left}"
    assert not complaints, "\n".join(complaints)


@pytest.fixture(params=LINKS)
def pairs(request: pytest.FixtureRequest) -> Iterator[PairMaker]:
    """Make pairs over each of the links."""
    with pairs_over(request.param) as pairs:
        yield pairs


@pytest.fixture
def endpoint(pairs: PairMaker) -> Endpoint:
    """Name the place where the pairs meet, for tests that open the ends by themselves."""
    return pairs.endpoint
