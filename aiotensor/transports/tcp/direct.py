"""Blocks that an engine writes into the memory of the peer, with the messages of `aiotensor.protocol.direct`.

    unused --both sides have chosen it--> testing --both tests succeed--> used
       |                                     |                             |
       '-------------------------------------'--------> refused <----------'

While no engine is used, blocks move in steps.
"""

import asyncio
import secrets
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from aiotensor.engines import Engine, EngineError
from aiotensor.errors import ProtocolError
from aiotensor.protocol.direct import (
    MAX_WRITES,
    Chosen,
    DirectMessage,
    Offer,
    Proved,
    Refused,
    Reserve,
    Reserved,
    Written,
)
from aiotensor.protocol.moves import Move
from aiotensor.protocol.network import STEP_BYTES, Area
from aiotensor.protocol.pages import Range
from aiotensor.transports.base import Landing
from aiotensor.transports.tcp.engine import EngineChoice, RunningEngine

__all__ = ["LEAST_BYTES", "DirectMoves"]

# Shorter moves are steps: they end at once, but a write waits for memory of the peer first.
LEAST_BYTES = STEP_BYTES + 1

# The engines handle one packet in another way than several. The bytes of the test repeat a random seed.
_TEST_BYTES = 64 << 10
_SEED_BYTES = 16
_TEST_S = (
    5.0  # an engine that cannot reach the peer, perhaps because of a firewall, does not always report it
)

_NOT_CHOSEN = "no engine was chosen at the other side"


class _Registration(msgspec.Struct, eq=False):
    """Memory of a block that the peer may write to, also for later blocks at the same place."""

    nbytes: int
    key: "asyncio.Future[bytes]"


