"""Two workers share two engines, which are killed and restarted under load."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

from tests.integrations import engine
from tests.integrations.scenes import UPLOAD, MiB, is_answered
from tests.integrations.sites import http_client, site
from verification.processes.peers import Peer, peers

_UPLOADS = 50  # at once


async def _open(stack: AsyncExitStack, address: str) -> Peer:
    """Start an engine at a folder."""
    [one] = await stack.enter_async_context(peers(address, 1))
    await one.call(engine.open_engine, address)
    await one.call(engine.slow_down, 0.02)
    await one.call(engine.serve, 2)
    return one


async def _received(one: Peer) -> int:
    return (await one.call(engine.held))[1].messages_received


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
        first, second = [await _open(stack, address) for address in addresses]
        answered, is_over = Counter[bool](), asyncio.Event()

        async def load() -> None:
            while not is_over.is_set():
                answered[is_answered(await http.post("/totals", content=UPLOAD))] += 1

        async def until_more(of: bool, by: int) -> None:
            before = answered[of]
            while answered[of] < before + by:
                await asyncio.sleep(0.01)  # between two looks

        async with asyncio.TaskGroup() as group:
            for _ in range(_UPLOADS):
                group.create_task(load())
            await until_more(of=True, by=300)
            shares = sorted([await _received(first), await _received(second)])
            assert shares[1] <= 1.2 * shares[0], shares

            first.kill()
            await first.ended()
            await until_more(of=True, by=100)
            assert answered[False] == 0, "the other engine answers the requests of the killed one"

            second.kill()
            await second.ended()
            await until_more(of=False, by=2 * _UPLOADS)  # all waiting requests, and later ones

            first = await _open(stack, addresses[0])
            await until_more(of=True, by=100)
            second = await _open(stack, addresses[1])
            while await _received(second) < 100:
                await asyncio.sleep(0.01)  # between two looks
            is_over.set()
        assert await _received(first) >= 100
