"""The loop of the tests of the examples, which choose their own loops."""

import asyncio
from collections.abc import Callable

from verification import loops


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run each async test on one loop."""
    return {"asyncio": loops.FACTORIES["asyncio"]}
