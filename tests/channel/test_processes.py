"""Clients and servers in separate processes, which are killed, stopped and started again."""

import asyncio
import os
import random
import signal

import pytest

from aiotensor import PeerLostError
from aiotensor.channel import MessageServer
from tests.channel import peers
from tests.channel.parties import Place, Question, answer, place
from tests.selection import COMPLETE
from tests.transports.unix_ends import no_descriptors
from verification.processes.peers import Peer
from verification.promptly import promptly
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


CLIENTS, EACH, AT_ONCE = 4, 250 if COMPLETE else 50, 64


async def _answer_out_of_order(server: MessageServer[Question], chance: random.Random) -> None:
    """Take some, and answer them in any order."""
    held = []
    while True:
        held.append(await anext(server))
        while held and (len(held) > 8 or not server.statistics().waiting):
            async with held.pop(chance.randrange(len(held))) as request:
                await request.reply(await answer(request.message))


async def test_requests_of_four_processes_are_answered_and_none_is_lost_or_mixed_up() -> None:
    with place() as here:
        async with peers.listening(here) as (server, receiver):
            serving = asyncio.create_task(_answer_out_of_order(server, random.Random(1)))
            children = [Peer(here.tensors) for _ in range(CLIENTS)]
            try:
                for child in children:
                    await child.call(peers.open_client, here)
                right = await asyncio.gather(
                    *[
                        child.call(peers.ask_many, number * EACH, EACH, AT_ONCE)
                        for number, child in enumerate(children)
                    ]
                )
                assert right == [EACH] * CLIENTS
                for child in children:
                    done = await child.call(peers.held)
                    assert done["answers"] == EACH
                    assert done["failures"] == 0
                seen = server.statistics()
                assert (seen.messages_received, seen.answers) == (CLIENTS * EACH, CLIENTS * EACH)
                assert (seen.waiting, seen.in_hand, seen.clients) == (0, 0, CLIENTS)
                await until(lambda: receiver.statistics().leases == 0)
                assert receiver.statistics().unclaimed_tensors == 0
            finally:
                for child in children:
                    await child.close()
                serving.cancel()
                await asyncio.wait([serving])


@pytest.mark.promise(10)
async def test_a_killed_server_ends_every_open_request_within_a_second() -> None:
    with place() as here:
        async with peers.process(here) as server, peers.process(here) as client:
            await server.call(peers.open_server, here, answers=False)
            await client.call(peers.open_client, here)
            await client.call(peers.begin_to_ask, [1, 2, 3, 4])
            with promptly():
                server.kill()
                results = await client.call(peers.outcomes)
            assert [type(error) for error in results] == [PeerLostError] * 4
            assert {getattr(error, "pid", None) for error in results} == {server.pid}
            assert (await client.call(peers.held))["servers_lost"] == 1


async def test_a_successor_at_the_same_address_gets_waiting_and_later_requests() -> None:
    with place() as here:
        async with peers.process(here) as client:
            await client.call(peers.open_client, here)
            for _ in range(2):
                waiting = client.start(peers.ask, 1)  # before there is a server
                async with peers.process(here) as server:
                    await server.call(peers.open_server, here)
                    assert await waiting
                    assert await client.call(peers.ask, 2)
                    assert await client.call(peers.ask, 3, 5)
                    server.kill()
                    await server.ended()
                    await client.call(_until_lost)
            assert (await client.call(peers.held))["servers_lost"] == 2


@pytest.mark.promise(16)
async def test_killing_a_client_cancels_its_requests_and_releases_their_resources() -> None:
    with place() as here:
        async with peers.listening(here) as (server, receiver), peers.process(here) as survivor:
            await survivor.call(peers.open_client, here)
            cancelled = asyncio.Event()

            async def work() -> None:
                async with await anext(server):
                    try:
                        await asyncio.get_running_loop().create_future()
                    finally:
                        cancelled.set()

            async with peers.process(here) as victim:
                await victim.call(peers.open_client, here)
                await victim.call(peers.begin_to_ask, [1, 2, 3])
                working = asyncio.create_task(work())
                await until(lambda: server.statistics().in_hand == 1 and server.statistics().waiting == 2)
                with promptly():
                    victim.kill()
                    await cancelled.wait()
            await working
            await until(lambda: server.statistics().clients == 1)
            await until(lambda: receiver.statistics().leases == 0 and receiver.statistics().senders == 1)
            seen = server.statistics()
            assert (seen.waiting, seen.in_hand, seen.clients_lost) == (0, 0, 1)
            assert (seen.messages_received, seen.messages_taken) == (3, 1)

            serving = asyncio.create_task(server.serve(answer))
            assert await survivor.call(peers.ask, 9)
            await server.aclose()
            await serving


@pytest.mark.promise(10)
async def test_a_forked_child_of_a_server_does_not_hide_its_death() -> None:
    with place() as here:
        async with peers.process(here) as server, peers.process(here) as client:
            await server.call(peers.open_server, here, answers=False)
            await client.call(peers.open_client, here)
            await client.call(peers.begin_to_ask, [1], 5)  # whose tensor rides in the message
            grandchild = await server.call(peers.fork_and_sleep)
            try:
                with promptly():
                    server.kill()
                    [error] = await client.call(peers.outcomes)
                    assert isinstance(error, PeerLostError)
            finally:
                os.kill(grandchild, signal.SIGKILL)


@pytest.mark.extended
async def test_a_stopped_server_is_lost_after_the_heartbeat_timeout() -> None:
    with place() as here:
        remote = here._replace(messages="tcp://127.0.0.1:0")
        async with peers.process(here) as server, peers.process(here) as client:
            address = await server.call(_open_at_and_answer_nothing, remote)
            reached = here._replace(messages=address)
            await client.call(peers.open_client, reached, heartbeat_interval_s=0.1, heartbeat_timeout_s=3)
            await client.call(peers.begin_to_ask, [2], 5)  # whose tensor rides in the message
            await server.stop()
            try:
                with promptly(4.5):
                    [error] = await client.call(peers.outcomes)
                    assert isinstance(error, PeerLostError)
                    await client.call(_until_lost)
            finally:
                server.go_on()
            await server.call(peers.begin_to_answer)
            assert await client.call(peers.ask, 3)


async def _open_at_and_answer_nothing(state: peers.State, where: Place) -> str:
    await peers.open_server(state, where, answers=False)
    return str(state.others["server"].address)


async def _until_lost(state: peers.State) -> None:
    client = state.others["client"]
    await until(lambda: client.statistics().servers == 0)


# Descriptors


async def test_a_client_without_descriptors_reconnects_when_some_are_available() -> None:
    with place() as here:
        async with peers.process(here) as client:
            async with peers.process(here) as server:
                await server.call(peers.open_server, here)
                await client.call(peers.open_client, here)
                assert await client.call(peers.ask, 1, 5)
                await client.call(_take_descriptors)
                server.kill()
                await server.ended()
                await client.call(_until_lost)
            asking = client.start(peers.ask, 2, 5)
            async with peers.process(here) as server:
                await server.call(peers.open_server, here)
                await client.call(_give_descriptors)
                assert await asking


async def _take_descriptors(state: peers.State) -> None:
    state.others["descriptors"] = no_descriptors()
    state.others["descriptors"].__enter__()


async def _give_descriptors(state: peers.State) -> None:
    state.others["descriptors"].__exit__(None, None, None)
