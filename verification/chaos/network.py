"""The network of the engines: on another host behind a cable that can be cut, or on this host."""

import asyncio
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import zmq

from verification.attackers import ATTACKS
from verification.chaos.plan import ENGINES
from verification.networks import Hosts, NoNamespacesError, two_hosts
from verification.processes.peers import Peer, State

__all__ = ["Network", "Places"]

_PORT = 5555
_ATTACKERS = 2


@dataclass(frozen=True)
class Places:
    """The addresses of the engines, and the keys of both sides."""

    addresses: tuple[str, ...]
    engine_public: bytes
    engine_secret: bytes
    client_public: bytes
    client_secret: bytes

    def keys_of_engine(self) -> dict[str, Any]:
        """Return the arguments of a server."""
        return {"secret_key": self.engine_secret, "client_keys": [self.client_public]}

    def keys_of_client(self) -> dict[str, Any]:
        """Return the arguments of a client."""
        return {"secret_key": self.client_secret, "server_key": self.engine_public}


class Network:
    """Two hosts if this user may make them, or the loopback interface of this one.

    Attributes:
        places: of the engines.
        why_whole: why nothing can be cut; "" if it can.
        enter_as_client, enter_as_engine: called first in a process, to move it to its host.
    """

    def __init__(self) -> None:
        self._made = ExitStack()
        self._hosts: Hosts | None = None
        self.why_whole = ""
        self.enter_as_client: Callable[[], None] | None = None
        self.enter_as_engine: Callable[[], None] | None = None
        try:
            self._hosts = self._made.enter_context(two_hosts())
        except NoNamespacesError as reason:
            self.why_whole = str(reason)
            addresses = [f"tcp://127.0.0.1:{_free_port()}" for _ in range(ENGINES)]
        else:
            self.enter_as_client, self.enter_as_engine = self._hosts.a.enter, self._hosts.b.enter
            addresses = [f"tcp://{self._hosts.b.address}:{_PORT + number}" for number in range(ENGINES)]
        self.places = Places(tuple(addresses), *zmq.curve_keypair(), *zmq.curve_keypair())

    @asynccontextmanager
    async def cut(self, direction: str) -> AsyncIterator[None]:
        """Lose packets while the block runs, if anything can be cut here."""
        hosts = self._hosts
        if hosts is None:
            yield
            return
        try:
            if direction != "to clients":
                await asyncio.to_thread(hosts.cut_one_way, hosts.a, hosts.b)
            if direction != "to engines":
                await asyncio.to_thread(hosts.cut_one_way, hosts.b, hosts.a)
            yield
        finally:
            await asyncio.to_thread(hosts.heal)

    @asynccontextmanager
    async def attacked(self, engine: int, attack: str) -> AsyncIterator[None]:
        """Have processes on the clients' host flood an engine with connections while the block runs."""
        async with AsyncExitStack() as stack:
            for _ in range(_ATTACKERS):
                attacker = Peer("unix:///nowhere", first=self.enter_as_client)
                stack.push_async_callback(attacker.close)
                await attacker.call(_flood, attack, self.places.addresses[engine])
            yield

    def close(self) -> None:
        """Remove the hosts."""
        self._made.close()


async def _flood(state: State, attack: str, address: str) -> None:
    """Begin an attack, which ends with this process."""
    begun = threading.Event()
    state.others["flood"] = asyncio.get_running_loop().run_in_executor(None, ATTACKS[attack], address, begun)


def _free_port() -> int:
    """Find a port outside the range from which the kernel assigns ports."""
    while True:
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", random.randrange(20_000, 30_000)))
            except OSError:
                continue
            return int(sock.getsockname()[1])
