"""The event loop of the tests of the command, which runs in other processes and threads."""

import asyncio
from collections.abc import Callable

from verification import loops


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run each async test on one loop: the command does not depend on that of the process it inspects."""
    return {"asyncio": loops.FACTORIES["asyncio"]}
