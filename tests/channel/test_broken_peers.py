"""A peer that breaks the protocol or floods a server loses its connection, and no other peer is affected."""

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
import torch
import zmq
import zmq.asyncio

from aiotensor import AccessDeniedError, PeerLostError, ProtocolError, RefusedError, TensorHandle
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.channel.client_session import MAX_UNREAD
from aiotensor.codec import TensorEncoder
from aiotensor.protocol.exchange import (
    VERSION,
    Answer,
    Ask,
    ClientHello,
    Failure,
    ServerHello,
    read_from_server,
    write,
)
from aiotensor.protocol.frames import Close
from tests.channel import parties
from tests.channel.parties import Channel, Question, answer, channel, key_options, place, said, settled
from tests.channel.rogues import hear, raw
from tests.repeated import check_rate, repeated_lines
from tests.selection import COMPLETE
from verification import inside
from verification.attackers import ATTACKS, WITHOUT_KEYS, attacked
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

Parts = Sequence[bytes | memoryview]


# With one of two clients connected: 64 connections, and the slot of the other client.
_MOST_SILENT = 65


BODY = memoryview(msgspec.msgpack.encode(Question(1)))


HELLO = write(ClientHello(VERSION, 1))


def ask(number: int = 0, body: bytes | memoryview = BODY, **rest: Any) -> bytes:
    return write(Ask(number, memoryview(body), **rest))


@asynccontextmanager
async def served() -> AsyncIterator[Channel]:
    """Open a channel whose server answers an honest client throughout."""
    async with channel() as ends:
        serving = asyncio.create_task(ends.server.serve(answer))
        with said():
            yield ends
        got = await ends.client.request(Question(5, pattern(5, BIG), wish="3"))
        assert got.total == int(pattern(5, BIG).sum())
        assert ends.client.statistics().servers_lost == 0
        await settled(ends)
        await ends.server.aclose()
        await serving


@pytest.mark.promise(24)
@pytest.mark.parametrize("is_identified", [False, True], ids=["before its hello", "after its hello"])
async def test_a_client_that_violates_the_protocol_gets_the_reason_and_is_disconnected(
    is_identified: bool,
) -> None:
    async with served() as ends, raw(zmq.DEALER, ends.place.messages) as rogue:
        if is_identified:
            await rogue.send_multipart([HELLO])
            assert isinstance(read_from_server((await rogue.recv_multipart())[0]), ServerHello)
        await rogue.send_multipart([b"\xc1noise"])
        close = read_from_server((await rogue.recv_multipart())[0])
        assert isinstance(close, Close)
        assert close.reason.startswith("the client broke the protocol: ")
        # The server ignores all further messages of this client.
        await rogue.send_multipart([HELLO])
        await rogue.send_multipart([ask()])
        assert (await ends.client.request(Question(2))).seed == 2
        assert not await rogue.poll(0)
        await until(lambda: ends.server.statistics().clients == 1)


async def test_a_client_of_another_version_is_refused_with_the_reason() -> None:
    async with served() as ends, raw(zmq.DEALER, ends.place.messages) as rogue:
        await rogue.send_multipart([write(ClientHello(VERSION + 1, 1))])
        close = read_from_server((await rogue.recv_multipart())[0])
        assert isinstance(close, Close)
        assert close.is_refusal
        assert close.reason == (
            f"the client has protocol version {VERSION + 1}, and the server has version {VERSION}: install "
            "the same version of aiotensor on both sides"
        )
        assert ends.server.statistics().clients_refused == 1
        assert (await ends.client.request(Question(2))).seed == 2


@pytest.mark.promise(26)
async def test_a_client_that_never_reads_its_answers_is_disconnected() -> None:
    with place() as here, said() as texts:
        async with (
            MessageServer(here.messages, Question, high_water_mark=1) as server,
            raw(zmq.DEALER, here.messages, high_water_mark=1) as rogue,
        ):
            await rogue.send_multipart([HELLO])
            iterating = asyncio.create_task(anext(server))  # refuses unreadable messages
            number = 0
            while server.statistics().clients_lost == 0:
                await rogue.send_multipart([ask(number, b"\xc1")])
                number += 1
                # The client has credit for the next one, since a refused message does not wait.
                await until(lambda: server.statistics().failures == number)  # noqa: B023
            assert MAX_UNREAD < number < 10 * MAX_UNREAD
            assert any("was disconnected: it does not read its replies" in text for text in texts)
            iterating.cancel()
            await asyncio.wait([iterating])
            assert (server.statistics().waiting, server.statistics().clients) == (0, 0)


