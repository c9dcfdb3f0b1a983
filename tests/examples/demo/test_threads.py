import asyncio
import gc
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


async def test_cancelling_ends_the_work_at_its_next_checkpoint_and_waits_for_this() -> None:
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
    for _ in range(2):
        waiting.cancel()
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
    may_go_on.set()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert ended.is_set()


async def test_an_error_of_cancelled_work_is_not_reported() -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    def work(checkpoint: Checkpoint) -> None:
        begun.set()
        may_go_on.wait()
        raise ValueError("no frames")

    waiting = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(begun.wait)
    waiting.cancel()
    await asyncio.sleep(0)
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    del waiting
    for _ in range(3):  # the loop refers to the work until then
        await asyncio.sleep(0)
    gc.collect()
    assert reported == []


def test_the_end_of_the_loop_waits_for_the_work() -> None:
    begun, ended = threading.Event(), threading.Event()
    seen: list[bool] = []

    def work(checkpoint: Checkpoint) -> None:
        begun.set()
        with pytest.raises(asyncio.CancelledError):
            while True:
                checkpoint()
        ended.set()

    async def call() -> None:
        try:
            await in_thread(work)
        finally:
            seen.append(ended.is_set())

    async def main() -> "asyncio.Task[None]":
        calling = asyncio.create_task(call())
        await asyncio.to_thread(begun.wait)
        return calling

    assert asyncio.run(main()).cancelled()
    assert seen == [True]
