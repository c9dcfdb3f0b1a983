"""A rogue rank: it finds the other end of a pipe as an honest rank does, and sends it any records."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not declare it

from aiotensor.protocol.frames import VERSION
from aiotensor.protocol.network import OPENING
from aiotensor.ranks import entries
from aiotensor.ranks.entries import Entry
from verification.fuzz.listening import answering_at
from verification.fuzz.speaking import OnSocket, Road
from verification.fuzz.speaking_tcp import OnTcp
from verification.fuzz.steps import STAND_IN, Conversation, Step
from verification.fuzz.things import Things
from verification.waiting import until

__all__ = ["RANKS", "address_of", "entry_of", "join", "joining", "store_with"]

RANKS = 2  # in the group; the lower one listens

_LOOPBACK = "127.0.0.1"
_TOKEN = "5e" * 32  # which the other end has to know
_PATIENCE_S = 0.05  # for a record that may never arrive
_SENDER = STAND_IN.encode()


def _key(rank: int) -> str:
    """Return the name of the entry of a rank for the first pipe."""
    return f"aiotensor/ranks/0-1/1/{rank}"


def entry_of(address: str, rank: int) -> Entry:
    """Return the entry of a rogue, which listens at an address or connects, according to its rank."""
    if not address.startswith("tcp://"):
        machine, token = entries.machine_of_this_process(), ""
    else:
        machine, token = "the machine of a rogue", _TOKEN
    path = address.removeprefix("unix://")
    return Entry(VERSION, machine, _LOOPBACK, "", *((path, token) if rank == 0 else ()))


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
        return found is not None and (bool(found.address) or found.is_withdrawn)

    await until(listens)
    return None if found is None or found.is_withdrawn else found


@asynccontextmanager
async def joining(
    address: str, rank: int, things: Things
) -> AsyncIterator[Callable[[Entry | None, Conversation], Awaitable[None]]]:
    """Prepare a rogue rank; the result runs a conversation with the other end, whose entry it needs.

    Args:
        address: the address where it listens, if it has the lower rank.
        rank: the rank of the rogue.
        things: the descriptors of the rogue.
    """
    if rank == 0:
        with answering_at(address, things, OPENING + _TOKEN.encode(), _PATIENCE_S) as answer:
            yield lambda _, said: answer(msgspec.structs.replace(said, steps=_alone(said)))
    else:
        yield lambda entry, said: _connect(entry, said, things)


def _alone(said: Conversation) -> tuple[Step, ...]:
    """Return the steps without those of further connections, of which a listening rogue has none."""
    return tuple(step for step in said.steps if not step.beside)


async def _connect(entry: Entry | None, said: Conversation, things: Things) -> None:
    if entry is None:
        return
    road: OnTcp | OnSocket
    if entry.token:
        road = OnTcp(entry.address, OPENING + entry.token.encode())
    else:
        road = OnSocket(entry.address, things)
    with contextlib.closing(road):
        for step in said.steps:
            if step.beside:
                await road.say_beside(step, _SENDER)
        await join(road, said)


async def join(road: Road, said: Conversation) -> None:
    """Connect, and send the records of a conversation after those of the other end that each follows."""
    steps = _alone(said)
    await road.connect(steps[0].opening)
    read = 0
    for step in steps:
        while read < step.after and await road.read(_PATIENCE_S):
            read += 1
        if not await road.say(step, _SENDER):
            return