@pytest.mark.promise(26)
async def test_silent_connections_are_limited_and_the_oldest_is_closed_first() -> None:
    with place() as here, repeated_lines("connection_refused") as refused:
        path = here.messages.removeprefix("ipc://")
        async with (
            MessageServer(here.messages, Question, max_clients=2) as server,
            MessageClient(here.messages, reply_type=parties.Answer) as client,
        ):
            serving = asyncio.create_task(server.serve(answer))
            assert (await client.request(Question(1))).seed == 1
            silent = [await asyncio.open_unix_connection(path) for _ in range(_MOST_SILENT + 10)]
            ends = [asyncio.create_task(_until_cut(reader)) for reader, _ in silent]
            await until(lambda: sum(end.done() for end in ends) == 10)
            assert all(end.done() for end in ends[:10])
            assert (await client.request(Question(2))).seed == 2
            # They occupy no slot of a client that sends a hello: the server closes the next oldest one.
            async with MessageClient(here.messages, reply_type=parties.Answer) as other:
                assert (await other.request(Question(3))).seed == 3
            await until(lambda: sum(end.done() for end in ends) >= 11)
            await until(lambda: sum(count for _, count in refused) >= 11)
            check_rate([time for time, _ in refused])
            for (_, writer), end in zip(silent, ends, strict=True):
                end.cancel()
                writer.close()
            await server.aclose()
            await serving


async def _until_cut(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionResetError):
        while await reader.read(100):  # ZeroMQ greets at once
            pass


NO_TENSOR = TensorEncoder(lambda _: 0).encode(Question(1, torch.zeros(3)))[0]
NEGATIVE = TensorHandle("x" * 32, -1, 0, "int64", (1,), "cpu")
REFUSED: list[tuple[Parts, str]] = [
    ([ask(0, b"\xc1")], "cannot be decoded"),
    ([ask(1, msgspec.msgpack.encode(5))], "Expected a Struct, a dataclass or a dict, got `int`"),
    ([ask(2, b"")], "cannot be decoded"),
    ([ask(3), b"x"], "1 buffers"),
    ([ask(4, handles=(NEGATIVE,))], "negative"),
    (
        [ask(5, TensorEncoder(lambda _: 0).encode(Question(1, torch.zeros(3)))[0])],
        "referred to tensor 0 of 0",
    ),
]


@pytest.mark.promise(31)
async def test_an_invalid_message_fails_without_affecting_later_ones() -> None:
    async with served() as ends, raw(zmq.DEALER, ends.place.messages) as rogue:
        await rogue.send_multipart([HELLO])
        assert isinstance(read_from_server((await rogue.recv_multipart())[0]), ServerHello)
        for parts, reason in REFUSED:
            await rogue.send_multipart(parts)
            failure = read_from_server((await rogue.recv_multipart())[0])
            assert isinstance(failure, Failure)
            assert reason in failure.text
        await rogue.send_multipart([ask(len(REFUSED))])
        good = read_from_server((await rogue.recv_multipart())[0])
        assert isinstance(good, Answer)
        assert good.number == len(REFUSED)


def _a_bit(part: bytes, chance: random.Random) -> bytes:
    where = chance.randrange(len(part))
    return part[:where] + bytes([part[where] ^ 1 << chance.randrange(8)]) + part[where + 1 :]


CHANGES: list[Callable[[bytes, random.Random], bytes]] = [
    lambda part, chance: chance.randbytes(len(part)),
    _a_bit,
    lambda part, chance: part[: chance.randrange(len(part))],
    lambda part, chance: part + chance.randbytes(chance.randrange(1, 9)),
]


@pytest.mark.promise(24)
async def test_a_fuzzed_message_part_does_not_affect_other_clients(moments: random.Random) -> None:
    whole = TensorEncoder(inline_bytes=16).encode(
        Question(1, pattern(1, 100), {"x": [pattern(2, 50), pattern(3, 1)]})
    )
    async with served() as ends:
        for change, position, _ in itertools.product(CHANGES, range(3), range(25 if COMPLETE else 4)):
            async with raw(zmq.DEALER, ends.place.messages) as rogue:
                parts = [ask(body=whole[0]), *(bytes(part) for part in whole[1:])]
                parts[position] = change(parts[position], moments)
                await rogue.send_multipart([HELLO])
                await rogue.send_multipart(parts)
                await rogue.send_multipart([ask(1)])  # answered if still connected, in any order
                heard: set[object] = set()
                while not heard & {"cut off", 1}:
                    header = read_from_server((await rogue.recv_multipart())[0])
                    heard.add("cut off" if isinstance(header, Close) else getattr(header, "number", None))
        await until(lambda: ends.server.statistics().clients == 1)


async def _waiting(client: MessageClient[parties.Answer]) -> "asyncio.Task[parties.Answer]":
    """Start a request, and return when it waits for a server."""
    asking = asyncio.create_task(client.request(Question(1)))
    await until(lambda: inside.waiters_for_server(client) == 1)
    return asking


