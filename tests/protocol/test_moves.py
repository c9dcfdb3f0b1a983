"""Moves of blocks between machines: in turn, within the window, and every byte once."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiotensor.errors import ProtocolError
from aiotensor.protocol.network import (
    BATCH,
    STEP_BYTES,
    WINDOW_BYTES,
    Area,
    Move,
    OutgoingMoves,
    ReceivedBytes,
    RecordWindow,
    Step,
    encode_batch,
    read_ack,
    read_batch,
)
from tests.selection import COMPLETE

_LENGTHS = st.one_of(
    st.integers(1, STEP_BYTES), st.integers(STEP_BYTES + 1, 4 * STEP_BYTES), st.just(3 * STEP_BYTES)
)


class MovesMachine(RuleBasedStateMachine):
    """Both ends of a connection, the steps that are under way, and the acknowledgements on their way back."""

    @initialize()
    def begin(self) -> None:
        self.moves: OutgoingMoves[int] = OutgoingMoves()
        self.received = ReceivedBytes()
        self.active: dict[int, Move[int]] = {}
        self.ended: dict[int, bool] = {}
        self.cancelled: set[int] = set()
        self.there: deque[Step] = deque()
        self.back: deque[int] = deque()
        self.arrived: dict[int, int] = {}
        self.sent = self.landed = self.acknowledged = 0

    @rule(length=_LENGTHS)
    def move(self, length: int) -> None:
        number = len(self.active) + len(self.ended)
        move = Move(Area(number, 0), length, 0, number, length, lambda ok: self.ended.__setitem__(number, ok))
        self.active[number] = move
        self.moves.begin(move)

    @rule()
    def send(self) -> None:
        while (found := self.moves.next_step()) is not None:
            move, step = found
            assert step.area.segment == move.source
            assert move.source not in self.cancelled
            self.there.append(step)
            self.sent += step.length
            if move.is_copied:
                self._end(move, True)

    @precondition(lambda self: self.there)
    @rule()
    def arrive(self) -> None:
        step = self.there.popleft()
        assert step.start == self.arrived.get(step.area.segment, 0)  # in order, without a gap
        self.arrived[step.area.segment] = step.start + step.length
        self.landed += step.length
        if self.received.step(step):
            self.back.append(read_ack(self.received.ack()).steps)

    @precondition(lambda self: self.back)
    @rule()
    def acknowledge(self) -> None:
        self.acknowledged = self.back.popleft()
        for move in self.moves.acknowledged(self.acknowledged):
            self._end(move, not move.is_cancelled)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.active)))
        move = self.active[number]
        self.cancelled.add(number)
        if self.moves.cancel(move):
            self._end(move, False)

    def _end(self, move: Move[int], is_complete: bool) -> None:
        del self.active[move.source]
        move.ended(is_complete)
        if is_complete and not move.is_copied:
            assert self.arrived[move.source] == move.length

    @invariant()
    def at_most_a_window_is_under_way(self) -> None:
        assert self.sent - self.landed <= WINDOW_BYTES

    def teardown(self) -> None:
        for _ in range(10_000):
            self.send()
            if self.there:
                self.arrive()
            elif self.back:
                self.acknowledge()
            else:
                break
        assert not self.active  # every move ends: no acknowledgement is missing
        assert not self.moves.clear()
        for number, is_complete in self.ended.items():
            assert is_complete or number in self.cancelled


TestMoves = pytest.mark.promise(38)(MovesMachine.TestCase)
TestMoves.settings = settings(max_examples=150 if COMPLETE else 25, stateful_step_count=60)


def _move(number: int, length: int) -> Move[int]:
    return Move(Area(number, 0), length, 0, number, length, lambda is_complete: None)


def test_the_steps_of_several_moves_take_turns() -> None:
    moves: OutgoingMoves[int] = OutgoingMoves()
    for number in range(2):
        moves.begin(_move(number, 2 * STEP_BYTES))
    turns = [found[1].area.segment for _ in range(4) if (found := moves.next_step()) is not None]
    assert turns == [0, 1, 0, 1]


def test_an_acknowledgement_of_other_bytes_than_those_sent_is_a_violation() -> None:
    moves: OutgoingMoves[int] = OutgoingMoves()
    moves.begin(_move(0, 2 * STEP_BYTES))
    while moves.next_step() is not None:
        pass
    moves.acknowledged(STEP_BYTES)
    for total in (STEP_BYTES - 1, STEP_BYTES * 3):
        with pytest.raises(ProtocolError, match="acknowledged"):
            moves.acknowledged(total)


def test_steps_beyond_the_window_are_a_violation() -> None:
    received = ReceivedBytes()
    step = Step(Area(0, 0), WINDOW_BYTES * 2, 0, STEP_BYTES, False)
    for _ in range(WINDOW_BYTES // STEP_BYTES):
        received.step(step)
    with pytest.raises(ProtocolError, match="without credit"):
        received.step(step)


@given(st.lists(st.integers(0, 64 << 10), max_size=200))
def test_acknowledged_records_return_their_credit(sizes: list[int]) -> None:
    window, received = RecordWindow(), ReceivedBytes()
    under_way: deque[int] = deque()
    for size in sizes:
        while not window.has_credit(size):
            if received.record(under_way.popleft()):
                window.acknowledged(read_ack(received.ack()).records)
        window.sent(size)
        under_way.append(size)


def test_records_without_credit_are_a_violation() -> None:
    received = ReceivedBytes()
    with pytest.raises(ProtocolError, match="without credit"):
        for _ in range(5):
            received.record(64 << 10)
    window = RecordWindow()
    window.sent(10)
    with pytest.raises(ProtocolError, match="acknowledged"):
        window.acknowledged(1000)


@given(messages=st.lists(st.binary(max_size=20).filter(lambda one: one[:1] != bytes([BATCH]))))
def test_the_messages_of_a_batch_are_read_in_order(messages: list[bytes]) -> None:
    assert read_batch(memoryview(encode_batch(messages))) == messages
