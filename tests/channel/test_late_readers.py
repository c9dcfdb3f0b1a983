"""A process with a blocked event loop survives the end of its peers, also with heartbeats."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
import zmq

from aiotensor.channel import MessageClient
from aiotensor.protocol.exchange import VERSION, Answer, Ask, ClientHello, ServerHello, write
from tests.channel import parties, peers
from tests.channel.parties import Place, Places, Question, place
from tests.channel.rogues import hear, raw
from verification.processes.peers import Peer, State
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

HEARTBEATS: dict[str, Any] = {"heartbeat_interval_s": 0.02, "heartbeat_timeout_s": 5.0}

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)  # of ZMTP 3.1


class Heart(asyncio.Protocol):
    """Count the heartbeats that ZeroMQ sends on a connection that does not use ZeroMQ at this end.

    Args:
        kind: the kind of socket that it seems to be.
    """

    def __init__(self, kind: bytes) -> None:
        self._kind = kind
        self._beats = 0
        self._is_lost = False

    async def beat_several_times(self) -> None:
        """Wait for several more heartbeats."""
        enough = self._beats + 10
        await until(lambda: self._beats >= enough or self._is_lost)
        assert not self._is_lost, "the process has ended"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        ready = b"\x05READY\x0bSocket-Type" + len(self._kind).to_bytes(4, "big") + self._kind
        writing = cast("asyncio.WriteTransport", transport)  # uvloop's do not inherit from it
        writing.write(_GREETING + b"\x04" + bytes([len(ready)]) + ready)

    def data_received(self, data: bytes) -> None:
        self._beats += data.count(b"\x04PING")

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True


async def stand_still(state: State, path: str) -> None:
    """Block the event loop until the other end of a FIFO is closed."""
    del state
    Path(path).read_bytes()  # noqa: ASYNC240 - that is the purpose


async def still_serves(state: State) -> int:
    """Return how many messages have arrived."""
    await until(lambda: state.others["server"].statistics().clients == 0)
    received: int = state.others["server"].statistics().messages_received
    return received


async def open_client(state: State, addresses: list[str]) -> None:
    """Open a client that has heartbeats."""
    client = MessageClient(addresses, reply_type=parties.Answer, high_water_mark=1, **HEARTBEATS)
    state.others["client"] = await state.stack.enter_async_context(client)


async def begin_to_ask(state: State, count: int) -> None:
    """Ask without waiting for answers."""
    client = state.others["client"]
    state.others["asking"] = [asyncio.create_task(client.request(Question(seed))) for seed in range(count)]
    await until(lambda: client.statistics().messages_sent == count)


@asynccontextmanager
async def _standing_still(child: Peer, folder: Path) -> AsyncIterator[None]:
    """Keep the event loop of a process blocked while the block runs."""
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


async def test_a_blocked_server_survives_a_client_that_closed_after_sending(
    here: Place, tmp_path: Path
) -> None:
    loop = asyncio.get_running_loop()
    async with peers.process(here) as child:
        await child.call(peers.open_server, here, answers=False, high_water_mark=1, **HEARTBEATS)
        host, _, port = here.messages.removeprefix("tcp://").partition(":")
        transport, heart = await loop.create_connection(lambda: Heart(b"DEALER"), host, int(port))
        async with raw(zmq.DEALER, here.messages) as client:
            await client.send_multipart([write(ClientHello(VERSION, 1))])
            await client.recv_multipart()
            async with _standing_still(child, tmp_path):
                body = memoryview(msgspec.msgpack.encode(Question(1)))
                for number in range(50):
                    await client.send_multipart([write(Ask(number, body, wants_answer=False))])
                client.setsockopt(zmq.LINGER, 1000)
                client.close()
                await heart.beat_several_times()
        assert await child.call(still_serves) == 50
        transport.close()


async def test_a_blocked_client_survives_a_server_that_closed_after_answering(
    here: Place, tmp_path: Path
) -> None:
    heart = Heart(b"ROUTER")
    listener = await asyncio.get_running_loop().create_server(lambda: heart, "127.0.0.1", 0)
    another = f"tcp://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with listener, peers.process(here) as child:
        async with raw(zmq.ROUTER, here.messages, binds=True) as server:
            opening = child.start(open_client, [here.messages, another])
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
                await heart.beat_several_times()
        results = await child.call(peers.outcomes)
        assert len(results) == 50