@asynccontextmanager
async def asked(
    address: str,
) -> AsyncIterator[tuple[zmq.asyncio.Socket, bytes, "asyncio.Task[parties.Answer]"]]:
    """Open a client that has sent a request to our raw server and waits for its answer."""
    async with (
        raw(zmq.ROUTER, address, binds=True) as rogue,
        MessageClient(address, reply_type=parties.Answer) as client,
    ):
        identity, hello = await hear(rogue)
        assert isinstance(hello, ClientHello)
        await rogue.send_multipart([identity, write(ServerHello(VERSION, 77))])
        asking = asyncio.create_task(client.request(Question(1)))
        _, question = await hear(rogue)
        assert isinstance(question, Ask)
        yield rogue, identity, asking


@pytest.mark.promise(24)
async def test_requests_to_a_server_that_violates_the_protocol_fail() -> None:
    with place() as here, said() as texts:
        async with asked(here.messages) as (rogue, identity, asking):
            await rogue.send_multipart([identity, b"\xc1noise"])
            with pytest.raises(PeerLostError, match="broke the protocol") as caught:
                await asking
            assert caught.value.pid == 77
            assert isinstance(caught.value.__cause__, ProtocolError)
        assert any("broke the protocol" in text for text in texts)


UNREADABLE: dict[str, tuple[Parts, str]] = {
    "a body that is none": ([write(Answer(0, memoryview(b"\xc1")))], "cannot be decoded"),
    "a buffer too many": ([write(Answer(0, BODY)), b"x"], "1 buffers"),
    "tensors for a receiver that there is not": (
        [write(Answer(0, BODY, (TensorHandle("x" * 32, 0, 0, "int64", (1,), "cpu"),)))],
        "this client has no receiver",
    ),
}


@pytest.mark.parametrize(("wrong", "reason"), UNREADABLE.values(), ids=UNREADABLE)
async def test_an_unreadable_answer_fails_only_its_request(wrong: Parts, reason: str) -> None:
    with place() as here:
        async with asked(here.messages) as (rogue, identity, asking):
            await rogue.send_multipart([identity, *wrong])
            with pytest.raises(ProtocolError, match=reason):
                await asking


async def test_a_server_of_another_version_is_refused_and_its_successor_gets_the_next_request() -> None:
    with place() as here:
        async with MessageClient(here.messages, reply_type=parties.Answer) as client:
            async with raw(zmq.ROUTER, here.messages, binds=True) as rogue:
                identity, _ = await hear(rogue)
                asking = await _waiting(client)
                await rogue.send_multipart([identity, write(ServerHello(VERSION + 1, 77))])
                with pytest.raises(RefusedError, match=f"the server has protocol version {VERSION + 1}"):
                    await asking
            os.unlink(here.messages.removeprefix("ipc://"))
            asking = asyncio.create_task(client.request(Question(2)))  # a request looks for a server again
            async with MessageServer(here.messages, Question) as server:
                await (await anext(server)).reply(parties.Answer(2))
                assert (await asking).seed == 2


# Floods


@pytest.mark.promise(26)
@pytest.mark.parametrize(
    "attacks",
    [WITHOUT_KEYS, *[pytest.param([attack], marks=pytest.mark.extended) for attack in ATTACKS]],
    ids=["all", *ATTACKS],
)
async def test_clients_are_served_while_others_flood_their_server(attacks: Sequence[str]) -> None:
    server_keys, client_keys = key_options()
    async with (
        MessageServer("tcp://127.0.0.1:0", Question, **server_keys) as server,
        MessageClient(server.address, reply_type=parties.Answer, **client_keys) as existing,
    ):
        address = server.address
        serving = asyncio.create_task(server.serve(answer))
        assert (await existing.request(Question(0))).seed == 0

        async def ask() -> None:
            for seed in range(100 if COMPLETE else 20):
                assert (await existing.request(Question(seed))).seed == seed

        with repeated_lines("connection_refused") as lines, ExitStack() as attackers:
            for attack in attacks:
                await asyncio.to_thread(attackers.enter_context, attacked(address, attack))
            asking = asyncio.create_task(ask())
            for seed in range(4 if COMPLETE else 2):
                async with MessageClient(address, reply_type=parties.Answer, **client_keys) as new:
                    assert (await new.request(Question(seed))).seed == seed
            await asking
            await asyncio.to_thread(attackers.close)
        assert existing.statistics().servers_lost == 0
        await existing.aclose()
        await until(lambda: server.statistics().clients == 0)
        await server.aclose()
        await serving
    check_rate([time for time, _ in lines])


async def test_refused_handshakes_are_logged_together_with_their_count() -> None:
    server_keys, client_keys = key_options()
    async with MessageServer("tcp://127.0.0.1:0", Question, **server_keys) as server:
        with repeated_lines("connection_refused") as lines:
            for _ in range(3):
                client_keys["secret_key"] = zmq.curve_keypair()[1]
                async with MessageClient(server.address, reply_type=parties.Answer, **client_keys) as client:
                    with pytest.raises(AccessDeniedError):
                        await client.request(Question(0))
            await until(lambda: sum(count for _, count in lines) == 3)
    check_rate([time for time, _ in lines])
