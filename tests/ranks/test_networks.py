"""Pipes between two hosts: network namespaces with a cable between them."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from aiotensor import PeerLostError
from aiotensor.ranks import RankPipe
from tests.ranks.pipes import echo
from verification.networks import Host, Hosts
from verification.patterns import BIG, pattern
from verification.places import free_port
from verification.processes.peers import Peer, State
from verification.promptly import allowed_s

_TIMEOUT_S = 1.0  # of a host that does not answer


async def serve_store(state: State, address: str, port: int) -> None:
    """Serve the store of a group in this process."""
    state.others["store"] = TCPStore(address, port, is_master=True, wait_for_workers=False)


async def open_end(state: State, /, rank: int, address: str, port: int, **options: Any) -> None:
    """Open an end by the store of the group."""
    store = state.others.get("store") or TCPStore(address, port, is_master=False, wait_for_workers=False)
    pipe = RankPipe(store, 1 - rank, rank=rank, world_size=2, **options)
    state.others["pipe"] = await state.stack.enter_async_context(pipe)


async def exchange(state: State, counts: list[int]) -> bool:
    """Send patterns to an end that returns them, and return whether they are right."""
    pipe, is_right = state.others["pipe"], True
    for seed, count in enumerate(counts):
        await pipe.send(pattern(seed, count))
        received = await pipe.receive()
        is_right &= torch.equal(received, pattern(seed, count))
    return is_right


async def lose(state: State, count: int) -> float:
    """Send until the other end is lost, and return when, on the clock of all processes."""
    pipe = state.others["pipe"]
    try:
        while True:
            await asyncio.gather(pipe.send(pattern(0, count)), pipe.receive())
    except PeerLostError:
        return asyncio.get_running_loop().time()


async def sockets(state: State) -> list[str]:
    """Return the addresses at which this host listens."""
    with open("/proc/net/tcp") as table:  # noqa: ASYNC230 - of the kernel
        rows = [line.split() for line in table.readlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A"]
    return [socket.inet_ntoa(bytes.fromhex(one.split(":")[0])[::-1]) for one in listening]


def _ask_no_name_server(host: Host) -> None:
    """Torch looks up the names of all addresses, and waits long for a name server that does not answer."""
    Path(host.etc, "nsswitch.conf").write_text("hosts: files\n")


@asynccontextmanager
async def _ends(hosts: Hosts, store_at: int, **options: Any) -> AsyncIterator[tuple[Peer, Peer]]:
    """Open one end on each host, with the store on one of the hosts."""
    places, port = (hosts.a, hosts.b), free_port()
    for host in places:
        _ask_no_name_server(host)
    children = [Peer("", first=host.enter) for host in places]
    try:
        address = places[store_at].address
        await children[store_at].call(serve_store, address, port)
        await asyncio.gather(
            *(child.call(open_end, rank, address, port, **options) for rank, child in enumerate(children))
        )
        yield children[0], children[1]
    finally:
        for child in children:
            await child.close()


@pytest.mark.promise(36)
@pytest.mark.parametrize(("store_at", "encrypt"), [(0, True), (1, False)])
async def test_two_hosts_exchange_messages_by_the_interface_of_the_store(
    store_at: int, encrypt: bool, hosts: Hosts
) -> None:
    async with _ends(hosts, store_at, encrypt=encrypt) as (low, high):
        high.start(echo)
        assert await low.call(exchange, [10, 5_000, BIG, 4 * BIG])
        # The lower rank listens there, and nowhere else.
        assert hosts.a.address in await low.call(sockets)
        assert "0.0.0.0" not in await low.call(sockets)  # noqa: S104


@pytest.mark.promise(36)
async def test_a_host_that_does_not_answer_is_lost_within_the_timeout(hosts: Hosts) -> None:
    async with _ends(hosts, 0, peer_timeout_s=_TIMEOUT_S) as ends:
        losses = [end.start(lose, 4 * BIG) for end in ends]
        await asyncio.sleep(0.3)  # messages travel
        began = asyncio.get_running_loop().time()
        hosts.cut()
        try:
            ended = await asyncio.gather(*losses)
        finally:
            hosts.heal()
        longest = max(ended) - began
        assert longest < _TIMEOUT_S + 1 or longest < allowed_s(_TIMEOUT_S + 1)
