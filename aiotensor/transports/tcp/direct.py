"""Blocks that an engine writes into the memory of the peer, with the messages of `aiotensor.protocol.direct`.

    unused --both sides have an engine--> testing --both tests succeed--> used
       |                                     |                             |
       '-------------------------------------'--------> refused <----------'

While no engine is used, blocks move in steps.
"""

import asyncio
import secrets
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

__all__ = ["DirectMoves"]

# Shorter moves are steps: they end at once, but a write waits for memory of the peer first.
_LEAST_BYTES = STEP_BYTES + 1

_TEST_BYTES = 16
_TEST_S = (
    5.0  # an engine that cannot reach the peer, perhaps because of a firewall, does not always report it
)

_NOT_CHOSEN = "no engine was chosen at the other side"


class _Registration(msgspec.Struct, eq=False):
    """Memory of a block that the peer may write to, also for later blocks at the same place."""

    nbytes: int
    key: "asyncio.Future[bytes]"


class _Expected(msgspec.Struct, eq=False):
    """A write of the peer: its memory, which is not unmapped until its end, once the peer may write."""

    memory: memoryview | None = None


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
        self._is_known = False  # whether the other side has chosen an engine
        self._test = bytearray(_TEST_BYTES)  # the peer writes to it
        loop = asyncio.get_running_loop()
        self._offered: asyncio.Future[Offer] = loop.create_future()
        self._proved: asyncio.Future[bytes] = loop.create_future()
        self._writes: dict[int, Move[memoryview]] = {}
        self._numbers: dict[Move[memoryview], int] = {}  # of these
        self._begun: set[int] = set()
        self._next_write = 0
        self._expected: dict[int, _Expected] = {}
        self._registrations: dict[Area, _Registration] = {}

    def connected(self) -> None:
        """Begin to negotiate at the connecting side, if the user has chosen an engine."""
        if self._choice is not None:
            self._is_known = True
            self._send(Chosen(self._choice.name))
            self._start(self._choice)

    def expect_blocks(self) -> None:
        """Log once that the other side has chosen no engine, as soon as blocks may move."""
        if self._choice is not None and not self._is_known:
            self._choice.report(_NOT_CHOSEN)

    def stop(self) -> None:
        """Close the engine. Its moves end in steps, once it does not read their bytes any more."""
        self.engine = ""
        if self._negotiating is not None and self._negotiating is not asyncio.current_task():
            self._negotiating.cancel()
        moves, memory = list(self._writes.values()), list(self._expected.values())
        for table in (self._writes, self._numbers, self._expected, self._registrations):
            table.clear()
        self._begun.clear()
        running, self._running = self._running, None
        if running is not None:
            running.close(partial(self._closed, moves, memory))

    def _closed(self, moves: list[Move[memoryview]], memory: list["_Expected"]) -> None:
        memory.clear()  # until now, the peer may have written to it
        for move in moves:
            if move.is_cancelled:
                move.ended(False)
            else:
                self._by_steps(move)

    # Blocks that this side writes

    def begin(self, move: Move[memoryview]) -> bool:
        """Move bytes to the peer if there is an engine for them, and return whether there is."""
        self.expect_blocks()
        if not self.engine or move.length < _LEAST_BYTES or len(self._writes) >= MAX_WRITES:
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
            self._by_steps(move)  # for example, its memory cannot be registered
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
        for start, length in ranges:
            self._unregister(segment, start, start + length)

    def _reserve(self, message: Reserve) -> None:
        number, segment, block, nbytes = message.write, message.segment, message.block, message.nbytes
        if self._running is None or not self._proved.done():
            self._send(Reserved(number, b""))
            return
        if number in self._expected or len(self._expected) >= MAX_WRITES:
            raise ProtocolError("it reserved memory twice, or too often")
        landing = self._landings.get(segment)
        if landing is None:
            raise ProtocolError(f"it reserved memory in segment {segment}, which it never attached")
        self._expected[number] = _Expected()
        landing.reserve(block, nbytes, partial(self._has_memory, number, Area(segment, block)))

    def _has_memory(self, number: int, area: Area, memory: memoryview | None, failure: str) -> None:
        expected = self._expected.get(number)
        if failure:
            self._failed(failure)
        if self._running is None or expected is None or memory is None:
            return  # the peer has withdrawn it, or is gone
        registration = self._registrations.get(area)
        if registration is None or registration.nbytes != len(memory):
            self._unregister(area.segment, area.block, area.block + len(memory))
            registration = _Registration(len(memory), self._running.register(memory))
            self._registrations[area] = registration
        expected.memory = memory
        self._running.begin_polling()
        registration.key.add_done_callback(partial(self._registered, number, area))

    def _registered(self, number: int, area: Area, registering: "asyncio.Future[bytes]") -> None:
        key = b""
        try:
            key = registering.result()
        except EngineError:
            registration = self._registrations.get(area)
            if registration is not None and registration.key is registering:
                del self._registrations[area]
        if number in self._expected:
            if not key:
                self._written(number)
            self._send(Reserved(number, key))

    def _written(self, number: int) -> None:
        expected = self._expected.pop(number, None)
        if expected is not None and expected.memory is not None and self._running is not None:
            self._running.end_polling()

    def _unregister(self, segment: int, start: int, stop: int) -> None:
        for area, registration in list(self._registrations.items()):
            if area.segment == segment and area.block < stop and start < area.block + registration.nbytes:
                del self._registrations[area]
                registration.key.add_done_callback(self._drop)

    def _drop(self, registering: "asyncio.Future[bytes]") -> None:
        if self._running is not None and registering.exception() is None:
            self._running.unregister(registering.result())

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
        if self._is_known:
            raise ProtocolError("it chose an engine twice")
        self._is_known = True
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
        self._running = RunningEngine(self._engine_failed)
        self._negotiating = asyncio.get_running_loop().create_task(
            self._negotiate(choice.name, choice.make, self._running), name="aiotensor-engine"
        )

    async def _negotiate(self, engine: str, make: Callable[[], Engine], running: RunningEngine) -> None:
        try:
            address = await running.open(make)
            key = await running.register(memoryview(self._test))
            self._send(Offer(address, key))
            offer = await self._offered
            running.begin_polling()
            async with asyncio.timeout(_TEST_S):
                await running.connect(offer.address)
                await self._prove(running, offer.key)
            running.end_polling()
        except TimeoutError:
            self._refuse("its test took too long: does a firewall let it through?")
        except (EngineError, OSError) as error:
            self._refuse(str(error))
        else:
            self.engine = engine

    async def _prove(self, running: RunningEngine, key: bytes) -> None:
        """Write to the memory of the peer, and wait until the peer has written here."""
        test = secrets.token_bytes(_TEST_BYTES)
        written: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def ended(reason: str, has_begun: bool) -> None:
            if not written.done():
                written.set_result(reason)

        running.write(memoryview(test), key, 0, ended)
        if reason := await written:
            raise EngineError(reason)
        self._send(Proved(test))
        if await self._proved != bytes(self._test):
            raise EngineError("the test of the other side did not arrive")

    def _refuse(self, reason: str) -> None:
        """Do without an engine, and notify the peer."""
        self._send(Refused(reason))
        self._do_without(reason)

    def _refused(self, reason: str) -> None:
        """Do without an engine, because the peer does."""
        self._is_known = True
        if self._running is not None:
            self._do_without(reason)

    def _do_without(self, reason: str) -> None:
        if self._choice is not None:
            self._choice.report(reason)
        self.stop()

    def _engine_failed(self, reason: str) -> None:
        if self._choice is not None:
            self._failed(f"{self._choice.name} failed: {reason}")
