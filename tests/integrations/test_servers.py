"""Real servers under real load, in front of a real engine: nothing is lost, and nothing exceeds its bound."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from aiotensor import TensorHandle
from tests.integrations import engine
from tests.integrations.scenes import UPLOAD, MiB, Scene, is_answered, scene
from tests.integrations.sites import SERVERS, http_client, site, workers
from tests.integrations.totals import PERMITS, Held, total_of
from verification.processes.peers import Peer, peers


def shared_bytes(pid: int) -> int:
    """Count the bytes of shared memory that the system has given to a process."""
    segments = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            path = f"/proc/{pid}/fd/{name}"
            if "memfd:aiotensor" in os.readlink(path):
                status = os.stat(path)
                segments[status.st_ino] = status.st_blocks * 512
    return sum(segments.values())


def extended(*kinds: str) -> list[Any]:
    """Return the servers with which `make test-all` repeats a test."""
    return [pytest.param(kind, marks=pytest.mark.extended) for kind in kinds]


@pytest.mark.promise(18)
@pytest.mark.parametrize("kind", ["uvicorn", "aiohttp", *extended("gunicorn-aiohttp")])
async def test_200_uploads_are_all_answered_within_the_memory_limit(kind: str, folder: Path) -> None:
    arena_bytes = 3 * MiB  # less than the permits could fill
    async with scene(kind, folder, arena_bytes=arena_bytes, max_wait_s=0.5) as on:
        [one] = on.engines
        await one.call(engine.slow_down, 0.05)
        await one.call(engine.serve, 1)
        pids = list(await workers(on.http, on.workers))
        turns, peak = asyncio.Semaphore(50), 0

        async def upload() -> bool:
            async with turns:
                return is_answered(await on.http.post("/totals", content=UPLOAD))

        async def look() -> None:
            nonlocal peak
            while True:
                peak = max(peak, *map(shared_bytes, pids))
                await asyncio.sleep(0.01)  # between two looks

        looking = asyncio.create_task(look())
        answered = Counter(await asyncio.gather(*[upload() for _ in range(200)]))
        looking.cancel()

        assert answered[True] + answered[False] == 200
        assert answered[True] >= PERMITS * on.workers
        assert answered[False], "50 at once are more than a slow engine takes in time"
        assert 0 < peak <= arena_bytes
        # The memory of the last upload comes back by another way than its answer.
        held = await workers(on.http, on.workers)
        while any(worker.bytes_in_use for worker in held.values()):
            held = await workers(on.http, on.workers)
        assert set(held) == set(pids)
        for worker in held.values():
            assert worker.peak_in_flight <= PERMITS
            assert worker.peak_bytes_in_use <= arena_bytes
            assert (worker.in_flight, worker.bytes_in_use, worker.waiting, worker.requests) == (0, 0, 0, 0)
        received, _ = await one.call(engine.held)
        assert (received.unclaimed_tensors, received.senders_lost, received.leases) == (0, 0, 0)
        assert (await on.site.stop()) == (0, "")


async def hang_up(port: int, *, sent: bytes, of: int) -> asyncio.StreamWriter:
    """Begin an upload, and say some of it."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /totals HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % of + sent)
    await writer.drain()
    return writer


@pytest.mark.parametrize("kind", ["uvicorn", *extended("gunicorn-aiohttp")])
async def test_a_client_that_disconnects_during_its_upload_releases_its_permit(
    kind: str, folder: Path
) -> None:
    async with scene(kind, folder, workers=1) as on:
        await on.engines[0].call(engine.serve, 1)
        writers = [await hang_up(on.site.port, sent=UPLOAD[:1000], of=len(UPLOAD)) for _ in range(PERMITS)]
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
        assert (await on.site.stop())[1] == ""


@pytest.mark.parametrize("kind", ["uvicorn", *extended("gunicorn-aiohttp")])
async def test_a_client_that_disconnects_cancels_the_work_of_the_engine(kind: str, folder: Path) -> None:
    async with scene(kind, folder, workers=1) as on:
        [one] = on.engines
        await one.call(engine.slow_down, 3600.0)
        await one.call(engine.serve, 4)
        writers = [await hang_up(on.site.port, sent=UPLOAD, of=len(UPLOAD)) for _ in range(3)]
        while (await one.call(engine.held))[1].in_hand < 3:
            pass
        for writer in writers:
            writer.close()
        while (await one.call(engine.held))[1].cancelled < 3:
            pass
        while (worker := await one_worker(on)).requests or worker.bytes_in_use:
            pass
        assert worker.in_flight == 0
        await one.call(engine.slow_down, 0.0)
        assert is_answered(await on.http.post("/totals", content=UPLOAD))
        assert (await on.site.stop())[1] == ""


