"""The entries of two ranks in the store of their group, through which the ranks find each other.

Each end of a pipe writes one entry. Each rank numbers its pipes to the other, so the first pipe of one rank
belongs to the first pipe of the other, even if one is opened much later. A rank whose opening was cancelled
marks its entry as withdrawn, and the other rank tries again with the next number.

The calls of a store block, for minutes if its server does not answer. Therefore, each call runs in a thread
that nothing has to wait for, and none waits for a missing entry.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import anyio
import msgspec

from aiotensor.errors import PeerLostError, ProtocolError
from aiotensor.protocol.frames import VERSION
from aiotensor.ranks.groups import Membership
from aiotensor.runtime.detached import run_detached

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Entries", "Entry", "Name", "address_towards", "machine_of_this_process"]

R = TypeVar("R")

_LAST_CALL_S = 1.0  # the longest wait for the store when opening was cancelled

_NONE = "?"  # stands for a missing entry

_NAMESPACES = ("mnt", "net", "pid", "user")


class Entry(msgspec.Struct, frozen=True):
    """The entry of one end of a pipe.

    Attributes:
        version: the version of the protocol.
        machine: the host, the user and the namespaces of the process; equal if both ends may share memory.
        host: the address of its network interface, by default the one towards the store; "" if unknown.
        public_key: the public CURVE key of this end; "" if the pipe is not encrypted.
        address: the address where this end listens; "" if it connects, or does not listen yet.
        token: the secret that the other end needs to connect; "" unless this end listens at ``tcp://``.
        is_withdrawn: whether opening has ended without a connection.
    """

    version: int
    machine: str
    host: str = ""
    public_key: str = ""
    address: str = ""
    token: str = ""
    is_withdrawn: bool = False


class Name(NamedTuple):
    """The name of an entry.

    Attributes:
        rank: the rank that writes the entry.
        number: the number of the pipe; each rank counts its pipes to the other.
    """

    rank: int
    number: int


class Entries:
    """Read and write the entries of two ranks; belongs to the running loop.

    Args:
        membership: the membership of this process in the group.
        peer: the other rank.
        host: the address of the network interface to use; None for the one towards the store.
    """

    def __init__(self, membership: Membership, peer: int, host: str | None) -> None:
        self._membership = membership
        self._store = membership.store
        self._peer = peer
        self._host = host
        low, high = sorted((membership.rank, peer))
        self._prefix = f"aiotensor/ranks/{low}-{high}"

    async def begin(self, public_key: str) -> tuple[Name, Entry]:
        """Number the next pipe, and write and return the first entry of this end, with its name.

        Cancellation withdraws the entry, which takes at most a second.

        Raises:
            PeerLostError: the store cannot be reached.
            OSError: no thread can be started.
        """
        rank = self._membership.rank

        def begin() -> tuple[Name, Entry]:
            name = Name(rank, self._store.add(f"{self._prefix}/{rank}", 1))
            host = self._host or _address_towards(self._store)
            entry = Entry(VERSION, machine_of_this_process(), host, public_key)
            self._store.set(self._key(name), msgspec.json.encode(entry).decode())
            return name, entry

        beginning = self._call(begin)
        try:
            return await _result(asyncio.shield(beginning))
        except asyncio.CancelledError:
            # Withdrawn by a callback, so that it happens even if this call is cancelled again.
            withdrawing: list[asyncio.Future[None]] = []
            beginning.add_done_callback(partial(self._withdraw_begun, withdrawing))
            with anyio.move_on_after(_LAST_CALL_S, shield=True):
                await asyncio.wait([beginning])
                if withdrawing:
                    await asyncio.wait(withdrawing)
            raise

    async def read(self, name: Name) -> Entry | None:
        """Return an entry; None if it was not written.

        Raises:
            PeerLostError: the store cannot be reached.
            ProtocolError: the entry is invalid.
            OSError: no thread can be started.
        """
        # `get` waits for a missing entry, and an entry may be removed between `check` and `get`. If there is
        # no entry, `compare_set` returns the expected value instead.
        data = await _result(self._call(lambda: self._store.compare_set(self._key(name), _NONE, _NONE)))
        if data == _NONE.encode():
            return None
        try:
            return msgspec.json.decode(data, type=Entry)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"rank {name.rank} wrote an entry that cannot be decoded: {error}") from error

    async def write(self, name: Name, entry: Entry) -> None:
        """Replace an entry of this end; errors are those of `read`."""
        await _result(self._write(name, entry))

    async def withdraw(self, name: Name) -> None:
        """Mark an entry of this end as withdrawn, even if the call is cancelled; waits at most a second.

        A store that does not answer is ignored.
        """
        with suppress(OSError):
            withdrawing = self._withdraw(name)
            with anyio.move_on_after(_LAST_CALL_S, shield=True):
                await asyncio.wait([withdrawing])

    async def remove(self, number: int) -> None:
        """Remove the entries of both ends of a connected pipe; errors are those of `read`."""
        keys = [self._key(Name(rank, number)) for rank in (self._membership.rank, self._peer)]

        def remove() -> None:
            for key in keys:
                self._store.delete_key(key)

        await _result(self._call(remove))

    def _write(self, name: Name, entry: Entry) -> "asyncio.Future[None]":
        data = msgspec.json.encode(entry).decode()
        return self._call(lambda: self._store.set(self._key(name), data))

    def _withdraw(self, name: Name) -> "asyncio.Future[None]":
        withdrawing = self._write(name, Entry(VERSION, "", is_withdrawn=True))
        withdrawing.add_done_callback(_ignore_error)
        return withdrawing

    def _withdraw_begun(
        self,
        withdrawing: "list[asyncio.Future[None]]",
        beginning: "asyncio.Future[tuple[Name, Entry]]",
    ) -> None:
        if beginning.exception() is None:
            name, _ = beginning.result()
            with suppress(OSError):
                withdrawing.append(self._withdraw(name))

    def _key(self, name: Name) -> str:
        return f"{self._prefix}/{name.number}/{name.rank}"

    def _call(self, function: Callable[[], R]) -> "asyncio.Future[R]":
        return run_detached("aiotensor-store", function)


async def _result(call: "asyncio.Future[R]") -> R:
    """Wait for a call of the store, and convert its error to `PeerLostError`."""
    try:
        return await call
    except RuntimeError as error:  # torch.distributed.DistError and others
        raise PeerLostError(f"the store of the group cannot be reached: {error}") from None


def _ignore_error(call: "asyncio.Future[None]") -> None:
    """Retrieve the error of a call whose failure has no consequence."""
    if not call.cancelled():
        call.exception()


def _address_towards(store: "Store") -> str:
    """Return the address of the interface by which this process reaches the server of a store.

    Returns "" for a store without a server, such as a file.
    """
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host, port = getattr(store, "host", ""), getattr(store, "port", 0)
    return address_towards(host, port) if host else ""


def address_towards(host: str, port: int) -> str:
    """Return the address of the interface by which this process reaches a host; "" if there is none.

    Blocks while the name of the host is resolved, and sends nothing.
    """
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as sock:
                sock.connect(address)
                return str(sock.getsockname()[0])
    except OSError:
        return ""  # the name of the host cannot be resolved
    return ""


def machine_of_this_process() -> str:
    """Return a text that is equal in two processes if they run on one host, as one user, in one container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = [str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in _NAMESPACES]
    return "/".join([boot, *namespaces, str(os.geteuid())])
