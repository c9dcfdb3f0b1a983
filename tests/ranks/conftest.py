"""Fixtures for pipes between ranks."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.ranks.pipes import ROUTES, Route, Routes, apart
from verification import loops
from verification.processes import watch


@pytest.fixture(autouse=True)
async def mode(nothing_left_behind: None) -> AsyncIterator[None]:
    """Fail a test that leaves tasks behind, or about whose code the loop complains."""
    with loops.complaints() as complaints:
        before = asyncio.all_tasks() - {asyncio.current_task()}
        yield
        left = asyncio.all_tasks() - {asyncio.current_task()} - before
    if watch.memfds(os.getpid()):
        gc.collect()  # tracebacks of expected errors refer to tensors, whose memory the next test would count
    assert not left, f"tasks left behind: {left}"
    assert not complaints, "\n".join(complaints)


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
