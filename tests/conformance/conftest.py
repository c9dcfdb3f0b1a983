"""Fixtures that run the suite on each kind of endpoint, each event loop, and in each mode of the loop."""

from collections.abc import AsyncIterator, Iterator

import pytest

from aiotensor.transports.endpoints import Endpoint
from tests import selection
from tests.conformance.makers import PairMaker, pairs_over
from tests.modes import in_mode


@pytest.fixture(params=selection.MODES, autouse=True)
async def mode(request: pytest.FixtureRequest, nothing_left_behind: None) -> AsyncIterator[str]:
    """Run a test with plain, debug and eager tasks, without remaining tasks or warnings of the loop."""
    async with in_mode(request.param):
        yield request.param


@pytest.fixture(params=selection.LINKS)
def pairs(request: pytest.FixtureRequest) -> Iterator[PairMaker]:
    """Make pairs over each kind of endpoint."""
    with pairs_over(request.param) as pairs:
        yield pairs


@pytest.fixture
def endpoint(pairs: PairMaker) -> Endpoint:
    """Return the endpoint of the pairs, for tests that open the objects themselves."""
    return pairs.endpoint
