"""The variants of the tests of requests: each kind of address, and each mode of the loop."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.channel.parties import Places
from tests.selection import MODES
from verification import loops

# Every mode over one kind of address, and only the plain one over the other: just the socket differs.
_WAYS = {f"{mode} tasks": ("unix", mode) for mode in MODES} | {"tcp": ("tcp", "plain")}


@pytest.fixture(params=["unix", "tcp"])
def scheme(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test over each kind of address."""
    before, Places.scheme = Places.scheme, request.param
    yield request.param
    Places.scheme = before


@pytest.fixture(params=_WAYS)
async def way(request: pytest.FixtureRequest, nothing_left_behind: None) -> AsyncIterator[None]:
    """Run a test over each kind of address, in one of the modes; it must leave no tasks and no complaints."""
    scheme, mode = _WAYS[request.param]
    before, Places.scheme = Places.scheme, scheme
    with loops.complaints() as complaints:
        loops.set_mode(asyncio.get_running_loop(), mode)
        before_test = asyncio.all_tasks() - {asyncio.current_task()}
        yield
        left = asyncio.all_tasks() - {asyncio.current_task()} - before_test
    Places.scheme = before
    assert not left, f"tasks left behind: {left}"
    assert not complaints, "\n".join(complaints)
