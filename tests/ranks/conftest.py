"""Fixtures for pipes between ranks."""

import gc
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.modes import in_mode, leave_out, leave_out_loops
from tests.ranks.pipes import ROUTES, Route, Routes, apart
from verification.processes import watch

# The route and the loop do not affect each other, so each route has one loop. One file has all combinations.
_LOOPS = {"unix": "asyncio", "tcp": "uvloop", "encrypted": "asyncio"}
_WITH_ALL = "test_modes.py"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run most tests on one loop for each route, and encrypted pipes in one mode of the loop.

    Encrypted pipes differ from others only within ZeroMQ.
    """
    folder = Path(__file__).parent
    leave_out(config, items, folder, lambda _, params: params.get("route") == "encrypted")
    leave_out_loops(
        config,
        items,
        folder,
        lambda path, params, loop: path.name != _WITH_ALL and loop != _LOOPS[str(params.get("route", "tcp"))],
    )


@pytest.fixture(autouse=True)
async def mode(request: pytest.FixtureRequest, nothing_left_behind: None) -> AsyncIterator[str]:
    """Fail a test that leaves tasks behind, or makes asyncio log complaints.

    Tests marked with `in_every_mode` run with debug and eager tasks, too.
    """
    name: str = getattr(request, "param", "plain")
    async with in_mode(name):
        yield name
    if watch.memfds(os.getpid()):
        gc.collect()  # tracebacks of expected errors refer to tensors, whose memory the next test would count


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Route]:
    """Run a test over every way between two ranks."""
    before, Routes.current = Routes.current, ROUTES[request.param]
    if Routes.current.is_local:
        yield Routes.current
    else:
        with apart(monkeypatch):
            yield Routes.current
    Routes.current = before
