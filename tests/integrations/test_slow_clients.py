"""Real servers whose clients stall in the middle of their uploads."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.integrations import engine
from tests.integrations.scenes import UPLOAD, is_answered, scene
from tests.integrations.sites import workers
from tests.integrations.totals import PERMITS

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