class DirectMoves:
    """Move blocks with an engine, and receive those of the peer; belongs to the running loop.

    Args:
        choice: of the user; None for no engine.
        send: sends a message to the peer.
        by_steps: moves bytes without an engine; after the end of the connection, the move ends at once.
        landings: memory for the segments of the peer, by number.
        failed: ends the connection.

    Attributes:
        engine: the name of the engine; "" while none is used.
    """

    def __init__(
        self,
        choice: EngineChoice | None,
        send: Callable[[DirectMessage], object],
        by_steps: Callable[[Move[memoryview]], object],
        landings: Mapping[int, Landing],
        failed: Callable[[str], object],
    ) -> None:
        self.engine = ""
        self._choice = choice
        self._send = send
        self._by_steps = by_steps
        self._landings = landings
        self._failed = failed
        self._running: RunningEngine | None = None
        self._negotiating: asyncio.Task[None] | None = None
        self._has_negotiated = False  # whether either side has mentioned an engine
        self._is_admitted = self._is_stopped = False
        self._wanted = ""  # the engine that the peer has chosen before it was admitted
        loop = asyncio.get_running_loop()
        self._offered: asyncio.Future[Offer] = loop.create_future()
        self._proved: asyncio.Future[bytes] = loop.create_future()
        self._writes: dict[int, Move[memoryview]] = {}
        self._numbers: dict[Move[memoryview], int] = {}  # of these
        self._begun: set[int] = set()
        self._next_write = 0
        self._expected: dict[int, memoryview | None] = {}  # writes of the peer, to memory that stays mapped
        self._registrations: dict[int, dict[int, _Registration]] = {}  # by segment and block
        self._after_stop: list[Callable[[], object]] | None = None  # while the engine is being closed

    def connected(self) -> None:
        """Begin to negotiate at the connecting side, if the user has chosen an engine."""
        self._is_admitted = True
        if self._choice is not None:
            self._has_negotiated = True
            if self._choice.make is not None:
                self._send(Chosen(self._choice.name))
            self._start(self._choice)

    def admitted(self) -> None:
        """Begin to negotiate at the listening side, if both users have chosen an engine."""
        self._is_admitted = True
        if self._wanted:
            self._answer(self._wanted)

    def report_if_not_chosen(self) -> None:
        """Log that the other side has chosen no engine, because blocks will move."""
        if self._choice is not None and not self._has_negotiated:
            self._choice.report(_NOT_CHOSEN)

    def when_stopped(self, stopped: Callable[[], object]) -> None:
        """Call a function as soon as no engine accesses memory any more, perhaps during this call."""
        if self._after_stop is None:
            stopped()
        else:
            self._after_stop.append(stopped)

    def stop(self) -> None:
        """Close the engine. Its moves end in steps, once it does not read their bytes any more."""
        self.engine = ""
        self._is_stopped = True
        if self._negotiating is not None:
            self._negotiating.cancel()
        moves, memory = list(self._writes.values()), list(self._expected.values())
        for table in (self._writes, self._numbers, self._expected, self._registrations):
            table.clear()
        self._begun.clear()
        running, self._running = self._running, None
        if running is not None:
            self._after_stop = []
            running.close(partial(self._closed, moves, memory))

    def _closed(self, moves: list[Move[memoryview]], memory: list[memoryview | None]) -> None:
        memory.clear()  # until now, the peer may have written to it
        waiting, self._after_stop = self._after_stop or [], None
        for stopped in waiting:
            stopped()
        for move in moves:
            if move.is_cancelled:
                move.ended(False)
            else:
                self._by_steps(move)

    # Blocks that this side writes

    def begin(self, move: Move[memoryview]) -> bool:
        """Move bytes to the peer if there is an engine for them, and return whether there is."""
        self.report_if_not_chosen()
        if not self.engine or move.length < LEAST_BYTES or len(self._writes) >= MAX_WRITES:
            return False
        number = self._next_write
        self._next_write += 1
        self._writes[number], self._numbers[move] = move, number
        self._send(Reserve(number, move.area.segment, move.area.block, move.nbytes))
        return True

    def cancel(self, move: Move[memoryview]) -> bool:
        """Cancel a move, and return whether it is one of these; a write that has begun ends as usual."""
        number = self._numbers.get(move)
        if number is None:
            return False
        move.is_cancelled = True
        if number not in self._begun:
            self._forget(number)
            self._send(Written(number))
            move.ended(False)
        return True

    def _has_key(self, message: Reserved) -> None:
        number, key = message.write, message.key
        if number >= self._next_write or number in self._begun:
            raise ProtocolError("it reserved memory that nobody requested")
        move = self._writes.get(number)
        if move is None:
            return  # cancelled since
        if not key or self._running is None:
            self._forget(number)
            self._by_steps(move)
            return
        self._begun.add(number)
        self._running.write(
            move.source, key, move.start - move.area.block, partial(self._write_ended, number)
        )

    def _write_ended(self, number: int, reason: str, has_begun: bool) -> None:
        move = self._forget(number)
        self._send(Written(number))
        if reason and not has_begun and not move.is_cancelled:
            self._report_tensor(reason)
            self._by_steps(move)
            return
        if reason and has_begun:
            self._engine_failed(reason)
        move.ended(not (reason or move.is_cancelled))

    def _forget(self, number: int) -> Move[memoryview]:
        move = self._writes.pop(number)
        del self._numbers[move]
        self._begun.discard(number)
        return move

    # Blocks that the peer writes

    def returned(self, segment: int, ranges: Sequence[Range]) -> None:
        """End the registrations of memory that is returned to the system."""
        if segment in self._registrations:
            self._unregister(segment, [(start, start + length) for start, length in ranges])

    def _reserve(self, message: Reserve) -> None:
        number, segment, block, nbytes = message.write, message.segment, message.block, message.nbytes
        landing = self._landings.get(segment)
        if landing is None:
            raise ProtocolError(f"it reserved memory in segment {segment}, which it never attached")
        if self._running is None or not self._proved.done():
            landing.reserve(block, nbytes, lambda *_: None)  # for the steps that follow
            self._send(Reserved(number, b""))
            return
        if number in self._expected or len(self._expected) >= MAX_WRITES:
            raise ProtocolError("it reserved memory twice, or too often")
        self._expected[number] = None
        landing.reserve(block, nbytes, partial(self._has_memory, number, Area(segment, block)))

    def _has_memory(self, number: int, area: Area, memory: memoryview | None, failure: str) -> None:
        if failure:
            self._failed(failure)
        if self._running is None or number not in self._expected or memory is None:
            return  # the peer has withdrawn it, or is gone
        of_segment = self._registrations.setdefault(area.segment, {})
        registration = of_segment.get(area.block)
        if registration is None or registration.nbytes != len(memory):
            self._unregister(area.segment, [(area.block, area.block + len(memory))])
            registration = of_segment[area.block] = _Registration(len(memory), self._running.register(memory))
        self._expected[number] = memory
        self._running.begin_polling()
        registration.key.add_done_callback(partial(self._registered, number, area))

    def _registered(self, number: int, area: Area, registering: "asyncio.Future[bytes]") -> None:
        error = registering.exception()
        if error is not None:
            self._report_tensor(str(error))
            of_segment = self._registrations.get(area.segment, {})
            if area.block in of_segment and of_segment[area.block].key is registering:
                del of_segment[area.block]
        if number in self._expected:
            if error is not None:
                self._written(number)
            self._send(Reserved(number, b"" if error is not None else registering.result()))

    def _written(self, number: int) -> None:
        memory = self._expected.pop(number, None)
        if memory is not None and self._running is not None:
            self._running.end_polling()

    def _unregister(self, segment: int, ranges: list[tuple[int, int]]) -> None:
        """End the registrations that overlap ranges from a first byte up to another."""
        merged = _merged(ranges)
        stops = [stop for _, stop in merged]
        of_segment, keys = self._registrations[segment], []
        for block, registration in list(of_segment.items()):
            index = bisect_right(stops, block)
            if index < len(merged) and merged[index][0] < block + registration.nbytes:
                del of_segment[block]
                if registration.key.done():
                    keys.append(registration.key)
                else:
                    registration.key.add_done_callback(lambda key: self._drop([key]))
        self._drop(keys)

    def _drop(self, registered: "list[asyncio.Future[bytes]]") -> None:
        keys = [one.result() for one in registered if one.exception() is None]
        if keys and self._running is not None:
            self._running.unregister(keys)

    # Negotiation

    def receive(self, message: DirectMessage) -> None:
        """Handle a message of the peer.

        Raises:
            ProtocolError: it does not fit here.
        """
        match message:
            case Reserve():
                self._reserve(message)
            case Reserved():
                self._has_key(message)
            case Written():
                self._written(message.write)
            case Chosen():
                self._chosen(message.engine)
            case Offer():
                if self._running is not None:
                    if self._offered.done():
                        raise ProtocolError("it offered an engine twice")
                    self._offered.set_result(message)
            case Proved():
                if self._running is not None:
                    if self._proved.done():
                        raise ProtocolError("it proved its engine twice")
                    self._proved.set_result(message.test)
            case Refused():
                self._refused(message.reason)

    def _chosen(self, engine: str) -> None:
        if self._has_negotiated:
            raise ProtocolError("it chose an engine twice")
        self._has_negotiated = True
        if self._is_admitted:
            self._answer(engine)
        else:
            self._wanted = engine

    def _answer(self, engine: str) -> None:
        if self._choice is None:
            self._send(Refused(_NOT_CHOSEN))
        elif engine != self._choice.name:
            self._refuse(f"one side chose {engine}, and the other one {self._choice.name}")
        else:
            self._start(self._choice)

    def _start(self, choice: EngineChoice) -> None:
        if choice.make is None:
            self._refuse(choice.reason)
            return
        if self._is_stopped:
            return
        self._running = RunningEngine(self._engine_failed)
        self._negotiating = asyncio.get_running_loop().create_task(
            self._negotiate(choice.name, choice.make, self._running), name="aiotensor-engine"
        )

    async def _negotiate(self, engine: str, make: Callable[[], Engine], running: RunningEngine) -> None:
        try:
            address = await running.open(make)
            test = bytearray(_TEST_BYTES)  # the peer writes to it
            key = await running.register(memoryview(test))
            self._send(Offer(address, key))
            offer = await self._offered
            running.begin_polling()
            async with asyncio.timeout(_TEST_S):
                await running.connect(offer.address)
                await self._prove(running, offer.key, test)
            running.end_polling()
        except TimeoutError:
            self._refuse("its test took too long: does a firewall let it through?")
        except (EngineError, OSError) as error:
            self._refuse(str(error))
        else:
            self.engine = engine

    async def _prove(self, running: RunningEngine, key: bytes, test: bytearray) -> None:
        """Write to the memory of the peer, and wait until the peer has written to that of the test."""
        seed = secrets.token_bytes(_SEED_BYTES)
        source = seed * (_TEST_BYTES // _SEED_BYTES)
        written: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def ended(reason: str, has_begun: bool) -> None:
            if not written.done():
                written.set_result(reason)

        running.write(memoryview(source), key, 0, ended)
        if reason := await written:
            raise EngineError(reason)
        self._send(Proved(seed))
        if await self._proved * (_TEST_BYTES // _SEED_BYTES) != test:
            raise EngineError("the test of the other side did not arrive")

    def _refuse(self, reason: str) -> None:
        """Do without an engine, and notify the peer."""
        self._send(Refused(reason))
        self._do_without(reason)

    def _refused(self, reason: str) -> None:
        """Do without an engine, because the peer does."""
        self._has_negotiated = True
        self._do_without(reason)

    def _do_without(self, reason: str) -> None:
        if self._choice is not None:
            self._choice.report(reason)
        self.stop()

    def _engine_failed(self, reason: str) -> None:
        if self._choice is None:
            raise AssertionError("an engine was chosen")
        if self.engine:
            self._failed(f"{self._choice.name} failed: {reason}")
        else:
            self._refuse(reason)

    def _report_tensor(self, reason: str) -> None:
        if self._choice is not None:
            self._choice.report(reason, "some large tensors")


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges in order, without gaps of no bytes and without overlaps."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged
