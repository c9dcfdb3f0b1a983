"""The rules of a publisher's application: its calls, in any order."""

import mmap
from dataclasses import asdict
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from aiotensor import AioTensorError, TooLargeError, WouldBlockError
from aiotensor.broadcast import Published, Publisher
from verification.internals import held_by_publisher, worker_of
from verification.model.broadcast_records import Block, Call, Limits, Publication, PublisherSide
from verification.model.broadcast_world import BroadcastWorld
from verification.model.records import Outcome

__all__ = ["PublisherRules", "limits"]

SMALL, BIG, BIGGER = 3, 3_000, 5_000  # elements of int64: in a record, or in shared memory
messages = st.sampled_from([[SMALL], [SMALL], [BIG], [BIGGER], [], [BIG, SMALL], [BIG, BIGGER]])


@st.composite
def limits(draw: st.DrawFn, size: int) -> Limits:
    """Draw the limits of a publisher with a number of subscribers."""
    max_behind = draw(st.integers(1, 3))
    return Limits(
        draw(st.sampled_from(["wait", "drop", "disconnect"])),
        max_behind,
        draw(st.integers(0, max_behind - 1)),
        draw(st.sampled_from([None, None, 68 << 10])),
        draw(st.sampled_from([None, None, size, max(1, size - 1)])),
        draw(st.sampled_from([None, None, 1.0])),
        draw(st.sampled_from([128 << 10, 256 << 10])),
    )


