"""Each async test runs on one loop: the command does not depend on the loop of the process it inspects."""

from tests.selection import only_asyncio as pytest_asyncio_loop_factories  # noqa: F401
