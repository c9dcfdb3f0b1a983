"""Each async test runs on one loop: the integrations use the loop only by way of the library."""

from tests.selection import only_asyncio as pytest_asyncio_loop_factories  # noqa: F401
