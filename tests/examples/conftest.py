"""Each async test runs on one loop: the examples choose their own loops."""

from tests.selection import only_asyncio as pytest_asyncio_loop_factories  # noqa: F401
