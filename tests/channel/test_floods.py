"""Peers without a key, however many connections they make, neither stall a server nor lock clients out."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from aiotensor import AccessDeniedError
from aiotensor.channel import MessageClient, MessageServer
from tests.channel.parties import Answer, Place, Places, Question, answer, place
from tests.repeated import check_rate, repeated_lines
from verification.attackers import ATTACKS, WITHOUT_KEYS, attacked
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

REPLIES, CLIENTS = 100, 4
ATTACKERS = 8  # enough that there are always unhandled events of connections


# At ``ipc://`` only processes of the same user reach the server. "hang up" is left out there: a process can
# connect to a Unix socket so fast that the thread of ZeroMQ has time for little else.
FLOODS = [("tcp", [attack], True) for attack in ATTACKS] + [
    ("tcp", list(WITHOUT_KEYS), True),
    ("ipc", ["greet"], False),
    ("ipc", ["say nothing"], False),
]


@contextmanager
def _place(scheme: str) -> Iterator[Place]:
    before, Places.scheme = Places.scheme, scheme
    try:
        with place() as made:
            yield made
    finally:
        Places.scheme = before


def _keys() -> tuple[dict[str, Any], dict[str, Any]]:
    """Make keys for a server and its clients."""
    public, secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    return (
        {"secret_key": secret, "client_keys": [client_public]},
        {"secret_key": client_secret, "server_key": public},
    )


@pytest.mark.parametrize(
    ("scheme", "attacks", "has_keys"),
    FLOODS,
    ids=[f"{scheme}{'-keys' * has_keys}-{'-'.join(attacks)}" for scheme, attacks, has_keys in FLOODS],
)
async def test_clients_are_served_while_others_flood_their_server(
    scheme: str, attacks: list[str], has_keys: bool
) -> None:
    with _place(scheme) as here:
        await _flood(here, attacks, *(_keys() if has_keys else ({}, {})))


async def _flood(
    here: Place, attacks: list[str], server_keys: dict[str, Any], client_keys: dict[str, Any]
) -> None:
    async with (
        MessageServer(here.messages, Question, **server_keys) as server,
        MessageClient(here.messages, reply_type=Answer, **client_keys) as existing,
    ):
        serving = asyncio.create_task(server.serve(answer))
        assert (await existing.request(Question(0))).seed == 0
        with repeated_lines("connection_refused") as lines:
            contexts = [attacked(here.messages, attack) for attack in attacks]
            for one in contexts:
                await asyncio.to_thread(one.__enter__)
            try:
                asking = asyncio.create_task(_ask(existing))
                for seed in range(CLIENTS):
                    async with MessageClient(here.messages, reply_type=Answer, **client_keys) as new:
                        assert (await new.request(Question(seed))).seed == seed
                await asking
            finally:
                for one in contexts:
                    await asyncio.to_thread(one.__exit__, None, None, None)
        assert existing.statistics().servers_lost == 0
        await existing.aclose()
        await until(lambda: server.statistics().clients == 0)
        await server.aclose()
        await serving
    check_rate([time for time, _ in lines])


async def _ask(client: MessageClient[Answer]) -> None:
    for seed in range(REPLIES):
        assert (await client.request(Question(seed))).seed == seed


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
async def test_the_loop_keeps_running_while_peers_send_garbage_and_disconnect(scheme: str) -> None:
    with _place(scheme) as here, repeated_lines("protocol_broken") as lines:
        async with MessageServer(here.messages, Question):
            flood = attacked(here.messages, "speak", 3)
            await asyncio.to_thread(flood.__enter__)
            try:
                await until(lambda: sum(count for _, count in lines) >= 10_000)
            finally:
                await asyncio.to_thread(flood.__exit__, None, None, None)


async def test_a_new_client_is_served_during_a_flood_on_a_busy_loop() -> None:
    with _place("ipc") as here:
        async with MessageServer(here.messages, Question) as server:
            serving = asyncio.create_task(server.serve(answer))
            is_over = False

            async def work() -> None:
                while not is_over:
                    until_s = time.perf_counter() + 0.01
                    while time.perf_counter() < until_s:
                        pass
                    await asyncio.sleep(0)

            with attacked(here.messages, "greet", ATTACKERS):
                working = asyncio.create_task(work())
                async with MessageClient(here.messages, reply_type=Answer) as new:
                    assert (await new.request(Question(1))).seed == 1
            is_over = True
            await working
            await server.aclose()
            await serving


async def test_refused_handshakes_are_logged_together_with_their_count() -> None:
    with _place("tcp") as here:
        server_keys, client_keys = _keys()
        others = [{**client_keys, "secret_key": zmq.curve_keypair()[1]} for _ in range(5)]
        async with MessageServer(here.messages, Question, **server_keys):
            with repeated_lines("connection_refused") as lines:
                for keys in others:
                    async with MessageClient(here.messages, reply_type=Answer, **keys) as client:
                        with pytest.raises(AccessDeniedError):
                            await client.request(Question(0))
                await until(lambda: sum(count for _, count in lines) == 5)
    check_rate([time for time, _ in lines])
