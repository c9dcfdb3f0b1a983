"""A process whose event loop stands still outlives the peers that end meanwhile, also with heartbeats."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

from aiotensor.protocol.exchange import VERSION, Answer, Ask, ClientHello, ServerHello, write
from tests.channel import peers
from tests.channel.parties import Place, Places, Question, place
from tests.channel.rogues import hear, raw
from tests.pairs import until
from tests.processes.peers import Peer, State

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

HEARTBEATS = {"heartbeat_interval_s": 0.02, "heartbeat_timeout_s": 5.0}
TICKS_S = 0.5  # several heartbeats


async def stand_still(state: State, path: str) -> None:
    """Block the event loop until the other end of a FIFO is closed."""
    del state
    Path(path).read_bytes()  # noqa: ASYNC240 - that is the purpose


async def still_serves(state: State) -> int:
    """Return how many messages have arrived."""
    await until(lambda: state.others["server"].statistics().clients == 0)
    received: int = state.others["server"].statistics().messages_received
    return received


async def begin_to_ask(state: State, count: int) -> None:
    """Ask without waiting for answers."""
    client = state.others["client"]
    state.others["asking"] = [asyncio.create_task(client.request(Question(seed))) for seed in range(count)]
    await until(lambda: client.statistics().messages_sent == count)


@asynccontextmanager
async def _standing_still(child: Peer, folder: Path) -> AsyncIterator[None]:
    """Have the event loop of a process stand still while the block runs."""
    path = folder / "fifo"
    os.mkfifo(path)
    standing = child.start(stand_still, str(path))
    with await asyncio.to_thread(open, path, "wb"):
        yield
    await standing


@pytest.fixture
def here() -> Iterator[Place]:
    before, Places.scheme = Places.scheme, "tcp"
    try:
        with place() as made:
            yield made
    finally:
        Places.scheme = before


async def test_a_server_that_stands_still_outlives_a_client_that_leaves_messages(
    here: Place, tmp_path: Path
) -> None:
    async with peers.process(here) as child:
        await child.call(peers.open_server, here, answers=False, high_water_mark=1, **HEARTBEATS)
        async with raw(zmq.DEALER, here.messages) as client:
            await client.send_multipart([write(ClientHello(VERSION, 1))])
            await client.recv_multipart()
            async with _standing_still(child, tmp_path):
                body = memoryview(msgspec.msgpack.encode(Question(1)))
                for number in range(50):
                    await client.send_multipart([write(Ask(number, body, wants_answer=False))])
                client.setsockopt(zmq.LINGER, 1000)
                client.close()
                await asyncio.sleep(TICKS_S)
        assert await child.call(still_serves) == 50


async def test_a_client_that_stands_still_outlives_a_server_that_leaves_answers(
    here: Place, tmp_path: Path
) -> None:
    async with peers.process(here) as child:
        async with raw(zmq.ROUTER, here.messages, binds=True) as server:
            opening = child.start(peers.open_client, here, high_water_mark=1, **HEARTBEATS)
            identity, _ = await hear(server)
            await opening
            hello = ServerHello(VERSION, 1, max_waiting=100, max_waiting_bytes=1 << 20)
            await server.send_multipart([identity, write(hello)])
            await child.call(begin_to_ask, 50)
            async with _standing_still(child, tmp_path):
                body = memoryview(msgspec.msgpack.encode({"seed": 1, "total": int(torch.ones(1).sum())}))
                for number in range(50):
                    await server.send_multipart([identity, write(Answer(number, body))])
                server.setsockopt(zmq.LINGER, 1000)
                server.close()
                await asyncio.sleep(TICKS_S)
        results = await child.call(peers.outcomes)
        assert len(results) == 50
