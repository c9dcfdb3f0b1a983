"""Rogue peers of every kind of peer in this process, where atheris measures coverage."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import get_args

import torch

from aiotensor import TensorReceiver, TensorSender
from aiotensor.broadcast import Publisher, SlowPolicy, Subscriber
from aiotensor.transports.endpoints import Endpoint
from verification.fuzz import api
from verification.fuzz.broadcasts import MOST_READ
from verification.fuzz.engine import Engine, Figures, Troubles, figures, listed
from verification.fuzz.joining import address_of, entry_of, joining, store_with
from verification.fuzz.listening import answering_at
from verification.fuzz.live_inspector import INSPECTED, inspect_once
from verification.fuzz.live_rank import rank_for
from verification.fuzz.notes import Note
from verification.fuzz.piping import HonestRanks, honest_ranks, on_other_machines, use
from verification.fuzz.ranks import TO_RANK
from verification.fuzz.receiving import publish_rightly, receive_all
from verification.fuzz.speaking import converse, heard, road_to
from verification.fuzz.steps import Conversation
from verification.fuzz.subscribing import subscribe
from verification.fuzz.things import Things
from verification.patterns import BIG, pattern
from verification.waiting import until

__all__ = ["Inside", "inside"]

_PATIENCE_S = 20

_IN_STEPS = 2 * BIG  # elements of int64, which a publisher moves in several steps


class InsideReceiver:
    """A receiver that takes every tensor and keeps none."""

    def __init__(self, endpoint: Endpoint, engine: Engine, things: Things) -> None:
        self._endpoint = endpoint
        self._engine = engine
        self._things = things

    async def hear(self, conversation: Conversation) -> None:
        """Send a conversation, and wait until the receiver has released every resource of the rogue."""
        async with asyncio.timeout(_PATIENCE_S):
            with road_to(self._endpoint, self._things) as road:
                await converse(road, conversation)
            await heard(self._endpoint, self._things)
            await self._engine.settle()
        found = self._engine.troubles.found
        assert not found, "\n".join(found)
        statistics = self._engine.receiver.statistics()
        assert (statistics.mapped_bytes, statistics.promised_messages, statistics.leased_bytes) == (0, 0, 0)

    async def look(self) -> Figures:
        """Measure this process."""
        return figures()

    @property
    def summary(self) -> str:
        """Return a summary of the run."""
        engine = self._engine
        return (
            f"{engine.troubles.cut_off} links cut off, {engine.troubles.refused} refused, "
            f"{engine.taken} tensors taken, {engine.taken_in_memory} of them in shared memory"
        )


@asynccontextmanager
async def _inside_receiver(endpoint: Endpoint) -> AsyncIterator[InsideReceiver]:
    """Open a receiver in this process."""
    async with TensorReceiver(endpoint) as receiver:
        engine = Engine(receiver)
        engine.start()
        try:
            with Things() as things:
                yield InsideReceiver(endpoint, engine, things)
        finally:
            await engine.stop()


class InsideSender:
    """A new sender for each conversation, whose waits must all end."""

    def __init__(self, address: str, troubles: Troubles, things: Things) -> None:
        self._address = address
        self._troubles = troubles
        self._things = things
        self._outcomes: Counter[str] = Counter()

    async def hear(self, conversation: Conversation) -> None:
        """Run a rogue receiver for a sender in use, and then an honest one for the remaining tensors."""
        async with asyncio.timeout(_PATIENCE_S), contextlib.AsyncExitStack() as stack:
            with answering_at(self._address, self._things) as answer:
                sender = TensorSender(self._address, api.PERMITS, api.ARENA_BYTES)
                await stack.enter_async_context(sender)
                working = asyncio.create_task(api.work(sender))
                await answer(conversation)
            async with TensorReceiver(self._address) as honest:
                taking = asyncio.create_task(_take(honest))
                self._outcomes += await working
                await api.check_all_is_back(sender)
                taking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await taking
        assert not self._troubles.found, "\n".join(self._troubles.found)

    async def look(self) -> Figures:
        """Measure this process."""
        return figures()

    @property
    def summary(self) -> str:
        """Return a summary of the run."""
        return f"{self._troubles.cut_off} receivers cut off; sends: {listed(self._outcomes)}"


async def _take(receiver: TensorReceiver) -> None:
    async for delivery in receiver:
        assert api.is_whole(delivery.tensor)
        del delivery


class InsideInspector:
    """An inspection for each conversation, which must end."""

    def __init__(self, address: str, troubles: Troubles, things: Things) -> None:
        self._address = address
        self._troubles = troubles
        self._things = things
        self._outcomes: Counter[str] = Counter()

    async def hear(self, conversation: Conversation) -> None:
        """Inspect a rogue receiver, and then an honest one."""
        async with asyncio.timeout(_PATIENCE_S):
            with answering_at(self._address, self._things) as answer:
                inspecting = asyncio.create_task(inspect_once(self._address))
                await answer(conversation)
            self._outcomes[await inspecting] += 1
            async with TensorReceiver(self._address):
                assert await inspect_once(self._address) == INSPECTED
        assert not self._troubles.found, "\n".join(self._troubles.found)

    async def look(self) -> Figures:
        """Measure this process."""
        return figures()

    @property
    def summary(self) -> str:
        """Return a summary of the run."""
        return f"inspections: {listed(self._outcomes)}"


class InsidePublisher:
    """A new publisher for each conversation, with an honest subscriber."""

    def __init__(self, address: str, troubles: Troubles, things: Things) -> None:
        self._address = address
        self._troubles = troubles
        self._things = things
        self._heard = self._received = self._conversations = 0

    async def hear(self, conversation: Conversation) -> None:
        """Run a rogue subscriber beside an honest one, which receives everything."""
        slow = get_args(SlowPolicy)[self._conversations % 3]
        self._conversations += 1
        async with (
            asyncio.timeout(_PATIENCE_S),
            Publisher(self._address, arena_bytes=8 << 20, max_behind=MOST_READ, slow=slow) as publisher,
            Subscriber(self._address, Note) as honest,
        ):
            await publisher.wait_for_subscribers(1)
            talking = asyncio.create_task(self._talk(conversation))
            number = 0
            while not talking.done() or not number:
                number = await self._publish(publisher, honest)
            self._heard += await talking
            await self._publish(publisher, honest)
            await until(lambda: [lag.behind for lag in publisher.statistics().lags] == [0])
        assert not self._troubles.found, "\n".join(self._troubles.found)

    async def _talk(self, conversation: Conversation) -> int:
        """Run the rogue, and close its connections: a publication may wait for its answers."""
        with road_to(self._address, self._things) as road:
            return await subscribe(road, conversation)

    async def _publish(self, publisher: Publisher, honest: Subscriber[Note]) -> int:
        number = publisher.statistics().published
        tensor = pattern(number, _IN_STEPS if self._conversations % 8 == 0 else 3000)
        sent = asyncio.create_task(publisher.publish(Note(number, [tensor])))
        publication = await honest.receive()
        assert (publication.number, publication.missed) == (number, 0)
        assert torch.equal(publication.message.tensors[0], tensor)
        await sent
        self._received += 1
        return number + 1

    async def look(self) -> Figures:
        """Measure this process."""
        return figures()

    @property
    def summary(self) -> str:
        """Return a summary of the run."""
        return f"{self._received} publications received by honest subscribers, {self._heard} read by rogues"


class InsideSubscriber:
    """A new subscriber for each conversation, whose waits must all end."""

    def __init__(self, address: str, troubles: Troubles, things: Things) -> None:
        self._address = address
        self._troubles = troubles
        self._things = things
        self._outcomes: Counter[str] = Counter()
        self._taken_in_memory = 0

    async def hear(self, conversation: Conversation) -> None:
        """Run a rogue publisher for a subscriber in use, and then an honest one."""
        async with asyncio.timeout(_PATIENCE_S), contextlib.AsyncExitStack() as stack:
            with answering_at(self._address, self._things) as answer:
                subscriber = await stack.enter_async_context(Subscriber(self._address, Note))
                receiving = asyncio.create_task(receive_all(subscriber, self._troubles))
                await answer(conversation)
            async with Publisher(self._address) as honest:
                await publish_rightly(honest)
                received = await receiving
            self._outcomes += received.outcomes
            self._taken_in_memory += received.taken_in_memory
        assert not self._troubles.found, "\n".join(self._troubles.found)

    async def look(self) -> Figures:
        """Measure this process."""
        return figures()

    @property
    def summary(self) -> str:
        """Return a summary of the run."""
        return (
            f"{self._taken_in_memory} tensors of rogues in shared memory; receives: {listed(self._outcomes)}"
        )


class InsideRank:
    """A new pipe for each conversation, whose waits must all end, and two honest ranks beside it."""

    def __init__(self, address: str, troubles: Troubles, things: Things, honest: HonestRanks) -> None:
        self._address = address
        self._troubles = troubles
        self._things = things
        self._honest = honest
        self._outcomes: Counter[str] = Counter()
        self._taken_in_memory = 0

    async def hear(self, conversation: Conversation) -> None:
        """Run a rogue rank for a pipe in use, while the honest ranks exchange messages."""
        rank = rank_for(conversation)
        async with asyncio.timeout(_PATIENCE_S):
            has_left = asyncio.Event()
            async with joining(self._address, rank, self._things) as talk:
                store = store_with(entry_of(self._address, rank), rank)
                using = asyncio.create_task(use(store, 1 - rank, has_left, self._troubles))
                await talk(await address_of(store, 1 - rank) if rank else None, conversation)
            has_left.set()
            await self._honest.exchange()
            used = await using
            self._outcomes += used.outcomes
            self._taken_in_memory += used.in_memory
        assert not self._troubles.found, "\n".join(self._troubles.found)

    async def look(self) -> Figures:
        """Measure this process."""
        return figures()

    @property
    def summary(self) -> str:
        """Return a summary of the run."""
        return (
            f"{self._troubles.cut_off} ranks cut off, {self._taken_in_memory} tensors of rogues in shared "
            f"memory; calls: {listed(self._outcomes)}"
        )


@asynccontextmanager
async def _inside_rank(address: str) -> AsyncIterator[InsideRank]:
    """Prepare this process for pipes, and open two honest ranks."""
    async with contextlib.AsyncExitStack() as stack:
        if address.startswith("tcp://"):
            stack.enter_context(on_other_machines())
        honest = await stack.enter_async_context(honest_ranks())
        troubles = Troubles()
        troubles.watch()
        stack.callback(troubles.leave)
        yield InsideRank(address, troubles, stack.enter_context(Things()), honest)


_InTurn = InsideSender | InsideInspector | InsidePublisher | InsideSubscriber
Inside = InsideReceiver | InsideRank | _InTurn


@asynccontextmanager
async def _inside(kind: type[_InTurn], address: str) -> AsyncIterator[_InTurn]:
    """Prepare this process for peers that are opened one after the other."""
    troubles = Troubles()
    troubles.watch()
    try:
        with Things() as things:
            yield kind(address, troubles, things)
    finally:
        troubles.leave()


def inside(target: str, endpoint: Endpoint) -> AbstractAsyncContextManager[Inside]:
    """Prepare this process for a target."""
    kinds: dict[str, type[_InTurn]] = {
        "sender": InsideSender,
        "inspector": InsideInspector,
        "publisher": InsidePublisher,
        "subscriber": InsideSubscriber,
    }
    kind, _, _ = target.partition(", ")
    if kind == TO_RANK:
        return _inside_rank(str(endpoint))
    return _inside(kinds[kind], str(endpoint)) if kind in kinds else _inside_receiver(endpoint)
