"""Clients and servers in separate processes, which are killed, stopped and started again."""

import asyncio
import errno
import os
import random
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Any

import pytest
import torch
import zmq

from aiotensor import PeerLostError, RemoteError, UnavailableError
from aiotensor.channel import MessageClient, MessageServer
from tests.channel import peers
from tests.channel.parties import Answer, Place, Question, answer, place, said
from tests.selection import COMPLETE
from tests.transports.unix_ends import no_descriptors
from verification.networks import Hosts
from verification.patterns import BIG, pattern
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


async def test_a_forked_child_of_a_client_does_not_hide_its_death() -> None:
    with place() as here:
        async with peers.listening(here) as (server, _), peers.process(here) as client:
            await client.call(peers.open_client, here)
            await client.call(peers.begin_to_ask, [1], 5)
            grandchild = await client.call(peers.fork_and_sleep)
            try:
                with promptly():
                    client.kill()
                    await until(lambda: server.statistics().clients_lost == 1)
                assert server.statistics().waiting == 0
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


@pytest.mark.extended
async def test_client_and_server_survive_repeated_kills_of_each_other(moments: random.Random) -> None:
    with place() as here, said():
        async with peers.process(here) as client:
            await client.call(peers.open_client, here)
            for _ in range(5):
                async with peers.process(here) as server:
                    await server.call(peers.open_server, here)
                    await client.call(peers.begin_to_ask, list(range(1, 30)))
                    await asyncio.sleep(moments.random() * 0.05)
                    server.kill()
                    for result in await client.call(_outcomes_until_lost):
                        assert result is True or isinstance(result, PeerLostError | RemoteError), result
        async with peers.listening(here) as (server, receiver):
            serving = asyncio.create_task(server.serve(answer))
            for _ in range(5):
                async with peers.process(here) as client:
                    await client.call(peers.open_client, here)
                    await client.call(peers.begin_to_ask, list(range(1, 30)))
                    await asyncio.sleep(moments.random() * 0.05)
                    client.kill()
                    await client.ended()
                await until(lambda: server.statistics().clients == 0)
                await until(lambda: server.statistics().waiting + server.statistics().in_hand == 0)
                await until(lambda: receiver.statistics().leases + receiver.statistics().senders == 0)
            await server.aclose()
            await serving


async def _outcomes_until_lost(state: peers.State) -> list[bool | Exception]:
    """Return how everything ended, and wait for no next server."""
    asking: list[asyncio.Task[bool]] = state.others["asking"]
    await _until_lost(state)
    await until(lambda: state.others["client"].statistics().servers == 0)
    for task in asking:
        task.cancel()
    results = await peers.outcomes(state)
    await peers.held(state)
    return [result for result in results if not isinstance(result, asyncio.CancelledError)]


async def _until_lost(state: peers.State) -> None:
    client = state.others["client"]
    await until(lambda: client.statistics().servers == 0)


@pytest.mark.extended
async def test_clients_outlive_servers_that_close_while_they_send_messages_of_many_parts() -> None:
    chance = random.Random(1)
    with place() as here:
        async with peers.process(here) as one, peers.process(here) as another:
            for client in (one, another):
                await client.call(_send_parts, here)
            # Enough that libzmq would abort a client that closes its socket too early.
            for _ in range(100):
                async with MessageServer(here.messages, list[torch.Tensor]) as server:
                    serving = asyncio.create_task(server.serve(_count))
                    messages = chance.randrange(1, 30)
                    await until(lambda: server.statistics().messages_received >= messages)  # noqa: B023
                    await server.aclose()
                    await serving
            for client in (one, another):
                assert await client.call(_servers_lost) > 0


async def _send_parts(state: peers.State, where: Place) -> None:
    """Begin to send messages of several large parts, one after the other."""
    client = await state.stack.enter_async_context(MessageClient(where.messages, reply_type=int))
    tensors = [torch.zeros(BIG, dtype=torch.uint8) for _ in range(3)]

    async def send() -> None:
        while True:
            with suppress(PeerLostError):
                await client.request(tensors)

    state.others |= {"client": client, "sending": [asyncio.create_task(send()) for _ in range(8)]}


async def _servers_lost(state: peers.State) -> int:
    """Stop sending, and return how many servers were lost."""
    for task in state.others["sending"]:
        task.cancel()
    await asyncio.wait(state.others["sending"])
    return int(state.others["client"].statistics().servers_lost)


async def _count(tensors: list[torch.Tensor]) -> int:
    return len(tensors)


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


async def test_a_wait_for_descriptors_to_connect_ends_after_max_wait_s_and_is_logged_once() -> None:
    with place() as here:
        async with peers.process(here) as child:
            errors, texts = await child.call(_wait_for_descriptors, here)
            assert [type(error) for error in errors] == [UnavailableError] * 8
            assert 0 < len(texts) <= 8
            assert all("Too many open files" in text for text in texts)


