"""The links and loops over which the tests of cancellation run."""

from pathlib import Path

import pytest

from tests.modes import leave_out_loops

# The links that resemble each other most, over the sockets of this machine, are on different loops.
_LOOPS = {"queue": "asyncio", "stock": "uvloop", "tcp": "asyncio", "unix": "uvloop"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run each test over every link, but over each link on one loop only.

    So every operation is cancelled on both loops. The tests of conformance show that each link works on each
    loop.
    """
    leave_out_loops(
        config,
        items,
        Path(__file__).parent,
        lambda _, params, loop: _LOOPS.get(str(params.get("link")), loop) != loop,
    )
