"""Fixtures for pipes between ranks."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.ranks.pipes import ROUTES, Route, Routes, apart
from verification import loops
from verification.processes import watch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run encrypted pipes in one mode of the loop: they differ from others only within ZeroMQ."""
    left_out = [
        item
        for item in items
        if isinstance(item, pytest.Function)
        and item.path.parent == Path(__file__).parent
        and hasattr(item, "callspec")
        and item.callspec.params.get("route") == "encrypted"
        and item.callspec.params.get("mode", "plain") != "plain"
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(autouse=True)
async def mode(request: pytest.FixtureRequest, nothing_left_behind: None) -> AsyncIterator[str]:
    """Fail a test that leaves tasks behind, or about whose code the loop complains.

    Tests marked with `in_every_mode` run with debug and eager tasks, too.
    """
    name: str = getattr(request, "param", "plain")
    with loops.complaints() as complaints:
        loops.set_mode(asyncio.get_running_loop(), name)
        before = asyncio.all_tasks() - {asyncio.current_task()}
        yield name
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
