"""Fixtures for pipes between ranks."""

import gc
import os
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.modes import in_mode
from tests.ranks.pipes import ROUTES, Route, Routes, apart
from tests.selection import COMPLETE
from verification.processes import watch


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


@pytest.fixture(params=[route for route in ROUTES if COMPLETE or route != "encrypted"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Route]:
    """Run a test over every way between two ranks."""
    before, Routes.current = Routes.current, ROUTES[request.param]
    if Routes.current.is_local:
        yield Routes.current
    else:
        with apart(monkeypatch):
            yield Routes.current
    Routes.current = before
