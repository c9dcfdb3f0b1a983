"""How the two ends of a pipe find each other: through the store of their group, which carries nothing else.

    rank with the lower number                          the other rank
      | entry: its machine, its settings    both ways     |
      | <-----------------------------------------------> |
      | entry: the address where it listens               |
      | ------------------------------------------------> |
      |                 connects, and sends its hello     |
      | <------------------------------------------------ |

Each rank numbers its pipes to the other, so the first pipe of one rank belongs to the first pipe of the
other, even if one is opened much later. Two ends with different settings refuse each other. An end whose
opening is cancelled or fails for another reason marks its entry as withdrawn, and the other end tries again
with its next number.

The calls of a store block, for minutes if its server does not answer. Therefore, each call runs in a thread
that nothing has to wait for, and none waits for a missing entry.
"""

import ipaddress
import operator
import os
import secrets
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import anyio
import msgspec
import torch.distributed
from msgspec.structs import replace

from aiotensor.errors import PeerLostError, ProtocolError, RefusedError, UsageError
from aiotensor.runtime.worker import run_detached
from aiotensor.transports.address import TcpArguments
from aiotensor.transports.endpoints import Route, TensorQueue, route_to

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed does not declare it
    from torch.distributed import ProcessGroup


Group: TypeAlias = "ProcessGroup | Store"
"""What connects two ranks: a process group or a store."""

_LAST_CALL_S = 1.0  # the longest wait for the store when opening has ended without a connection
_NONE = "?"  # stands for a missing entry


def membership_of(group: Group, rank: int | None, world_size: int | None) -> "tuple[Store, int, int]":
    """Return the store of a group, the rank of this process and the number of ranks.

    Arguments and errors are those of `RankPipe`.
    """
    if isinstance(group, torch.distributed.Store):  # type: ignore[attr-defined]
        if rank is None or world_size is None:
            raise TypeError("a store does not define the ranks: pass rank and world_size as well")
        return group, operator.index(rank), operator.index(world_size)
    if rank is not None or world_size is not None:
        raise TypeError("rank and world_size can only be passed with a store: a group defines its own")
    if not isinstance(group, torch.distributed.ProcessGroup):
        raise TypeError(
            f"group must be a torch.distributed.ProcessGroup or a store, got {type(group).__name__!r}: "
            "torch.distributed.group.WORLD is the default group, a DeviceMesh has get_group(), and new_group "
            "returns no group to processes that are not in it"
        )
    if hasattr(group, "get_group_store"):
        return group.get_group_store(), group.rank(), group.size()
    # Old versions of torch, such as 2.6, only have this internal function.
    from torch.distributed.distributed_c10d import _get_process_group_store

    return _get_process_group_store(group), group.rank(), group.size()


class Entry(msgspec.Struct):
    """The entry of one end of a pipe.

    Attributes:
        settings: the settings that must be the same at both ends, in words.
        machine: the host, the user and the namespaces of the process; equal if both ends may share memory.
            "" if opening has ended without a connection.
        host: the address of its network interface, by default the one towards the store; "" if unknown.
        public_key: the public CURVE key of this end; "" if the pipe is not encrypted.
        address: where this end listens: the name of a local socket, or a ``tcp://`` address; "" if it
            connects, or does not listen yet.
        token: the secret that the other end needs to connect; "" unless this end listens at ``tcp://``.
    """

    settings: str = ""
    machine: str = ""
    host: str = ""
    public_key: str = ""
    address: str = ""
    token: str = ""


class WithdrawnError(Exception):
    """The other rank has given up opening its pipe with this number."""


