"""Blocks that an engine writes into the memory of the peer, with the messages of `aiotensor.protocol.direct`.

    unused --both sides have chosen it--> testing --both tests succeed--> used
       |                                     |                             |
       |                                     '---------> closing <---------'  the engine of either side failed
       '---------------------> refused <--------------------'

While no engine is used, blocks are moved in steps. If an engine fails, each side closes its own. A block
whose write has not ended is moved again only after both are closed: until then, bytes may still arrive in it.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from aiotensor.engines import Engine, EngineError, RegistrationError
from aiotensor.errors import ProtocolError
from aiotensor.protocol.direct import (
    MAX_REASON,
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
from aiotensor.protocol.network import STEP_BYTES
from aiotensor.protocol.pages import Range
from aiotensor.transports.base import Landing
from aiotensor.transports.tcp.engine import EngineChoice, RunningEngine
from aiotensor.transports.tcp.reserved import ReservedMemory

__all__ = ["LEAST_BYTES", "STALLED_S", "DirectMoves"]

# A shorter move is one step, which ends at once. A write first waits until the peer has reserved memory.
LEAST_BYTES = STEP_BYTES + 1

# Engines transfer several packets differently from a single one, so the test has more bytes than one packet.
# These bytes repeat a random seed.
_TEST_BYTES = 64 << 10
_SEED_BYTES = 16

# An engine does not always report that it cannot reach the peer, for example because of a firewall, or that
# it has lost the peer. So the tests of both sides have to end within `_TEST_S`. Later, the engine counts as
# failed if no write ends within `STALLED_S` plus the time that all begun writes take at `_LEAST_BYTES_PER_S`.
_TEST_S = 5.0
STALLED_S = 5.0
_LEAST_BYTES_PER_S = 10e6

_NOT_CHOSEN = "the peer did not choose an engine"


class DirectMoves:
    """Move blocks with an engine, and receive those of the peer; belongs to the running loop.

    Args:
        choice: the engine that the user has chosen; None for no engine.
        send: sends a message to the peer.
        move: begins a move again, with `begin` or in steps; ends it if the connection has ended.
        by_steps: does the same as `move`, but never with an engine.
        landings: memory for the segments of the peer, by number.
        failed: called with a reason to end the connection.

    Attributes:
        engine: the name of the engine; "" while none is used.
    """

    def __init__(
        self,
        choice: EngineChoice | None,
        send: Callable[[DirectMessage], object],
        move: Callable[[Move[memoryview]], object],
        by_steps: Callable[[Move[memoryview]], object],
        landings: Mapping[int, Landing],
        failed: Callable[[str], object],
    ) -> None:
        self.engine = ""
        self._choice = choice
        self._send = send
        self._move = move
        self._by_steps = by_steps
        self._landings = landings
        self._failed = failed
        self._running: RunningEngine | None = None
        self._reserved: ReservedMemory | None = None  # while this engine is open
        self._negotiating: asyncio.Task[None] | None = None
        self._has_negotiated = False  # whether either side has mentioned an engine
        self._is_admitted = self._is_stopped = False
        self._wanted = ""  # the engine that the peer has chosen before it was admitted
        self._loop = loop = asyncio.get_running_loop()
        self._offered: asyncio.Future[Offer] = loop.create_future()
        self._proved: asyncio.Future[bytes] = loop.create_future()
        self._writes: dict[int, Move[memoryview]] = {}
        self._numbers: dict[Move[memoryview], int] = {}  # the reverse of `_writes`
        self._begun: set[int] = set()
        self._next_write = 0
        self._after_close: list[Callable[[], object]] | None = None  # while the engine is being closed
        self._interrupted: list[Move[memoryview]] = []  # their writes had not ended when it was closed
        self._held: list[Move[memoryview]] = []  # later moves of blocks whose writes have not ended
        self._progress = 0.0  # when a write last ended, or began while no other was under way
        self._alarm: asyncio.TimerHandle | None = None
        self._has_peer_closed = False  # whether the peer has closed its engine, or uses none
        self._failure = ""  # why the engine has failed while it was used

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
        """Log that the other side has not chosen an engine, if so; called before blocks are moved."""
        if self._choice is not None and not self._has_negotiated:
            self._choice.report(_NOT_CHOSEN)

    def when_closed(self, closed: Callable[[], object]) -> None:
        """Call a function once the engine that `stop` closes no longer accesses memory; possibly at once."""
        if self._after_close is None:
            closed()
        else:
            self._after_close.append(closed)

    def stop(self) -> None:
        """Close the engine at the end of the connection; its moves end once it is closed."""
        self._is_stopped = True
        self._close("")
        self._continue()

    def _close(self, reason: str) -> None:
        """Close the engine, and notify the peer afterwards."""
        self.engine = ""
        if self._negotiating is not None:
            self._negotiating.cancel()
        running, self._running = self._running, None
        reserved, self._reserved = self._reserved, None
        if running is None or reserved is None:
            return
        self._interrupted += self._writes.values()
        self._writes.clear()
        self._numbers.clear()
        self._begun.clear()
        if self._alarm is not None:
            self._alarm.cancel()
        self._after_close = []
        reserved.close()
        running.close(partial(self._closed, reason, reserved))

    def _closed(self, reason: str, reserved: ReservedMemory) -> None:
        reserved.release()
        waiting, self._after_close = self._after_close or [], None
        self._send(Refused(reason))
        self._continue()
        for closed in waiting:
            closed()

    def _continue(self) -> None:
        """Move the blocks whose writes were interrupted, once no engine can write to them any more."""
        if self._after_close is None and (self._has_peer_closed or self._is_stopped):
            interrupted, self._interrupted = self._interrupted, []
            for move in interrupted:
                self._move_again(move)
            self._move_held()

    def _move_held(self) -> None:
        """Begin the held moves again; those of a block with an unfinished write are held again."""
        held, self._held = self._held, []
        for move in held:
            self._move_again(move)

    def _move_again(self, move: Move[memoryview]) -> None:
        if move.is_cancelled:  # while it was interrupted or held, when `cancel` does not end it
            move.ended(False)
        else:
            self._move(move)

    # Blocks that this side writes

    def begin(self, move: Move[memoryview], *, may_write: bool) -> bool:
        """Begin to write bytes with the engine, or hold them for later; return False if they need steps.

        Args:
            move: the bytes.
            may_write: whether the peer already has the segment.
        """
        self.report_if_not_chosen()
        if any(other.area == move.area for other in (*self._writes.values(), *self._interrupted)):
            self._held.append(move)  # earlier bytes could arrive last, including those of a cancelled write
            return True
        is_long = move.length >= LEAST_BYTES
        if not (self.engine and may_write and is_long and len(self._writes) < MAX_WRITES):
            return False
        number = self._next_write
        self._next_write += 1
        self._writes[number], self._numbers[move] = move, number
        self._send(Reserve(number, move.area.segment, move.area.block, move.nbytes))
        return True

    def cancel(self, move: Move[memoryview]) -> bool:
        """Cancel a move, and return whether it uses the engine; a write that has begun ends as usual."""
        number = self._numbers.get(move)
        if number is None:
            return False
        move.is_cancelled = True
        if number not in self._begun:
            self._forget(number)
            self._send(Written(number))
            move.ended(False)
            self._move_held()
        return True

    def _has_key(self, message: Reserved) -> None:
        number, key = message.write, message.key
        if number >= self._next_write or number in self._begun:
            raise ProtocolError("it reserved memory that was not requested")
        move = self._writes.get(number)
        if move is None:
            return  # it was cancelled in the meantime
        if not key or self._running is None:
            self._forget(number)
            self._by_steps(move)
            self._move_held()
            return
        if not self._begun:
            self._progress = self._loop.time()
        self._begun.add(number)
        if self._alarm is None:
            self._alarm = self._loop.call_later(STALLED_S, self._check_progress)
        self._running.write(
            move.source, key, move.start - move.area.block, partial(self._write_ended, number)
        )

    def _write_ended(self, number: int, error: EngineError | None) -> None:
        if error is not None and not isinstance(error, RegistrationError):
            self._refuse(str(error))
            return
        self._progress = self._loop.time()
        move = self._forget(number)
        self._send(Written(number))
        if error is not None and not move.is_cancelled:
            self._report_tensor(str(error))
            self._by_steps(move)
        else:
            move.ended(not move.is_cancelled)
        self._move_held()

    def _check_progress(self) -> None:
        """Stop using the engine if no write has ended for too long."""
        self._alarm = None
        if self._begun:
            limit_s = STALLED_S + sum(self._writes[one].length for one in self._begun) / _LEAST_BYTES_PER_S
            left_s = self._progress + limit_s - self._loop.time()
            if left_s > 0:
                self._alarm = self._loop.call_later(left_s, self._check_progress)
            else:
                self._refuse(f"no write has ended for {limit_s:.0f} s")

    def _forget(self, number: int) -> Move[memoryview]:
        move = self._writes.pop(number)
        del self._numbers[move]
        self._begun.discard(number)
        return move

    # Blocks that the peer writes

    def returned(self, segment: int, ranges: Sequence[Range]) -> None:
        """End the registrations of memory that is returned to the system."""
        if self._reserved is not None:
            self._reserved.returned(segment, ranges)

    def _reserve(self, message: Reserve) -> None:
        landing = self._landings.get(message.segment)
        if landing is None:
            raise ProtocolError(f"it reserved memory in segment {message.segment}, which it never attached")
        if self._reserved is None or not self._proved.done():
            landing.reserve(message.block, message.nbytes, lambda *_: None)  # for the steps that follow
            self._send(Reserved(message.write, b""))
        else:
            self._reserved.reserve(message, landing)

    # Negotiation

    def receive(self, message: DirectMessage) -> None:
        """Process a message of the peer.

        Raises:
            ProtocolError: the message is invalid in this state.
        """
        match message:
            case Reserve():
                self._reserve(message)
            case Reserved():
                self._has_key(message)
            case Written():
                if self._reserved is not None:
                    self._reserved.written(message.write)
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
                        raise ProtocolError("it sent the proof of its engine twice")
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
            self._refuse(_NOT_CHOSEN)
        elif engine != self._choice.name:
            self._refuse(f"one side chose {engine}, but the other side chose {self._choice.name}")
        else:
            self._start(self._choice)

    def _start(self, choice: EngineChoice) -> None:
        if choice.make is None:
            self._refuse(choice.reason)
            return
        if self._is_stopped or self._has_peer_closed:
            return
        self._running = RunningEngine(self._refuse)
        self._reserved = ReservedMemory(
            self._running, self._send, self._report_tensor, self._refuse, self._failed
        )
        self._negotiating = self._loop.create_task(
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
            self._refuse("its test timed out: check whether a firewall blocks it")
        except (EngineError, OSError) as error:
            self._refuse(str(error))
        else:
            self.engine = engine

    async def _prove(self, running: RunningEngine, key: bytes, test: bytearray) -> None:
        """Write test bytes to the peer, and wait until the test bytes of the peer have arrived in `test`."""
        seed = secrets.token_bytes(_SEED_BYTES)
        source = seed * (_TEST_BYTES // _SEED_BYTES)
        written: asyncio.Future[EngineError | None] = self._loop.create_future()

        def ended(error: EngineError | None) -> None:
            if not written.done():
                written.set_result(error)

        running.write(memoryview(source), key, 0, ended)
        if error := await written:
            raise error
        self._send(Proved(seed))
        if await self._proved * (_TEST_BYTES // _SEED_BYTES) != test:
            raise EngineError("the test data of the peer did not arrive")

    def _refuse(self, reason: str) -> None:
        """Stop using the engine, and notify the peer once it is closed."""
        reason = reason[:MAX_REASON]
        if self._running is None:
            self._send(Refused(reason))
        self._do_without(reason)

    def _refused(self, reason: str) -> None:
        """Stop using the engine, because the peer uses none."""
        self._has_peer_closed = self._has_negotiated = True
        self._do_without(self._failure or reason)
        self._continue()

    def _do_without(self, reason: str) -> None:
        if self.engine and not self._has_peer_closed:
            self._failure = reason  # logged when the peer refuses, too: until then, it may have died
        elif self._choice is not None:
            self._choice.report(reason)
        self._close(reason)

    def _report_tensor(self, reason: str) -> None:
        if self._choice is not None:
            self._choice.report(reason, "some large tensors")