async def _wait_for_descriptors(
    state: peers.State, place: Place
) -> tuple[list[Answer | BaseException], list[str]]:
    """Return how requests end while no descriptors are left, and the log."""
    # The client tries again more than twice in this time.
    client = MessageClient([place.messages] * 8, reply_type=Answer, max_wait_s=0.35)
    with said() as texts, _descriptors_for_some_servers():
        async with client:
            requests = [client.request(Question(7), target=target) for target in range(8)]
            errors = await asyncio.gather(*requests, return_exceptions=True)
    return errors, texts


@contextmanager
def _descriptors_for_some_servers() -> Iterator[None]:
    """Leave enough descriptors for a client and its connections to some of 8 servers."""
    kept = [os.dup(0) for _ in range(12)]
    with no_descriptors():
        for descriptor in kept:
            os.close(descriptor)
        yield


@pytest.mark.extended
async def test_a_large_part_that_lacks_a_descriptor_fails_only_its_request() -> None:
    with place() as here:
        async with peers.listening(here) as (server, _):
            serving = asyncio.create_task(server.serve(answer))
            for spare in range(10):
                # The thread that frees large parts starts with the first of them.
                async with peers.process(here) as child:
                    assert await child.call(_ask_with_so_many, here, spare) in ("an error", "an answer")
            await server.aclose()
            await serving


async def _ask_with_so_many(state: peers.State, place: Place, spare: int) -> str:
    """Send a request with few descriptors left, describe its end, and repeat it with enough of them."""
    large = Question(1, pattern(1, BIG))
    async with MessageClient(place.messages, reply_type=Answer) as client:
        await client.request(Question(0))
        kept = [os.dup(0) for _ in range(spare)]
        with no_descriptors():
            for descriptor in kept:
                os.close(descriptor)
            try:
                await client.request(large)
                outcome = "an answer"
            except OSError as error:
                outcome = "an error" if error.errno == errno.EMFILE else repr(error)
        for question in (Question(2), large):
            assert (await client.request(question)).seed == question.seed
        return outcome


async def test_opening_without_descriptors_raises_and_does_not_end_the_process() -> None:
    with place() as here:
        async with peers.process(here) as child:
            for side in ("client", "server"):
                # ZeroMQ itself ends a process that has no descriptors for its threads.
                opened = [
                    await child.call(_open_with_so_many, here, side, spare) for spare in range(0, 24, 3)
                ]
                assert opened == sorted(opened)
                assert not opened[0]
                assert opened[-1]
            await child.call(peers.open_server, here)
            await child.call(peers.open_client, here)
            assert await child.call(peers.ask, 1, 5)


async def _open_with_so_many(state: peers.State, place: Place, side: str, spare: int) -> bool:
    """Try to open a client or a server with so many descriptors left, and say whether it succeeded."""
    end: MessageClient[Answer] | MessageServer[Question]
    if side == "client":
        end = MessageClient(place.messages, reply_type=Answer)
    else:
        end = MessageServer(place.messages, Question)
    kept = [os.dup(0) for _ in range(spare)]
    with no_descriptors():
        for descriptor in kept:
            os.close(descriptor)
        try:
            async with end:
                return True
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            return False


# Two hosts


async def _serve_there(state: peers.State, address: str, keys: dict[str, Any]) -> None:
    server = MessageServer(address, Question, **keys)
    await state.stack.enter_async_context(server)
    state.others["serving"] = asyncio.create_task(server.serve(answer))


async def _open_client_there(state: peers.State, address: str, keys: dict[str, Any]) -> None:
    client = MessageClient(address, reply_type=Answer, **keys)
    state.others["client"] = await state.stack.enter_async_context(client)


async def _ask_there(state: peers.State) -> int:
    answer: Answer = await state.others["client"].request(Question(5))
    return answer.seed


@pytest.mark.extended
async def test_requests_resume_soon_after_a_partition(hosts: Hosts) -> None:
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    address = f"tcp://{hosts.a.address}:5555"
    async with AsyncExitStack() as stack:
        server, client = (Peer("unix:///nowhere", first=host.enter) for host in (hosts.a, hosts.b))
        for peer in (server, client):
            stack.push_async_callback(peer.close)
        await server.call(
            _serve_there, address, {"secret_key": server_secret, "client_keys": [client_public]}
        )
        await client.call(
            _open_client_there, address, {"secret_key": client_secret, "server_key": server_public}
        )
        assert await client.call(_ask_there) == 5
        hosts.cut()
        asking = client.start(_ask_there)
        # By then the kernel repeats a connection attempt only after another 7 s.
        await asyncio.sleep(9.5)
        hosts.heal()
        with promptly(3.5):
            with pytest.raises(PeerLostError):
                await asking
            assert await client.call(_ask_there) == 5