class Meeting:
    """Exchange the entries of one end and the other rank; belongs to the running loop.

    Args:
        store: the store of the group.
        rank: the rank of this process.
        peer: the other rank.
        ours: an entry with the settings of this end, and with its host if that is given.
        timeout_s: the time without an answer after which a rank on another machine is lost.
        encrypt: whether to encrypt the connection between machines, with new keys.

    Attributes:
        listens: whether this end listens; otherwise it connects.
        ours: the entry of this end, as the next exchange writes it.
        route: the route to the other rank; None until its entry has arrived.
    """

    def __init__(
        self, store: "Store", rank: int, peer: int, ours: Entry, timeout_s: float | None, *, encrypt: bool
    ) -> None:
        self.listens = rank < peer
        self.ours = replace(ours, machine=machine_of_this_process())
        self.route: Route | None = None
        self._store, self._rank, self._peer = store, rank, peer
        self._given = TcpArguments(not self.listens, peer_timeout_s=timeout_s)
        if encrypt:
            import zmq  # imported here: ranks on one machine need no ZeroMQ

            self.ours.public_key, secret_key = (key.decode() for key in zmq.curve_keypair())
            self._given = self._given._replace(secret_key=secret_key)
        self._prefix = "aiotensor/ranks/{}-{}".format(*sorted((rank, peer)))
        self._number = 0
        self._written = ""
        self._writing = threading.Lock()

    async def exchange(self) -> None:
        """Write the entry of this end if it has changed, and read that of the other rank.

        The first call numbers the pipe.

        Raises:
            WithdrawnError: the other rank has withdrawn its entry.
            RefusedError: the other rank has other settings.
            UsageError: no address is known at which the other rank reaches this one.
            ProtocolError: the entry of the other rank cannot be used.
            PeerLostError: the store cannot be reached.
            OSError: no thread can be started.
        """
        try:
            data = await run_detached("aiotensor-store", self._exchange)
        except RuntimeError as error:  # torch.distributed.DistError and others
            raise PeerLostError(f"the store of the group cannot be reached: {error}") from None
        if data == _NONE.encode():
            return
        try:
            theirs = msgspec.json.decode(data, type=Entry)
            if not theirs.machine:
                raise WithdrawnError
            if theirs.settings != self.ours.settings:
                raise RefusedError(
                    f"rank {self._peer} opened the pipe with {theirs.settings}, and rank {self._rank} with "
                    f"{self.ours.settings}: pass the same value at both ranks"
                )
            if self.route is None and (self.listens or theirs.address):
                self.route = self._route_to(theirs)
        except ValueError as error:
            raise ProtocolError(f"the entry of rank {self._peer} cannot be used: {error}") from error

    def _exchange(self) -> bytes:
        """Write the entry of this end, and return that of the other rank, or `_NONE`; called in a thread."""
        with self._writing:  # so that the last call to begin writes the last state
            if not self._number:
                self._number = self._store.add(f"{self._prefix}/{self._rank}", 1)
                self.ours.host = self.ours.host or _address_towards(_server_of(self._store))
            place = f"{self._prefix}/{self._number}"
            if (entry := msgspec.json.encode(self.ours).decode()) != self._written:
                self._store.set(f"{place}/{self._rank}", entry)
                self._written = entry
            # `get` waits for a missing entry. `compare_set` returns the expected value instead.
            return self._store.compare_set(f"{place}/{self._peer}", _NONE, _NONE)

    def _route_to(self, theirs: Entry) -> Route:
        ours = self.ours
        if ours.machine == theirs.machine:
            ours.address = secrets.token_hex(16) if self.listens else theirs.address
            return route_to(TensorQueue(ours.address))
        public = theirs.public_key or None
        if not self.listens:
            return route_to(theirs.address, self._given._replace(server_key=public, token=theirs.token))
        ours.token = secrets.token_hex(32)
        given = self._given._replace(client_keys=[public] if public else (), token=ours.token)
        return route_to(f"tcp://{self._host_towards(theirs.host)}:0", given)

    def _host_towards(self, other: str) -> str:
        """Return the address at which the other rank reaches this one.

        This is the address of the interface towards the store, which all ranks reach. If that is the loopback
        interface, as on the host of the store, it is the address of the interface towards the other rank.
        """
        host = self.ours.host
        if not host or ipaddress.ip_address(host).is_loopback:
            host = _address_towards(other, socket.AI_NUMERICHOST)
        if not host:
            raise UsageError(
                "the other rank runs on another machine, and the store does not determine the network "
                "interface by which it reaches this one: pass the address of that interface as host="
            )
        return f"[{host}]" if ":" in host else host

    async def withdraw(self) -> None:
        """Withdraw the entry of this end, even if the call is cancelled; waits at most a second.

        A store that does not answer is ignored.
        """
        self.ours.machine = ""
        with suppress(RuntimeError, OSError), anyio.move_on_after(_LAST_CALL_S, shield=True):
            await run_detached("aiotensor-store", self._exchange)


def _server_of(store: "Store") -> str:
    """Return the host of the server of a store; "" for a store without a server."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return getattr(store, "host", "")


def _address_towards(host: str, flags: int = 0) -> str:
    """Return the address of the interface by which this process reaches a host; "" if there is none.

    Blocks while the name of the host is resolved, unless the flags forbid names, and sends nothing.
    """
    with suppress(OSError):  # the name cannot be resolved, or no interface reaches the host
        family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM, flags=flags)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)
            return str(sock.getsockname()[0])
    return ""


def machine_of_this_process() -> str:
    """Return a text that is equal in two processes if they run on one host, as one user, in one container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = [str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("mnt", "net", "pid", "user")]
    return "/".join([boot, *namespaces, str(os.geteuid())])
