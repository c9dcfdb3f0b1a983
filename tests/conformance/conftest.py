"""Fixtures that run the suite on each kind of endpoint, each event loop, and in each mode of the loop."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from aiotensor.transports.endpoints import Endpoint
from tests.conformance.makers import PairMaker, pairs_over
from tests.modes import in_mode, leave_out
from verification import loops
from verification.places import LINKS


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run tests over a stock queue in one mode of the loop, except those of test_arriving.py.

    The code for stock queues depends on the mode no more than that of other links.
    """
    leave_out(
        config,
        items,
        Path(__file__).parent,
        lambda path, params: path.name != "test_arriving.py" and "stock" in map(str, params.values()),
    )


@pytest.fixture(params=loops.MODES, autouse=True)
async def mode(request: pytest.FixtureRequest, nothing_left_behind: None) -> AsyncIterator[str]:
    """Run a test with plain, debug and eager tasks, without remaining tasks or warnings of the loop."""
    async with in_mode(request.param):
        yield request.param


@pytest.fixture(params=LINKS)
def pairs(request: pytest.FixtureRequest) -> Iterator[PairMaker]:
    """Make pairs over each kind of endpoint."""
    with pairs_over(request.param) as pairs:
        yield pairs


@pytest.fixture
def endpoint(pairs: PairMaker) -> Endpoint:
    """Return the endpoint of the pairs, for tests that open the objects themselves."""
    return pairs.endpoint
