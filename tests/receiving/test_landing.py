"""The memory in which the bytes of a peer on another machine arrive."""

import asyncio
import errno
import os

import pytest
import torch

from aiotensor.memory.landing import LandingSegment
from aiotensor.runtime.worker import Worker

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

BYTES = 1 << 20
DATA = memoryview(b"12345678")


async def outcome_of_store(landing: LandingSegment, block: int) -> str:
    """Store bytes in a new block, which has no memory yet, and return the reason why it gets none, or ""."""
    outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    assert not landing.store(block, BYTES, block, DATA, outcome.set_result)
    return await outcome


async def test_only_blocks_that_failed_to_get_memory_reject_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker("aiotensor-receiver")
    landing = LandingSegment(0, 8 * BYTES, 8 * BYTES, worker)
    mapped = landing.mapped

    def refuse(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        assert "No space left on device" in await outcome_of_store(landing, 0)
    assert "No space left on device" in await outcome_of_store(landing, 0)  # the peer is to be closed
    landing.free(0)
    for block in (0, 4 * BYTES):
        assert await outcome_of_store(landing, block) == ""
        assert landing.store(block, BYTES, block, DATA, lambda failure: pytest.fail(failure))
        stored = mapped.tensor(block, torch.uint8, (len(DATA),))[0]
        assert bytes(stored.tolist()) == bytes(DATA)
        del stored
    landing.close()
    mapped.close()
    await worker.settle()
    worker.close()
