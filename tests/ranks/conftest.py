"""Fixtures for pipes between ranks."""

import gc
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.modes import in_mode, leave_out
from tests.ranks.pipes import ROUTES, Route, Routes, apart
from verification.processes import watch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run encrypted pipes in one mode of the loop: they differ from others only within ZeroMQ."""
    leave_out(config, items, Path(__file__).parent, lambda _, params: params.get("route") == "encrypted")


@pytest.fixture(autouse=True)
async def mode(request: pytest.FixtureRequest, nothing_left_behind: None) -> AsyncIterator[str]:
    """Fail a test that leaves tasks behind, or about whose code the loop complains.

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
