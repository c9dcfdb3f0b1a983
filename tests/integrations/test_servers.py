"""Real servers under real load, in front of a real engine: nothing is lost, and nothing exceeds its bound."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from aiotensor.types import ClientStatistics
from tests.integrations import engine
from tests.integrations.sites import SERVERS, UPLOAD, MiB, Scene, is_answered, scene, workers_of
from tests.integrations.totals import PERMITS
from verification.processes import watch


def extended(kind: str) -> Any:
    """Return a server with which `make test-all` repeats a test."""
    return pytest.param(kind, marks=pytest.mark.extended)


@pytest.mark.promise(18)
@pytest.mark.parametrize("kind", ["uvicorn", extended("aiohttp"), extended("gunicorn-aiohttp")])
async def test_200_uploads_are_all_answered_within_the_memory_limit(kind: str, folder: Path) -> None:
    arena_bytes = 3 * MiB  # less than the permits could fill
    async with scene(kind, folder, arena_bytes=arena_bytes, max_wait_s=0.5) as on:
        [one] = on.engines
        await one.call(engine.slow_down, 0.05)
        await one.call(engine.serve, 1)
        pids = list(await workers_of(on.http, on.workers))
        turns, peak = asyncio.Semaphore(50), 0

        async def upload() -> bool:
            async with turns:
                return is_answered(await on.http.post("/totals", content=UPLOAD))

        async def look() -> None:
            nonlocal peak
            while True:
                peak = max(peak, *map(watch.memfd_bytes, pids))
                await asyncio.sleep(0.01)  # between two looks

        looking = asyncio.create_task(look())
        answered = Counter(await asyncio.gather(*[upload() for _ in range(200)]))
        looking.cancel()

        assert answered[True] + answered[False] == 200
        assert answered[True] >= PERMITS * on.workers
        assert answered[False], "50 at once are more than a slow engine takes in time"
        assert 0 < peak <= arena_bytes
        # The memory of the last upload comes back by another way than its answer.
        held = await workers_of(on.http, on.workers)
        while any(worker.client.bytes_in_use for worker in held.values()):
            held = await workers_of(on.http, on.workers)
        assert set(held) == set(pids)
        for worker in held.values():
            client = worker.client
            assert client.peak_in_flight <= PERMITS
            assert client.peak_bytes_in_use <= arena_bytes
            assert (client.in_flight, client.waiting, client.engines[0].in_flight) == (0, 0, 0)
        served = await one.call(engine.held)
        assert (served.waiting, served.in_hand, served.clients_lost, served.leases) == (0, 0, 0, 0)
        assert (await on.site.stop()) == (0, "")


async def begin(port: int, sent: bytes) -> asyncio.StreamWriter:
    """Begin an upload, and send some of it."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /totals HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % len(UPLOAD)
    writer.write(head + sent)
    await writer.drain()
    return writer


@pytest.mark.parametrize("kind", ["uvicorn", extended("gunicorn-aiohttp")])
async def test_a_client_that_disconnects_releases_its_permit_and_cancels_the_work_of_the_engine(
    kind: str, folder: Path
) -> None:
    async with scene(kind, folder, workers=1) as on:
        [one] = on.engines
        await one.call(engine.serve, 4)
        writers = [await begin(on.site.port, UPLOAD[:1000]) for _ in range(PERMITS)]
        while (await one_worker(on)).in_flight < PERMITS:
            pass
        waiting = asyncio.create_task(on.http.post("/totals", content=UPLOAD))
        while (await one_worker(on)).waiting < 1:
            pass
        writers[0].close()
        assert is_answered(await waiting)
        for writer in writers[1:]:
            writer.close()
        while (await one_worker(on)).in_flight:
            pass

        await one.call(engine.slow_down, 3600.0)
        writers = [await begin(on.site.port, UPLOAD) for _ in range(3)]
        while (await one.call(engine.held)).in_hand < 3:
            pass
        for writer in writers:
            writer.close()
        while (await one.call(engine.held)).cancelled < 3:
            pass
        while (worker := await one_worker(on)).engines[0].in_flight or worker.bytes_in_use:
            pass
        assert worker.in_flight == 0
        await one.call(engine.slow_down, 0.0)
        assert is_answered(await on.http.post("/totals", content=UPLOAD))
        assert (await on.site.stop())[1] == ""


async def one_worker(on: Scene) -> ClientStatistics:
    [worker] = (await workers_of(on.http, 1)).values()
    return worker.client


@pytest.mark.promise(18)
@pytest.mark.parametrize("kind", ["uvicorn", extended("aiohttp")])
async def test_a_killed_engine_causes_503_until_its_successor_answers(kind: str, folder: Path) -> None:
    async with scene(kind, folder, engines=2, max_wait_s=0.3) as on:
        first, second = on.engines
        await first.call(engine.slow_down, 0.02)
        await first.call(engine.serve, 2)
        pids = set(await workers_of(on.http, on.workers))
        answered, is_over = [0, 0], asyncio.Event()

        async def load() -> None:
            while not is_over.is_set():
                answered[is_answered(await on.http.post("/totals", content=UPLOAD))] += 1

        async def until_more(of: bool) -> None:
            before = answered[of]
            while answered[of] < before + 20:
                await asyncio.sleep(0.01)  # between two looks

        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(load())
            await until_more(of=True)
            first.kill()
            await first.ended()
            await until_more(of=False)
            await second.call(engine.open_engine)
            await second.call(engine.serve, 2)
            await until_more(of=True)
            is_over.set()
        assert is_answered(await on.http.post("/totals", content=UPLOAD))
        assert set(await workers_of(on.http, on.workers)) == pids
        assert (await on.site.stop()) == (0, "")


@pytest.mark.extended
@pytest.mark.parametrize("kind", SERVERS)
async def test_sigterm_lets_requests_finish_and_sent_messages_be_taken(kind: str, folder: Path) -> None:
    async with scene(kind, folder) as on:
        [one] = on.engines
        await one.call(engine.slow_down, 0.2)
        # With the message that is left, these are all permits of a worker.
        asking = [asyncio.create_task(on.http.post("/totals", content=UPLOAD)) for _ in range(PERMITS - 1)]
        while (await one.call(engine.held)).waiting < PERMITS - 1:
            pass
        assert (await on.http.post("/left", content=UPLOAD)).status_code == 200
        stopping = asyncio.create_task(on.site.stop())
        await one.call(engine.serve, PERMITS - 1)
        assert all([is_answered(await asked) for asked in asking])
        assert await stopping == (0, "")
        while (await one.call(engine.held)).messages_taken < PERMITS:
            pass
