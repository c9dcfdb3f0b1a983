"""Clients and servers in separate processes, which are killed, stopped and started again."""

import asyncio
from typing import Any

import pytest
import torch

from aiotensor import PeerLostError
from aiotensor.channel import MessageServer
from tests.channel import peers
from tests.channel.parties import Places, Question, channel, key_options, place, serving, settled
from tests.transports.unix_ends import no_descriptors
from verification.patterns import BIG, pattern
from verification.promptly import promptly
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

any_way = pytest.mark.usefixtures("way")


def keys() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments for keys, if the running test needs any."""
    return key_options() if Places.scheme == "tcp" else ({}, {})


@any_way
@pytest.mark.promise(10, 36)
async def test_a_killed_server_ends_every_request_that_it_has_taken_within_a_second() -> None:
    of_server, of_client = keys()
    with place() as here:
        async with peers.process() as server, peers.process() as client:
            await server.call(peers.open_server, here, answers=False, **of_server)
            await client.call(peers.open_client, here, **of_client)
            await client.call(peers.begin_to_ask, [1, 2, 3, 4])
            await server.call(peers.take, 4)
            await client.call(peers.all_taken)
            with promptly():
                server.kill()
                results = await client.call(peers.outcomes)
            assert [type(error) for error in results] == [PeerLostError] * 4
            assert {getattr(error, "pid", None) for error in results} == {server.pid}
            assert (await client.call(peers.held))["servers_lost"] == 1


@any_way
async def test_a_successor_at_the_same_address_gets_untaken_waiting_and_later_requests() -> None:
    of_server, of_client = keys()
    with place() as here:
        async with peers.process() as client:
            await client.call(peers.open_client, here, **of_client)
            waiting = client.start(peers.ask, 1)  # before there is a server
            async with peers.process() as server:
                await server.call(peers.open_server, here, **of_server)
                assert await waiting
            await client.call(_until_lost)
            async with peers.process() as server:
                await server.call(peers.open_server, here, answers=False, **of_server)
                await client.call(peers.begin_to_ask, [2, 3, 4])
            async with peers.process() as server:
                await server.call(peers.open_server, here, **of_server)
                outcomes = await client.call(peers.outcomes)
                if here.startswith("tcp"):  # the server might have taken them
                    assert [type(one) for one in outcomes] == [PeerLostError] * 3
                else:
                    assert outcomes == [True] * 3
                assert await client.call(peers.ask, 3, 5)
                assert (await client.call(peers.held))["servers_lost"] == 2


@any_way
@pytest.mark.promise(16)
async def test_killing_a_client_cancels_its_requests_and_releases_their_resources() -> None:
    of_server, of_client = keys()
    with place() as here:
        async with MessageServer(here, Question, **of_server) as server, peers.process() as survivor:
            await survivor.call(peers.open_client, here, **of_client)
            cancelled = asyncio.Event()

            async def work() -> None:
                async with await anext(server):
                    try:
                        await asyncio.get_running_loop().create_future()
                    finally:
                        cancelled.set()

            async with peers.process() as victim:
                await victim.call(peers.open_client, here, **of_client)
                await victim.call(peers.begin_to_ask, [1, 2, 3])
                working = asyncio.create_task(work())
                await until(lambda: server.statistics().in_hand == 1 and server.statistics().waiting == 2)
                with promptly():
                    victim.kill()
                    await cancelled.wait()
            await working
            await until(lambda: server.statistics().clients == 1 and server.statistics().leases == 0)
            await until(lambda: server.statistics().mapped_bytes == 64 << 20)
            seen = server.statistics()
            assert (seen.waiting, seen.in_hand, seen.clients_lost) == (0, 0, 1)
            assert (seen.messages_received, seen.messages_taken) == (3, 1)
            async with serving(server):
                assert await survivor.call(peers.ask, 9)


@pytest.mark.extended
@pytest.mark.promise(36)
async def test_a_stopped_server_is_lost_after_peer_timeout_s_and_used_again_later() -> None:
    async with peers.process() as server, peers.process() as client:
        address = await server.call(peers.open_server, "tcp://127.0.0.1:0", answers=False)
        await client.call(peers.open_client, address, peer_timeout_s=2.0)
        await client.call(peers.begin_to_ask, [2])
        await server.call(peers.take, 1)
        await client.call(peers.all_taken)
        await server.stop()
        try:
            with promptly(3.0):
                [error] = await client.call(peers.outcomes)
                assert isinstance(error, PeerLostError)
        finally:
            server.go_on()
        await server.call(peers.begin_to_answer)
        assert await client.call(peers.ask, 3)


async def _until_lost(state: peers.State) -> None:
    client = state.others["client"]
    await until(lambda: client.statistics().servers == 0)


# Descriptors


@pytest.mark.promise(11)
async def test_a_message_for_whose_segment_no_descriptors_are_left_raises_os_error() -> None:
    async with channel() as ends, serving(ends.server):
        for call in (ends.client.request, ends.client.send):
            async with ends.client.permit() as permit:
                frames = await permit.allocate((BIG,), torch.int64)
                with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
                    await call(Question(1, frames), inside=permit)
                del frames
            await settled(ends)
        got = await ends.client.request(Question(2, pattern(2, BIG)))
        assert got.total == int(pattern(2, BIG).sum())
        assert (ends.client.statistics().servers_lost, ends.server.statistics().messages_taken) == (0, 1)
        await settled(ends)


async def test_a_client_without_descriptors_reconnects_when_some_are_available() -> None:
    with place() as here:
        async with peers.process() as client:
            async with peers.process() as server:
                await server.call(peers.open_server, here)
                await client.call(peers.open_client, here)
                assert await client.call(peers.ask, 1)
                await client.call(_take_descriptors)
                server.kill()
                await server.ended()
                await client.call(_until_lost)
            asking = client.start(peers.ask, 2)
            async with peers.process() as server:
                await server.call(peers.open_server, here)
                await client.call(_give_descriptors)
                assert await asking


async def _take_descriptors(state: peers.State) -> None:
    state.others["descriptors"] = no_descriptors()
    state.others["descriptors"].__enter__()


async def _give_descriptors(state: peers.State) -> None:
    state.others["descriptors"].__exit__(None, None, None)
