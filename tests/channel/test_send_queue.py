"""Queued messages are sent in order, once, and each waiting call learns whether its message was sent."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiotensor import WouldBlockError
from aiotensor.channel.send_queue import SendQueue
from aiotensor.protocol.parts import Parts
from tests.selection import COMPLETE

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Peer:
    """A peer that accepts a limited number of messages."""

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.sent: list[bytes] = []
        self.after: Callable[[], object] = lambda: None

    def send(self, parts: Parts, is_retry: bool) -> bool:
        if not self.capacity:
            return False
        self.capacity -= 1
        self.sent.append(bytes(parts[0]))
        self.after()
        return True


def text(number: int) -> bytes:
    return b"%d" % number


Step = st.one_of(
    st.tuples(st.just("post"), st.just(0)),
    st.tuples(st.just("put"), st.just(0)),
    st.tuples(st.just("capacity"), st.integers(1, 3)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("clear"), st.just(0)),
)


@settings(max_examples=500 if COMPLETE else 60)
@given(steps=st.lists(Step, max_size=30))
def test_each_message_is_sent_at_most_once_and_in_order(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        peer = Peer()
        queue = SendQueue(peer.send)
        noted: list[int] = []
        putting: dict[int, asyncio.Task[bool]] = {}
        for number, (step, amount) in enumerate(steps):
            if step == "post":
                queue.post([text(number)])
            elif step == "put":
                putting[number] = asyncio.create_task(
                    queue.put([text(number)], on_sent=partial(noted.append, number))
                )
            elif step == "capacity":
                peer.capacity += amount
                queue.flush(is_retry=True)
            elif step == "cancel" and amount in putting:
                putting[amount].cancel()
            elif step == "clear":
                queue.clear()
            await asyncio.sleep(0)
        queue.clear()
        ends = dict(
            zip(putting, await asyncio.gather(*putting.values(), return_exceptions=True), strict=True)
        )
        sent = [int(one) for one in peer.sent]
        assert sent == sorted(set(sent))
        assert noted == [number for number in sent if number in putting]
        for number, end in ends.items():
            # A call may be cancelled after its message was sent, before it continues.
            assert (end is True) == (number in sent) or isinstance(end, asyncio.CancelledError)
        assert not queue

    asyncio.run(run())


async def test_a_peer_that_disconnects_during_a_flush_ends_every_wait_once() -> None:
    peer = Peer()
    queue = SendQueue(peer.send)
    noted: list[str] = []
    putting = [
        asyncio.create_task(queue.put([name.encode()], on_sent=partial(noted.append, name)))
        for name in ("first", "second")
    ]
    await asyncio.sleep(0)
    peer.capacity, peer.after = 5, queue.clear
    queue.flush(is_retry=True)
    assert await asyncio.gather(*putting) == [False, False]
    assert (noted, len(queue)) == ([], 0)


async def test_a_closed_queue_ends_the_waits_and_still_sends_posted_messages() -> None:
    peer = Peer()
    queue = SendQueue(peer.send)
    waiting = asyncio.create_task(queue.put([b"unsent"]))
    await asyncio.sleep(0)
    queue.post([b"posted"])
    queue.close()
    queue.post([b"close"])
    assert not await waiting
    assert not await queue.put([b"too late"])
    peer.capacity = 5
    queue.flush(is_retry=True)
    assert peer.sent == [b"posted", b"close"]


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_message_that_cannot_be_sent_fails_alone(is_cancelled: bool) -> None:
    peer = Peer()
    queue = SendQueue(peer.send)
    putting = [asyncio.create_task(queue.put([name])) for name in (b"first", b"second")]
    await asyncio.sleep(0)

    def refuse_the_first() -> None:
        if peer.sent[-1] == b"first":
            raise OSError("no thread for it")

    peer.capacity, peer.after = 5, refuse_the_first
    if is_cancelled:  # in this very turn
        putting[0].cancel()
    queue.flush(is_retry=True)
    first, second = await asyncio.gather(*putting, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError if is_cancelled else OSError)
    assert second is True


@asynccontextmanager
async def timed_out_when_cancelled() -> AsyncIterator[None]:
    """End a wait as a timer does, which cancels the task; this one at the very moment that a test wants."""
    try:
        yield
    except asyncio.CancelledError:
        raise WouldBlockError("too long") from None


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_message_is_sent_exactly_if_reported_when_capacity_and_timeout_coincide(
    is_first: bool,
) -> None:
    peer = Peer()
    queue = SendQueue(peer.send, wait_limit=timed_out_when_cancelled)
    noted: list[str] = []
    putting = asyncio.create_task(queue.put([b"first"], on_sent=partial(noted.append, "first")))
    behind = asyncio.create_task(queue.put([b"behind"], on_sent=partial(noted.append, "behind")))
    await asyncio.sleep(0)
    peer.capacity = 5
    events: list[Callable[[], object]] = [partial(queue.flush, is_retry=True), putting.cancel]
    for happen in events if is_first else reversed(events):  # in one turn
        happen()
    if is_first:
        assert await putting
    else:
        with pytest.raises(WouldBlockError, match="too long"):
            await putting
    assert await behind
    assert noted == (["first", "behind"] if is_first else ["behind"])
    assert peer.sent == [name.encode() for name in noted]
