import asyncio
import threading

import pytest

from demo.threads import Checkpoint, in_thread


async def test_work_runs_in_another_thread_and_returns_its_result() -> None:
    def work(checkpoint: Checkpoint) -> int:
        checkpoint()
        return threading.get_ident()

    assert await in_thread(work) != threading.get_ident()


async def test_an_error_of_the_work_is_raised() -> None:
    def work(checkpoint: Checkpoint) -> None:
        raise ValueError("no frames")

    with pytest.raises(ValueError, match="no frames"):
        await in_thread(work)


async def test_cancelling_does_not_wait_for_the_work_and_ends_it_at_its_next_checkpoint() -> None:
    begun, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work(checkpoint: Checkpoint) -> None:
        begun.set()
        may_go_on.wait()
        try:
            while True:
                checkpoint()
        finally:
            ended.set()

    waiting = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(begun.wait)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert not ended.is_set()
    may_go_on.set()
    await asyncio.to_thread(ended.wait)
