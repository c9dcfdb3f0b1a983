"""Memory of received tensors: where bytes from another machine arrive, and errors of releases."""

import asyncio
import errno
import os
from typing import Any

import pytest
import torch

from aiotensor.receiving.landing import LandingSegment
from aiotensor.runtime.worker import Worker
from tests.pairs import pair
from verification.internals import senders_of
from verification.patterns import pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

BYTES = 1 << 20
DATA = memoryview(b"12345678")


async def test_a_closed_landing_ignores_bytes_and_freed_blocks() -> None:
    worker = Worker("aiotensor-receiver")
    landing = LandingSegment(0, 1 << 16, 1 << 16, worker)
    mapped = landing.mapped()
    landing.close()
    assert landing.store(0, 8, 0, DATA, lambda failure: pytest.fail(failure))
    landing.free(0)
    landing.free(64)
    mapped.close()
    worker.close()


async def outcome_of_store(landing: LandingSegment, block: int) -> str:
    """Store bytes in a new block, which has no memory yet, and return the reason why it gets none, or ""."""
    outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    assert not landing.store(block, BYTES, block, DATA, outcome.set_result)
    return await outcome


async def test_only_blocks_that_failed_to_get_memory_reject_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker("aiotensor-receiver")
    landing = LandingSegment(0, 8 * BYTES, 8 * BYTES, worker)
    mapped = landing.mapped()

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
        stored = mapped.tensor(block, torch.uint8, (len(DATA),)).tensor
        assert bytes(stored.tolist()) == bytes(DATA)
        del stored
    landing.close()
    mapped.close()
    await worker.settle()
    worker.close()


async def test_an_error_while_releasing_a_tensor_does_not_end_the_answers() -> None:
    errors: list[object] = []

    def fail(block: int) -> None:
        raise ZeroDivisionError

    def handle_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        errors.append(context["exception"])

    asyncio.get_running_loop().set_exception_handler(handle_error)
    async with pair() as (sender, receiver):
        tensor = await receiver.receive(await sender.send(pattern(1, BYTES // 8)))
        [peer] = senders_of(receiver).connected.values()
        peer.memory.release = fail
        handle = await sender.send(pattern(2, 3))
        await receiver.arrived(handle)
        await receiver.receive(handle)  # schedules the answer; the release follows in the same iteration
        del tensor
        await until(lambda: bool(errors))
        assert isinstance(errors[0], ZeroDivisionError)

        await sender.drain()
        await receiver.receive(await sender.send(pattern(3, 3)))
        await sender.drain()