async def one_worker(on: Scene) -> Held:
    [worker] = (await workers(on.http, 1)).values()
    return worker


@pytest.mark.promise(18)
@pytest.mark.parametrize("kind", ["uvicorn", *extended("aiohttp")])
async def test_a_killed_engine_causes_503_until_its_successor_answers(kind: str, folder: Path) -> None:
    async with scene(kind, folder, engines=2, max_wait_s=0.3) as on:
        first, second = on.engines
        await first.call(engine.slow_down, 0.02)
        await first.call(engine.serve, 2)
        pids = set(await workers(on.http, on.workers))
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
            await second.call(engine.open_engine, on.messages)
            await second.call(engine.serve, 2)
            await until_more(of=True)
            is_over.set()
        assert is_answered(await on.http.post("/totals", content=UPLOAD))
        assert set(await workers(on.http, on.workers)) == pids
        assert (await on.site.stop()) == (0, "")


@pytest.mark.extended
@pytest.mark.parametrize("kind", SERVERS)
async def test_sigterm_lets_requests_finish_and_sent_messages_be_taken(kind: str, folder: Path) -> None:
    async with scene(kind, folder, TOTALS_DRAIN_S="60") as on:
        [one] = on.engines
        await one.call(engine.slow_down, 0.2)
        left = await on.http.post("/left", content=UPLOAD)
        handle = msgspec.json.decode(left.content, type=TensorHandle)
        # With the message that was left, these are all permits of a worker.
        asking = [asyncio.create_task(on.http.post("/totals", content=UPLOAD)) for _ in range(PERMITS - 1)]
        while (await one.call(engine.held))[1].waiting < PERMITS - 1:
            pass
        stopping = asyncio.create_task(on.site.stop())
        await one.call(engine.serve, PERMITS)
        assert all([is_answered(await asked) for asked in asking])
        assert await one.call(engine.take, handle) == total_of(UPLOAD)
        assert await stopping == (0, "")


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["uvicorn", "aiohttp"])
async def test_permanent_errors_are_not_answered_with_503_or_details(kind: str, folder: Path) -> None:
    async with scene(kind, folder, workers=1, arena_bytes=2 * MiB) as on:
        large = await on.http.post("/totals", content=UPLOAD * 3)
        assert (large.status_code, large.json()["reason"]) == (413, "too_large")
        assert "retry-after" not in large.headers

        await on.engines[0].call(engine.fail)
        failed = await on.http.post("/totals", content=UPLOAD)
        assert (failed.status_code, failed.json()["reason"]) == (502, "engine_failed")
        assert failed.headers["content-type"] == "application/problem+json"
        assert "secret" not in failed.text


# Clients that stall

HEAD = b"POST /totals HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % len(UPLOAD)


