"""The publications of each subscriber: the policies for slow ones, the memory they use, and their answers."""

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiotensor.errors import ProtocolError
from aiotensor.protocol.audience import Audience, Backlog, Item
from aiotensor.protocol.frames import encode
from tests.frames import publish
from tests.selection import COMPLETE

SIZES = {block: 10 * (block + 1) for block in range(7)}


def item(number: int, *blocks: int) -> Item:
    """Return a publication with tensors in some blocks."""
    record = encode(publish(number))
    return Item(number, record, blocks=tuple((block, SIZES[block]) for block in blocks))


def backlog(max_behind: int = 3, max_held_bytes: int | None = None, *items: Item) -> Backlog:
    made = Backlog(max_behind, max_held_bytes)
    for one in items:
        made.add(one)
    return made


def announced(of: Backlog) -> list[int]:
    """Announce as many publications as the limits allow, and return their numbers."""
    return [one.number for one in iter(of.next, None)]


class Model:
    """One subscriber as lists of its pending and announced publications, in order."""

    def __init__(self, max_behind: int) -> None:
        self.limit = max_behind
        self.waiting: list[Item] = []
        self.open: list[Item] = []
        self.withdrawn: list[Item] = []
        self.in_use: list[int] = []

    def announce(self) -> list[int]:
        found = []
        while self.waiting and len(self.open) + len(self.withdrawn) < self.limit:
            self.open.append(self.waiting.pop(0))
            found.append(self.open[-1].number)
        return found

    def drop(self) -> tuple[int, bool]:
        if self.open:
            self.withdrawn.append(self.open.pop(0))
            return self.withdrawn[-1].number, True
        return self.waiting.pop(0).number, False

    def held(self) -> list[int]:
        return sorted(
            [*self.in_use, *(block for one in self.open + self.withdrawn for block, _ in one.blocks)]
        )


ACTIONS = st.one_of(
    st.tuples(st.just("publish"), st.lists(st.sampled_from(sorted(SIZES)), max_size=3)),
    st.tuples(st.sampled_from(["take", "discard", "release"]), st.integers(0, 100)),
)


@pytest.mark.promise(33)
@settings(max_examples=500 if COMPLETE else 60)
@given(max_behind=st.integers(1, 4), actions=st.lists(ACTIONS, max_size=60))
def test_any_sequence_agrees_with_the_model(max_behind: int, actions: list[tuple[str, object]]) -> None:
    audience: Audience[str] = Audience("drop", max_behind, None)
    real, model = audience.join("it"), Model(max_behind)
    number, dropped, delivered = 0, 0, 0
    for action, value in actions:
        answerable = model.open + model.withdrawn
        match action, value:
            case "publish", list(blocks):
                expected = model.drop() if len(model.open) + len(model.waiting) >= max_behind else None
                lost = audience.publish(item(number, *blocks))
                assert [(one.item.number, one.is_withdrawn) for _, one in lost] == [expected][
                    : expected is not None
                ]
                dropped += expected is not None
                model.waiting.append(item(number, *blocks))
                number += 1
            case "take", int(choice) if answerable:
                one = answerable[choice % len(answerable)]
                real.taken(one.number)
                dropped -= one in model.withdrawn
                (model.open if one in model.open else model.withdrawn).remove(one)
                model.in_use += [block for block, _ in one.blocks]
                delivered += 1
            case "discard", int(choice) if answerable:
                one = answerable[choice % len(answerable)]
                assert real.discarded(one.number) == one
                (model.open if one in model.open else model.withdrawn).remove(one)
            case "release", int(choice) if model.in_use:
                block = model.in_use.pop(choice % len(model.in_use))
                real.released(block)
        assert announced(real) == model.announce()
        assert real.behind == len(model.open) + len(model.waiting) <= max_behind
        assert real.unanswered == len(model.open) + len(model.withdrawn) <= max_behind
        assert sorted(real.pins()) == model.held()
        assert real.held_bytes == sum(SIZES[block] for block in set(model.held()))
        assert (real.dropped, real.delivered) == (dropped, delivered)
        oldest = (model.open + model.waiting)[:1]
        assert real.oldest == (oldest[0] if oldest else None)


WRONG: dict[str, tuple[str, Callable[[Backlog], object]]] = {
    "taking one that was not announced": ("answered publication 2", lambda one: one.taken(2)),
    "taking one twice": ("answered publication 0", lambda one: one.taken(0)),
    "discarding one that was not announced": ("answered publication 9", lambda one: one.discarded(9)),
    "discarding one that was taken": ("answered publication 0", lambda one: one.discarded(0)),
    "releasing a block before its publication is taken": ("released block 1 ", lambda one: one.released(1)),
    "releasing a block twice": ("released block 0 ", lambda one: deque(map(one.released, (0, 0)))),
    "releasing an unknown block": ("released block 6 ", lambda one: one.released(6)),
}


@pytest.mark.promise(25)
@pytest.mark.parametrize(("reason", "answer"), WRONG.values(), ids=WRONG)
def test_a_wrong_answer_to_a_publication_is_a_violation(
    reason: str, answer: Callable[[Backlog], object]
) -> None:
    one = backlog(2, None, item(0, 0), item(1, 1), item(2, 2))
    assert announced(one) == [0, 1]
    one.taken(0)
    with pytest.raises(ProtocolError, match=reason):
        answer(one)