def whole_pages(nbytes: int) -> int:
    """Return the bytes of the block of a tensor."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class PublisherRules(BroadcastWorld):
    """Rules that call a publisher."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[tuple[PublisherSide, Block]] = []

    def open_the_publisher(self, limits: Limits) -> None:
        publisher = Publisher(self.place, **asdict(limits))
        side = PublisherSide(len(self.publishers), publisher, limits)
        opening = self.steps.start(publisher.__aenter__())
        while not opening.done():
            self.turn()
        opening.result()
        self.publishers.append(side)
        for one in self.living:
            one.opened_after = 0
        self.note_the_limit()
        self.steps.watch(worker_of(publisher))

    @precondition(lambda self: self.publisher is None and not self.calls_of_closing())
    @rule(data=st.data())
    def open_publisher(self, data: st.DataObject) -> None:
        if not any(self.of(side, "close") for side in self.publishers):  # else it still listens there
            self.open_the_publisher(data.draw(limits(self.size)))

    # Messages

    def _new(self, side: PublisherSide, tensors: list[torch.Tensor], owned: Block | None) -> Publication:
        self.seeds += 1
        blocks = [Block(whole_pages(one.nbytes)) for one in tensors if one.numel() > SMALL]
        copies: list[Block] = []
        if owned is not None:
            copies = blocks if owned.was_published else []
            blocks = [] if owned.was_published else [owned]
        kept = [one.clone() for one in tensors]
        publication = Publication(side, self.seeds, kept, blocks, copies, self.tick())
        self.by_seed[publication.seed] = publication
        return publication

    def _publish(self, tensors: list[torch.Tensor], owned: Block | None = None) -> None:
        side = self.publisher
        assert side is not None
        publication = self._new(side, tensors, owned)

        def finish(call: Call, outcome: Outcome) -> None:
            if outcome.value is not None:
                earlier = [one for one in self.of(side, "publish") if one.began < call.began]
                assert not earlier, f"{call} overtook {earlier}"
                self.was_published(publication, outcome.value)
            elif outcome.error is not None:
                self.check_not_published(call, outcome.error)

        nbytes = sum(block.nbytes for block in [*publication.blocks, *publication.copies])
        publishing = side.publisher.publish([publication.seed, *tensors])
        self.call("publish", side, publishing, finish, publication=publication, nbytes=nbytes)

    @precondition(lambda self: self.publisher)
    @rule(counts=messages)
    def publish(self, counts: list[int]) -> None:
        self._publish([self.values(count) for count in counts])

    @precondition(lambda self: self.publisher)
    @rule(counts=messages)
    def publish_nowait(self, counts: list[int]) -> None:
        self.publish_now(counts)

    @precondition(lambda self: self.publisher)
    @rule(bursts=st.lists(messages, min_size=2, max_size=5), times=st.integers(0, 2))
    def publish_a_burst(self, bursts: list[list[int]], times: int) -> None:
        for counts in bursts:
            self.publish_now(counts)
            self.turn(times)

    def publish_now(self, counts: list[int]) -> Published | AioTensorError:
        """Publish without a wait, and check that it would block only if it may."""
        side = self.publisher
        assert side is not None
        tensors = [self.values(count) for count in counts]
        publication = self._new(side, tensors, None)
        nbytes = sum(block.nbytes for block in publication.blocks)
        before, is_waiting = side.publisher.statistics(), bool(self.of(side, "publish", "allocate"))
        is_full = side.limits.slow == "wait" and before.behind >= side.limits.max_behind
        turns = held_by_publisher(side.publisher)["turns"]
        try:
            with self.steps.inside():
                published = side.publisher.publish_nowait([publication.seed, *tensors])
        except TooLargeError as error:
            held = side.limits.max_held_bytes
            if held is None or nbytes <= held:
                raise AssertionError("it is not too large") from error
            return error.with_traceback(None)
        except WouldBlockError as error:
            now = side.publisher.statistics()
            is_short = not now.history and now.largest_free_bytes < nbytes
            if not (is_full or is_waiting or is_short):
                raise AssertionError(f"it need not wait: {now}") from error
            return error.with_traceback(None)
        assert not is_full, "it published to a full subscriber"
        assert not turns, "it overtook a call that waits"
        self.was_published(publication, published)
        return published

    # Memory of the application

    @precondition(lambda self: self.publisher)
    @rule(count=st.sampled_from([BIG, BIGGER]))
    def allocate(self, count: int) -> None:
        side = self.publisher
        assert side is not None

        def finish(call: Call, outcome: Outcome) -> None:
            if outcome.value is not None:
                outcome.value.copy_(self.values(count))
                side.has_allocated = True
                self.allocated.append((side, Block(whole_pages(8 * count), outcome.value)))
            elif outcome.error is not None:
                self.check_not_published(call, outcome.error)

        allocating = side.publisher.allocate((count,), torch.int64)
        self.call("allocate", side, allocating, finish, nbytes=whole_pages(8 * count))

    def allocated_here(self) -> list[Block]:
        """Return the blocks of the present publisher whose tensors the application has."""
        return [block for side, block in self.allocated if side is self.publisher]

    @precondition(lambda self: self.allocated_here())
    @rule(data=st.data())
    def publish_allocated(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.allocated_here()))
        assert block.owner is not None
        in_flight = [call.publication for call in self.calls if call.publication is not None]
        block.was_published |= any(block in one.blocks for one in in_flight)
        self._publish([block.owner], block)

    @precondition(lambda self: self.allocated)
    @rule(data=st.data())
    def free_allocated(self, data: st.DataObject) -> None:
        side, block = data.draw(st.sampled_from(self.allocated))
        self.allocated.remove((side, block))
        block.owner = None

    # Other calls

    @precondition(
        lambda self: self.publisher and not self.of(self.publisher, "drain", "wait for subscribers")
    )
    @rule(data=st.data())
    def drain_or_wait_for_subscribers(self, data: st.DataObject) -> None:
        side = self.publisher
        assert side is not None
        count = data.draw(st.integers(0, side.limits.max_subscribers or self.size))
        if count:
            self._wait("wait for subscribers", lambda publisher: publisher.wait_for_subscribers(count))
        else:
            self._wait("drain", Publisher.drain)

    def _wait(self, what: str, begin: Any) -> None:
        side = self.publisher
        assert side is not None

        def finish(call: Call, outcome: Outcome) -> None:
            if outcome.error is not None:
                self.check_not_published(call, outcome.error)

        self.call(what, side, begin(side.publisher), finish)

    @precondition(lambda self: self.publisher)
    @rule()
    def close_publisher(self) -> None:
        side = self.publisher
        assert side is not None
        for one in self.living:
            self.lose(one)
        side.is_closed = True
        self.call("close", side, side.publisher.aclose(), must_succeed)


def must_succeed(call: Call, outcome: Outcome) -> None:
    """Check a call that must not fail."""
    assert outcome.error is None, f"{call} failed: {outcome.error}"
