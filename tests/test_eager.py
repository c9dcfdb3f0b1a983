"""The eager tasks of the tests start eagerly, and otherwise behave like tasks of asyncio."""

import asyncio

import pytest

from verification.loops import FACTORIES, Kind


@pytest.mark.parametrize("loop", FACTORIES)
def test_an_eager_task_starts_synchronously_when_it_is_created(loop: str) -> None:
    maker: asyncio.Task[None] | None = None

    async def work(said: list[str]) -> int:
        said.append("begun")
        assert asyncio.current_task() is not maker
        await asyncio.sleep(0)
        said.append("gone on")
        return 7

    async def main() -> None:
        nonlocal maker
        maker = asyncio.current_task()
        assert maker is not None
        said: list[str] = []
        task = asyncio.create_task(work(said))
        assert said == ["begun"]
        assert asyncio.current_task() is maker
        assert await task == 7
        assert said == ["begun", "gone on"]

        waiting = asyncio.create_task(asyncio.sleep(3600))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    with asyncio.Runner(loop_factory=Kind(loop, "eager").make) as runner:
        runner.run(main())
