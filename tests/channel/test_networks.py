"""Clients and servers on two hosts: names that cannot be resolved, engines that move, cables that are cut."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import zmq

from aiotensor import PeerLostError, WouldBlockError
from aiotensor.channel import MessageClient, MessageServer
from tests.channel.parties import Answer, Question, answer, said
from verification.networks import Host, Hosts
from verification.processes.peers import Peer, State
from verification.promptly import promptly

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

PORT = 5555


class Keys:
    """Of a server and its clients; the same in each process of a test."""

    def __init__(self) -> None:
        self.server_public, self.server_secret = zmq.curve_keypair()
        self.client_public, self.client_secret = zmq.curve_keypair()

    def of_server(self) -> dict[str, Any]:
        return {"secret_key": self.server_secret, "client_keys": [self.client_public]}

    def of_client(self) -> dict[str, Any]:
        return {"secret_key": self.client_secret, "server_key": self.server_public}


@pytest.fixture
def keys() -> Keys:
    return Keys()


@asynccontextmanager
async def processes(*hosts: Host) -> AsyncIterator[list[Peer]]:
    """Start a process on each of some hosts, and end them with the block."""
    async with AsyncExitStack() as stack:
        started = []
        for host in hosts:
            started.append(Peer("unix:///nowhere", first=host.enter))
            stack.push_async_callback(started[-1].close)
        yield started


async def serve(state: State, /, address: str, keys: Keys, **options: Any) -> None:
    """Answer there from now on."""
    server: MessageServer[Question] = MessageServer(address, Question, **keys.of_server(), **options)
    await state.stack.enter_async_context(server)
    state.others["serving"] = asyncio.create_task(server.serve(answer))


async def open_client(state: State, /, addresses: list[str], keys: Keys, **options: Any) -> None:
    client = MessageClient(addresses, reply_type=Answer, **keys.of_client(), **options)
    state.others["client"] = await state.stack.enter_async_context(client)


async def ask(state: State, count: int = 1, target: int | None = None) -> int:
    """Send requests one after the other, and return the number of right answers."""
    client: MessageClient[Answer] = state.others["client"]
    answers = [await client.request(Question(seed), target=target) for seed in range(count)]
    return sum(got.seed == seed for seed, got in enumerate(answers))


async def servers_lost(state: State) -> int:
    return int(state.others["client"].statistics().servers_lost)


async def close_client(state: State) -> None:
    await state.others["client"].aclose()


async def ask_for_name(state: State, address: str, keys: Keys) -> tuple[str, list[str]]:
    """Send a request to a name that cannot be resolved; return the error and the logged texts."""
    with said() as texts:
        client = MessageClient(address, reply_type=Answer, max_wait_s=3.5, linger_s=0, **keys.of_client())
        async with client:
            # The system gives up after 10 s.
            with promptly(8), pytest.raises(WouldBlockError) as caught:
                await client.request(Question(1))
            error = str(caught.value)
    return error, texts


async def test_a_server_whose_name_is_not_resolved_delays_no_other_server(hosts: Hosts, keys: Keys) -> None:
    heartbeats = {"heartbeat_timeout_s": 1.5}
    async with processes(hosts.a, hosts.b) as (server, client):
        healthy = f"tcp://{hosts.a.address}:{PORT}"
        # The lookup takes longer than heartbeats take to declare a server lost.
        await server.call(serve, healthy, keys, **heartbeats)
        addresses = [healthy, f"tcp://engine-2.example:{PORT}"]
        await client.call(open_client, addresses, keys, max_wait_s=20, linger_s=0, **heartbeats)
        with promptly(3):
            assert await client.call(ask_until_a_name_is_said_to_be_unknown)
        assert await client.call(servers_lost) == 0
        with promptly():
            await client.call(close_client)
        with promptly():
            assert await client.finish() == 0  # though a thread still waits for the name server


async def ask_until_a_name_is_said_to_be_unknown(state: State) -> bool:
    """Send requests until the log says that no name server answers; return whether all answers are right."""
    is_right = True
    with said() as texts:
        while not any("no name server answers" in text for text in texts):
            is_right &= await ask(state) == 1
    return is_right


async def test_a_request_waits_for_an_unanswered_lookup_until_max_wait_s(hosts: Hosts, keys: Keys) -> None:
    async with processes(hosts.b) as (client,):
        error, texts = await client.call(ask_for_name, f"tcp://engine.example:{PORT}", keys)
        assert "could not be reached for 3.5 s; its name cannot be resolved: no name server answers" in error
        [text] = texts
        assert text.startswith(f"the name of the server at tcp://engine.example:{PORT} cannot be resolved")


async def test_a_server_that_moved_to_another_address_is_found_by_its_name(hosts: Hosts, keys: Keys) -> None:
    first, second = hosts.a.addresses
    hosts.b.know({"engine.example": first})
    async with processes(hosts.b) as (client,):
        async with processes(hosts.a) as (old,):
            await old.call(serve, f"tcp://{first}:{PORT}", keys)
            await client.call(open_client, [f"tcp://engine.example:{PORT}"], keys)
            assert await client.call(ask) == 1
        async with processes(hosts.a) as (new,):
            await new.call(serve, f"tcp://{second}:{PORT}", keys)
            asking = client.start(ask)
            hosts.b.know({"engine.example": second})
            with promptly(5):
                assert await asking == 1


def address_of(hosts: Hosts) -> str:
    return f"tcp://{hosts.a.address}:{PORT}"


async def test_requests_resume_soon_after_a_partition(hosts: Hosts, keys: Keys) -> None:
    async with processes(hosts.a, hosts.b) as (server, client):
        await server.call(serve, address_of(hosts), keys)
        await client.call(open_client, [address_of(hosts)], keys)
        assert await client.call(ask) == 1
        hosts.cut()
        asking = client.start(ask)
        # By then the kernel repeats a connection attempt only after another 7 s.
        await asyncio.sleep(9.5)
        hosts.heal()
        with promptly(3.5):
            with pytest.raises(PeerLostError):
                await asking
            assert await client.call(ask) == 1
