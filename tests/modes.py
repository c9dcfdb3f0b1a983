"""The modes of the event loop in which tests run."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from verification import loops


@asynccontextmanager
async def in_mode(name: str) -> AsyncIterator[None]:
    """Set a mode of `loops.MODES`, and fail if the block leaves tasks behind or the loop complains."""
    with loops.complaints() as complaints:
        loops.set_mode(asyncio.get_running_loop(), name)
        before = asyncio.all_tasks() - {asyncio.current_task()}
        yield
        left = asyncio.all_tasks() - {asyncio.current_task()} - before
    assert not left, f"tasks left behind: {left}"
    assert not complaints, "\n".join(complaints)
