"""What waits for room leaves in order, once, and whoever waits for it hears what became of it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiotensor import WouldBlockError
from aiotensor.channel.outbox import Outbox, Parts, flush_all
from aiotensor.protocol.window import Window
from aiotensor.runtime.waiting import at_most

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Road:
    """A way to a peer that has room for so many messages."""

    def __init__(self, room: int = 0) -> None:
        self.room = room
        self.went: list[bytes] = []
        self.after: Callable[[], object] = lambda: None

    def send(self, parts: Parts, is_retry: bool) -> bool:
        if not self.room:
            return False
        self.room -= 1
        self.went.append(bytes(parts[0]))
        self.after()
        return True


def text(number: int) -> bytes:
    return b"%d" % number


Step = st.one_of(
    st.tuples(st.just("post"), st.just(0)),
    st.tuples(st.just("put"), st.just(0)),
    st.tuples(st.just("room"), st.integers(1, 3)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("clear"), st.just(0)),
)


@given(steps=st.lists(Step, max_size=30))
def test_whatever_happens_each_message_leaves_at_most_once_and_in_order(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        road = Road()
        outbox = Outbox(road.send)
        noted: list[int] = []
        putting: dict[int, asyncio.Task[bool]] = {}
        for number, (step, amount) in enumerate(steps):
            if step == "post":
                outbox.post([text(number)])
            elif step == "put":
                putting[number] = asyncio.create_task(
                    outbox.put([text(number)], on_sent=partial(noted.append, number))
                )
            elif step == "room":
                road.room += amount
                outbox.flush(is_retry=True)
            elif step == "cancel" and amount in putting:
                putting[amount].cancel()
            elif step == "clear":
                outbox.clear()
            await asyncio.sleep(0)
        outbox.clear()
        ends = dict(
            zip(putting, await asyncio.gather(*putting.values(), return_exceptions=True), strict=True)
        )
        went = [int(one) for one in road.went]
        assert went == sorted(set(went))
        assert noted == [number for number in went if number in putting]
        for number, end in ends.items():
            # One that had left may still be cancelled before it hears of that.
            assert (end is True) == (number in went) or isinstance(end, asyncio.CancelledError)
        assert not outbox

    asyncio.run(run())


async def test_nothing_overtakes_what_waits() -> None:
    road = Road()
    outbox = Outbox(road.send)
    outbox.post([b"first"])
    road.room = 5
    outbox.post([b"second"])
    assert road.went == []
    outbox.flush(is_retry=False)
    assert road.went == [b"first", b"second"]


async def test_a_cancelled_message_is_taken_back_and_holds_up_none_behind_it() -> None:
    road = Road()
    outbox = Outbox(road.send)
    first = asyncio.create_task(outbox.put([b"first"]))
    second = asyncio.create_task(outbox.put([b"second"]))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    road.room = 5
    assert outbox.flush(is_retry=True)
    assert await second
    assert road.went == [b"second"]


async def test_a_peer_that_is_found_gone_while_sending_ends_all_that_waits_and_nothing_twice() -> None:
    road = Road()
    outbox = Outbox(road.send)
    noted: list[str] = []
    putting = [
        asyncio.create_task(outbox.put([name.encode()], on_sent=partial(noted.append, name)))
        for name in ("first", "second")
    ]
    await asyncio.sleep(0)
    road.room, road.after = 5, outbox.clear
    outbox.flush(is_retry=True)
    assert await asyncio.gather(*putting) == [False, False]
    assert (noted, len(outbox)) == ([], 0)


async def test_a_closed_window_holds_back_what_the_road_has_room_for() -> None:
    road = Road(room=5)
    window = Window(1, 100)
    outbox = Outbox(road.send, window)
    assert await outbox.put([b"first"], 10)
    second = asyncio.create_task(outbox.put([b"second"], 10))
    await asyncio.sleep(0)
    assert road.went == [b"first"]
    window.taken(1, 10)
    outbox.flush(is_retry=False)
    assert await second


async def test_flushing_goes_on_until_two_rounds_in_a_row_move_nothing() -> None:
    one, other = Road(), Road()
    outboxes = [Outbox(one.send), Outbox(other.send)]
    for outbox in outboxes:
        outbox.post([b"letter"])

    def room_elsewhere() -> None:
        other.room += 1

    # Trying one peer may take in the word of another's room, after that one was tried.
    one.room, one.after = 1, room_elsewhere
    flush_all(lambda: [outbox for outbox in reversed(outboxes) if outbox])
    assert (one.went, other.went) == ([b"letter"], [b"letter"])


async def test_nobody_waits_in_an_outbox_that_is_over_and_what_is_posted_still_goes() -> None:
    road = Road()
    outbox = Outbox(road.send)
    waiting = asyncio.create_task(outbox.put([b"nobody's"]))
    await asyncio.sleep(0)
    outbox.post([b"posted"])
    outbox.end()
    outbox.post([b"farewell"])
    assert not await waiting
    assert not await outbox.put([b"too late"])
    road.room = 5
    outbox.flush(is_retry=True)
    assert road.went == [b"posted", b"farewell"]


async def test_a_peer_that_is_found_gone_by_the_first_try_is_not_waited_for() -> None:
    outbox: Outbox

    def find(parts: Parts, is_retry: bool) -> bool:
        outbox.end()
        return False

    outbox = Outbox(find)
    assert not await outbox.put([b"nobody's"])


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_message_that_cannot_be_sent_fails_alone(is_cancelled: bool) -> None:
    road = Road()
    outbox = Outbox(road.send)
    putting = [asyncio.create_task(outbox.put([name])) for name in (b"first", b"second")]
    await asyncio.sleep(0)

    def refuse_the_first() -> None:
        if road.went[-1] == b"first":
            raise OSError("no thread for it")

    road.room, road.after = 5, refuse_the_first
    if is_cancelled:  # in this very turn
        putting[0].cancel()
    outbox.flush(is_retry=True)
    first, second = await asyncio.gather(*putting, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError if is_cancelled else OSError)
    assert second is True


async def test_a_message_that_leaves_in_the_turn_in_which_its_wait_is_overdue_has_left() -> None:
    has_room = False
    outbox = Outbox(
        lambda parts, is_retry: has_room, patience=lambda: at_most(0.02, lambda: WouldBlockError("too long"))
    )
    putting = asyncio.create_task(outbox.put([b"x"]))
    while not outbox:
        await asyncio.sleep(0)
    threading.Event().wait(0.05)  # the loop is held up until the wait is overdue
    has_room = True
    outbox.flush(is_retry=True)
    assert await putting


@asynccontextmanager
async def overdue_when_cancelled() -> AsyncIterator[None]:
    """End a wait as a timer does, which cancels the task; this one at the very moment that a test wants."""
    try:
        yield
    except asyncio.CancelledError:
        raise WouldBlockError("too long") from None


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_message_leaves_exactly_if_that_is_said_though_room_comes_as_its_wait_is_overdue(
    is_first: bool,
) -> None:
    road = Road()
    outbox = Outbox(road.send, patience=overdue_when_cancelled)
    noted: list[str] = []
    putting = asyncio.create_task(outbox.put([b"first"], on_sent=partial(noted.append, "first")))
    behind = asyncio.create_task(outbox.put([b"behind"], on_sent=partial(noted.append, "behind")))
    await asyncio.sleep(0)
    road.room = 5
    events: list[Callable[[], object]] = [partial(outbox.flush, is_retry=True), putting.cancel]
    for happen in events if is_first else reversed(events):  # in one turn
        happen()
    if is_first:
        assert await putting
    else:
        with pytest.raises(WouldBlockError, match="too long"):
            await putting
    assert await behind
    assert noted == (["first", "behind"] if is_first else ["behind"])
    assert road.went == [name.encode() for name in noted]


async def test_a_message_whose_wait_is_overdue_never_leaves() -> None:
    outbox = Outbox(
        lambda parts, is_retry: False, patience=lambda: at_most(0.01, lambda: WouldBlockError("too long"))
    )
    with pytest.raises(WouldBlockError, match="too long"):
        await outbox.put([b"x"])
    assert not outbox
