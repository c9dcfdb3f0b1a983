"""A rogue rank: it finds the other end of a pipe as an honest rank does, and sends it any records."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not declare it

from aiotensor.protocol.network import OPENING
from aiotensor.ranks import meeting
from aiotensor.ranks.meeting import Entry
from verification.fuzz.listening import listening_at
from verification.fuzz.speaking import connecting_to, converse
from verification.fuzz.steps import Conversation
from verification.fuzz.things import Things
from verification.waiting import until

RANKS = 2  # in the group; the lower one listens

_LOOPBACK = "127.0.0.1"
_TOKEN = "5e" * 32  # which the other end has to know


def _key(rank: int) -> str:
    """Return the name of the entry of a rank for the first pipe."""
    return f"aiotensor/ranks/0-1/1/{rank}"


def _listens_at(address: str) -> str:
    """Return where a rogue with the lower rank listens: on one machine, by a name instead of a path."""
    return (
        address.removeprefix("unix://").replace("/", "-")[-64:] if address.startswith("unix://") else address
    )


def entry_of(address: str, rank: int) -> Entry:
    """Return the entry of a rogue, which listens at an address or connects, according to its rank."""
    is_local = address.startswith("unix://")
    machine = meeting.machine_of_this_process() if is_local else "the machine of a rogue"
    where = (_listens_at(address), "" if is_local else _TOKEN) if rank == 0 else ()
    return Entry(machine, _LOOPBACK, "", *where)


def store_with(entry: Entry, rank: int) -> HashStore:
    """Return a store with the entry of a rogue."""
    store = HashStore()
    store.set(_key(rank), msgspec.json.encode(entry).decode())
    return store


async def address_of(store: HashStore, rank: int) -> Entry | None:
    """Wait until a rank listens, and return its entry; None if it gave up."""
    found: Entry | None = None

    def listens() -> bool:
        nonlocal found
        if store.check([_key(rank)]):
            found = msgspec.json.decode(store.get(_key(rank)), type=Entry)
        return found is not None and (bool(found.address) or not found.machine)

    await until(listens)
    return None if found is None or not found.machine else found


@asynccontextmanager
async def joining(
    address: str, rank: int, things: Things
) -> AsyncIterator[Callable[[Entry | None, Conversation], Awaitable[object]]]:
    """Prepare a rogue rank; the result runs a conversation with the other end, whose entry it needs.

    Args:
        address: the address where it listens, if it has the lower rank.
        rank: the rank of the rogue.
        things: the descriptors of the rogue.
    """
    if rank == 0:
        opening = OPENING + (b"" if address.startswith("unix://") else _TOKEN.encode())
        with listening_at(_listens_at(address), things, opening) as accept:
            yield lambda _, said: converse(accept, _alone(said))
    else:
        yield lambda entry, said: _connect(entry, said, things)


def _alone(said: Conversation) -> Conversation:
    """Return the conversation without further connections, of which a listening rogue has none."""
    return msgspec.structs.replace(said, steps=tuple(step for step in said.steps if not step.beside))


async def _connect(entry: Entry | None, said: Conversation, things: Things) -> None:
    if entry is None:
        return
    opening = OPENING + entry.token.encode()
    with (
        contextlib.suppress(ConnectionRefusedError),  # the other end has given up
        connecting_to(entry.address, things, opening) as connect,
    ):
        await converse(connect, said)
