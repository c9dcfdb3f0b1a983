"""Fixtures that run the suite on each kind of endpoint, each event loop, and in each mode of the loop."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from aiotensor.transports.endpoints import Endpoint
from tests.conformance.makers import PairMaker, pairs_over
from verification import loops
from verification.places import CONFORMING


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the tests with an engine in one mode of the loop, and only the first of them in every mode."""
    left_out = [
        item
        for item in items
        if isinstance(item, pytest.Function)
        and item.path.parent == Path(__file__).parent
        and item.path.name != "test_arriving.py"
        and hasattr(item, "callspec")
        and "nixl" in item.callspec.params.values()
        and item.callspec.params.get("mode", "plain") != "plain"
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


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
