"""The network of a family: two hosts and a cable that can be cut, or the loopback interface of this host."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from typing import Any, NamedTuple

import zmq

from verification.attackers import ATTACKS
from verification.networks import Hosts, NoNamespacesError, two_hosts
from verification.places import free_port
from verification.processes.peers import Peer, State

__all__ = ["Network", "Side"]

_PORT = 5555
_ATTACKERS = 2


class Side(NamedTuple):
    """The processes at one side of the connections of a family.

    Attributes:
        enter: called first in each process, to move it to its host.
        arguments: the arguments of the objects that connect or listen.
    """

    enter: Callable[[], None] | None = None
    arguments: Mapping[str, Any] = {}


class Network:
    """Two hosts if this user may create them, or else the loopback interface of this host; with keys.

    Args:
        count: the number of addresses.
        arguments: the arguments of the objects at both sides, besides their keys.

    Attributes:
        addresses: the addresses at which to listen.
        listening, connecting: the sides.
        why_whole: the reason why the cable cannot be cut; "" if it can.
    """

    def __init__(self, count: int, arguments: Mapping[str, Any]) -> None:
        self._made = ExitStack()
        self._hosts: Hosts | None = None
        self.why_whole = ""
        enter_to_listen = enter_to_connect = None
        try:
            self._hosts = self._made.enter_context(two_hosts())
        except NoNamespacesError as reason:
            self.why_whole = str(reason)
            self.addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(count)]
        else:
            enter_to_connect, enter_to_listen = self._hosts.a.enter, self._hosts.b.enter
            self.addresses = [f"tcp://{self._hosts.b.address}:{_PORT + number}" for number in range(count)]
        (server_public, server_secret), (public, secret) = zmq.curve_keypair(), zmq.curve_keypair()
        keys = {"secret_key": server_secret, "client_keys": [public]}
        self.listening = Side(enter_to_listen, {**keys, **arguments})
        keys = {"secret_key": secret, "server_key": server_public}
        self.connecting = Side(enter_to_connect, {**keys, **arguments})

    @asynccontextmanager
    async def cut(self, direction: str) -> AsyncIterator[None]:
        """Lose packets while the block runs, if the cable can be cut."""
        hosts = self._hosts
        if hosts is None:
            yield
            return
        try:
            if direction != "to the connecting side":
                await asyncio.to_thread(hosts.cut_one_way, hosts.a, hosts.b)
            if direction != "to the listening side":
                await asyncio.to_thread(hosts.cut_one_way, hosts.b, hosts.a)
            yield
        finally:
            await asyncio.to_thread(hosts.heal)

    @asynccontextmanager
    async def attacked(self, number: int, attack: str) -> AsyncIterator[None]:
        """Make processes on the connecting host flood an address with connections while the block runs."""
        async with AsyncExitStack() as stack:
            for _ in range(_ATTACKERS):
                attacker = Peer("unix:///nowhere", first=self.connecting.enter)
                stack.push_async_callback(attacker.close)
                await attacker.call(_flood, attack, self.addresses[number])
            yield

    def close(self) -> None:
        """Remove the hosts."""
        self._made.close()


async def _flood(state: State, attack: str, address: str) -> None:
    """Begin an attack, which ends with this process."""
    begun = threading.Event()
    state.others["flood"] = asyncio.get_running_loop().run_in_executor(None, ATTACKS[attack], address, begun)
