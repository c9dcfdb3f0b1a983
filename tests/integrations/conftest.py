"""The loop of tests of the integrations: servers have the loops that they choose themselves."""

import asyncio
from collections.abc import Callable

from verification import loops


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run each async test on one loop: the integrations use the loop only by way of the library."""
    return {"asyncio": loops.FACTORIES["asyncio"]}