@asynccontextmanager
async def stalled(port: int, count: int, sent: bytes) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Begin uploads that stall, and close their connections at the end of the block."""
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    for _, writer in connections:
        writer.write(HEAD + sent)
    try:
        yield [reader for reader, _ in connections]
    finally:
        for _, writer in connections:
            writer.close()


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["uvicorn", "aiohttp"])
async def test_clients_that_stall_lose_their_permits_and_get_408(kind: str, folder: Path) -> None:
    async with scene(kind, folder, workers=1, TOTALS_UPLOAD_GRACE_S="0.5") as on:
        await on.engines[0].call(engine.serve, 1)
        async with stalled(on.site.port, PERMITS, UPLOAD[:1000]) as readers:
            for reader in readers:
                assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            assert is_answered(await on.http.post("/totals", content=UPLOAD))
            while True:  # memory comes back by another way than the answer
                [worker] = (await workers(on.http, 1)).values()
                if not (worker.in_flight or worker.bytes_in_use):
                    break
            assert worker.waiting == 0
        assert (await on.site.stop())[1] == ""


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["uvicorn", "aiohttp"])
async def test_200_stalled_clients_block_neither_other_clients_nor_the_shutdown(
    kind: str, folder: Path
) -> None:
    async with scene(kind, folder, max_wait_s=0.5, TOTALS_UPLOAD_GRACE_S="1") as on:
        await on.engines[0].call(engine.serve, 4)
        await workers(on.http, on.workers)
        async with stalled(on.site.port, 200, UPLOAD[:1000]):
            while not is_answered(await on.http.post("/totals", content=UPLOAD)):  # 503 while all are in use
                assert (await on.http.get("/metrics")).status_code == 200
            async with stalled(on.site.port, 200, b""):
                assert (await on.http.get("/metrics")).status_code == 200
                assert (await on.site.stop())[0] == 0


# Several engines

UPLOADERS = 50  # at once


async def opened(stack: AsyncExitStack, address: str) -> Peer:
    """Start an engine at a folder."""
    [one] = await stack.enter_async_context(peers(address, 1))
    await one.call(engine.open_engine, address)
    await one.call(engine.slow_down, 0.02)
    await one.call(engine.serve, 2)
    return one


async def received(one: Peer) -> int:
    return (await one.call(engine.held))[1].messages_received


@pytest.mark.extended
async def test_engines_share_the_uploads_and_replace_one_that_was_killed(folder: Path) -> None:
    addresses = [f"engine://{folder}/{number}" for number in range(2)]
    both = " ".join(addresses)
    async with (
        AsyncExitStack() as stack,
        site(
            "uvicorn",
            workers=2,
            tensors=both,
            messages=both,
            arena_bytes=64 * MiB,
            max_wait_s=60,  # no request may wait for the killed engine for as long
            TOTALS_GRACE_S="0.5",
            TOTALS_IDEMPOTENT="yes",
        ) as server,
        http_client(server) as http,
    ):
        first, second = [await opened(stack, address) for address in addresses]
        answered, is_over = Counter[bool](), asyncio.Event()

        async def load() -> None:
            while not is_over.is_set():
                answered[is_answered(await http.post("/totals", content=UPLOAD))] += 1

        async def until_more(of: bool, by: int) -> None:
            before = answered[of]
            while answered[of] < before + by:
                await asyncio.sleep(0.01)  # between two looks

        async with asyncio.TaskGroup() as group:
            for _ in range(UPLOADERS):
                group.create_task(load())
            await until_more(of=True, by=300)
            shares = sorted([await received(first), await received(second)])
            assert shares[1] <= 1.2 * shares[0], shares

            first.kill()
            await first.ended()
            await until_more(of=True, by=100)
            assert answered[False] == 0, "the other engine answers the requests of the killed one"

            second.kill()
            await second.ended()
            await until_more(of=False, by=2 * UPLOADERS)  # all waiting requests, and later ones

            first = await opened(stack, addresses[0])
            await until_more(of=True, by=100)
            second = await opened(stack, addresses[1])
            while await received(second) < 100:
                await asyncio.sleep(0.01)  # between two looks
            is_over.set()
        assert await received(first) >= 100


# Metrics


async def scrape(on: Scene) -> dict[str, float]:
    """Read a page as Prometheus does, and add up each kind of sample; errors by their types."""
    page = await on.http.get("/metrics")
    assert page.status_code == 200
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(page.text):
        for sample in family.samples:
            found[sample.name + sample.labels.get("type", "")] += sample.value  # type: ignore[assignment]
    return dict(found)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["uvicorn", "aiohttp"])
async def test_a_page_of_metrics_under_load_agrees_with_the_load_that_was_sent(
    kind: str, folder: Path
) -> None:
    async with scene(kind, folder, workers=1, max_wait_s=0.5) as on:
        [one] = on.engines
        await one.call(engine.slow_down, 0.05)
        await one.call(engine.serve, 1)
        turns, pages, is_over = asyncio.Semaphore(30), [await scrape(on)], asyncio.Event()

        async def upload() -> bool:
            async with turns:
                return is_answered(await on.http.post("/totals", content=UPLOAD))

        async def watch() -> None:
            while not is_over.is_set():
                pages.append(await scrape(on))

        watching = asyncio.create_task(watch())
        answered = Counter(await asyncio.gather(*[upload() for _ in range(90)]))
        is_over.set()
        await watching

        # The permit of the last upload comes back by another way than its answer.
        while (last := await scrape(on))["aiotensor_sender_permits_in_use"]:
            pass
        assert answered[True] >= PERMITS
        assert answered[False]
        assert last["aiotensor_client_answers_total"] == answered[True]
        assert last["aiotensor_sender_messages_sent_total"] == answered[True]
        assert last["aiotensor_sender_tensors_sent_total"] == answered[True]
        assert last["aiotensor_sender_sent_bytes_total"] == answered[True] * MiB
        assert last["aiotensor_sender_copied_bytes_total"] == answered[True] * MiB
        assert last["aiotensor_sender_errors_totalWouldBlockError"] == answered[False]
        assert last["aiotensor_sender_wait_seconds_count"] >= answered[False]
        assert last["aiotensor_sender_permits_limit"] == PERMITS
        assert last["aiotensor_sender_permits_in_use"] == last["aiotensor_sender_waiting_calls"] == 0
        assert last["aiotensor_sender_permits_peak"] == PERMITS
        assert any(page["aiotensor_sender_waiting_calls"] for page in pages)
        assert any(page["aiotensor_client_in_flight"] for page in pages)
        for before, after in pairwise(pages):
            for name in before:
                if name.startswith("aiotensor") and "_total" in name:
                    assert before[name] <= after[name], name
        # And the engine says the same of its side.
        _, served = await one.call(engine.held)
        assert served.answers == answered[True]
