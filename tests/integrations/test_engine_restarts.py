"""Real servers under load while their engine is restarted again and again.

Set `AIOTENSOR_RESTARTS` for a longer run: 36 restarts take about three minutes.
"""

import asyncio
import itertools
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.integrations.scenes import UPLOAD, MiB, is_answered
from tests.integrations.sites import Site, http_client, site
from tests.integrations.stoppable import engine

RESTARTS = int(os.environ.get("AIOTENSOR_RESTARTS", "3"))
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
UPLOADERS, ABORTERS = 10, 2
ANSWERS_BETWEEN = 50  # that an engine gives before it is stopped


class Load:
    """Clients that upload without a break, and clients that disconnect in the middle of an upload."""

    def __init__(self, server: Site) -> None:
        self.responses = Counter[bool]()  # by whether it was answered; the others were refused with 503
        self.aborted = 0
        self._server = server
        self._is_over = False
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Run until `end`, and check every response."""
        async with asyncio.TaskGroup() as group:
            for _ in range(UPLOADERS):
                group.create_task(self._upload())
            for _ in range(ABORTERS):
                group.create_task(self._abort())
            group.create_task(self._scrape())

    def end(self) -> None:
        """Begin no more requests, and wait for those in progress."""
        self._is_over = True

    async def more(self, count: int, *, answered: bool) -> None:
        """Wait for more responses of a kind."""
        goal = self.responses[answered] + count
        async with self._changed:
            await self._changed.wait_for(lambda: self.responses[answered] >= goal)

    async def _upload(self) -> None:
        async with http_client(self._server) as http:
            while not self._is_over:
                response = await http.post("/totals", content=UPLOAD)
                async with self._changed:
                    self.responses[is_answered(response)] += 1
                    self._changed.notify_all()

    async def _abort(self) -> None:
        head = f"POST /totals HTTP/1.1\r\nHost: here\r\nContent-Length: {len(UPLOAD)}\r\n\r\n".encode()
        while not self._is_over:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
            writer.write(head + UPLOAD[: random.randrange(len(UPLOAD) + 1)])
            await writer.drain()
            with_response = asyncio.create_task(reader.read(1))
            await asyncio.wait([with_response], timeout=random.uniform(0, 0.05))
            with_response.cancel()
            writer.transport.abort()
            self.aborted += 1

    async def _scrape(self) -> None:
        async with http_client(self._server) as http:
            while not self._is_over:
                assert (await http.get("/metrics")).status_code == 200
                await asyncio.sleep(0.1)  # between two scrapes


@pytest.mark.timeout(60 + 30 * RESTARTS)
@pytest.mark.parametrize(("kind", "style"), [("uvicorn", "blocking"), ("gunicorn-aiohttp", "asyncio")])
async def test_responses_are_200_or_503_while_the_engine_is_restarted(
    kind: str, style: str, folder: Path
) -> None:
    async with site(
        kind,
        workers=2,
        tensors=f"unix://{folder}/t",
        messages=f"ipc://{folder}/m",
        arena_bytes=16 * MiB,
        max_wait_s=0.5,
        TOTALS_LOG="1",
    ) as server:
        load = Load(server)
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run())
            for number in itertools.islice(itertools.cycle(SIGNALS), RESTARTS):
                async with engine(style, folder, pace_s=0.01) as one:
                    await load.more(ANSWERS_BETWEEN, answered=True)
                    status, errors = await one.stop(number)
                assert status == (-signal.SIGKILL if number is signal.SIGKILL else 0), errors
                assert "ERROR aiotensor" not in errors  # asyncio reports that SystemExit ended a task
            load.end()
        assert load.responses[False], "restarts are noticed"
        assert load.aborted
        status, errors = await server.stop()
        assert status == 0
        for word in ("ERROR", "CRITICAL", "Traceback"):
            assert word not in errors
