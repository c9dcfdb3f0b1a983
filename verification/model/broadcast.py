"""The rules of a publisher and its subscribers, and the comparison when nothing is in transit."""

from dataclasses import asdict

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from aiotensor import AioTensorError, PeerLostError, TooLargeError, WouldBlockError
from aiotensor.broadcast import Published, Publisher, Subscriber
from verification.internals import cut, has_ended, held_by_publisher, session_of_subscriber, worker_of
from verification.model.broadcast_world import (
    SMALL,
    BroadcastWorld,
    Limits,
    Publication,
    PublisherSide,
    SubscriberSide,
    View,
    bytes_of,
)
from verification.model.records import Block, Call, Outcome
from verification.model.stage import QUIET_TURNS, one_of

_BIG, _BIGGER = 3_000, 5_000  # elements of int64: in shared memory
_messages = st.sampled_from([[SMALL], [SMALL], [_BIG], [_BIGGER], [], [_BIG, SMALL], [_BIG, _BIGGER]])
_subscribers = one_of(lambda self: self.living)


@st.composite
def _limits(draw: st.DrawFn) -> Limits:
    """Draw the limits of a publisher."""
    max_behind = draw(st.integers(1, 3))
    return Limits(
        draw(st.sampled_from(["wait", "drop", "disconnect"])),
        max_behind,
        draw(st.integers(0, max_behind - 1)),
        draw(st.sampled_from([None, None, 68 << 10])),
        draw(st.sampled_from([None, None, 1.0])),
        draw(st.sampled_from([128 << 10, 256 << 10])),
    )


class WholeBroadcast(BroadcastWorld):
    """Call a publisher and subscribers in any order, and compare all sides with the model."""

    @initialize(limits=_limits(), subscribers=st.integers(0, 8))
    def begin(self, limits: Limits, subscribers: int) -> None:
        self._open_publisher(limits)
        for _ in range(min(subscribers, self.size)):
            self.open_subscriber()

    # The publisher

    def _open_publisher(self, limits: Limits) -> None:
        publisher = Publisher(self.place, **asdict(limits))
        opening = self.steps.start(publisher.__aenter__())
        while not opening.done():
            self.turn()
        opening.result()
        self.publishers.append(PublisherSide(len(self.publishers), publisher, limits))
        for one in self.living:
            one.opened_after = 0
        self.steps.watch(worker_of(publisher))

    @precondition(lambda self: self.publisher is None)
    @rule(limits=_limits())
    def open_publisher(self, limits: Limits) -> None:
        if not any(self.of(side, "close") for side in self.publishers):  # else it still listens there
            self._open_publisher(limits)

    @property
    def open_side(self) -> PublisherSide:
        """The publisher, in rules that need one."""
        assert self.publisher is not None
        return self.publisher

    def _new(self, tensors: list[torch.Tensor]) -> Publication:
        self.seeds += 1
        publication = Publication(self.open_side, self.seeds, [one.clone() for one in tensors])
        self.by_seed[publication.seed] = publication
        return publication

    def _publish(self, tensors: list[torch.Tensor]) -> None:
        side, publication = self.open_side, self._new(tensors)

        def finish(call: Call, outcome: Outcome) -> None:
            if outcome.value is not None:
                earlier = [one for one in self.of(side, "publish") if one.began < call.began]
                assert not earlier, f"{call} overtook {earlier}"
                self.was_published(publication, outcome.value)

        publishing = side.publisher.publish([publication.seed, *tensors])
        self.call("publish", side, publishing, finish, nbytes=bytes_of(one.numel() for one in tensors))

    @precondition(lambda self: self.publisher)
    @rule(counts=_messages)
    def publish(self, counts: list[int]) -> None:
        self._publish([self.values(count) for count in counts])

    @precondition(lambda self: self.publisher)
    @rule(bursts=st.lists(_messages, min_size=1, max_size=5), times=st.integers(0, 2))
    def publish_a_burst(self, bursts: list[list[int]], times: int) -> None:
        for counts in bursts:
            self._publish_now(counts)
            self.turn(times)

    def _publish_now(self, counts: list[int]) -> Published | AioTensorError:
        """Publish without a wait, and check that it would block only if it may."""
        side = self.open_side
        tensors = [self.values(count) for count in counts]
        publication, nbytes = self._new(tensors), bytes_of(counts)
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

    @precondition(lambda self: self.publisher)
    @rule(counts=_messages)
    def publish_when_all_is_known(self, counts: list[int]) -> None:
        """Publish without a wait when the model knows which subscribers get it, and which lose another."""
        self.settle()
        side = self.open_side
        before = side.publisher.statistics()
        full = sum(lag.behind == side.limits.max_behind for lag in before.lags)
        published = self._publish_now(counts)
        if not isinstance(published, AioTensorError):
            lost = full if side.limits.slow == "disconnect" else 0
            assert published.delivered == before.subscribers - lost, (published, before)
            assert published.dropped == (full if side.limits.slow == "drop" else 0), (published, before)

    @precondition(lambda self: self.publisher)
    @rule(count=st.sampled_from([_BIG, _BIGGER]))
    def allocate(self, count: int) -> None:
        side = self.open_side

        def finish(call: Call, outcome: Outcome) -> None:
            if outcome.value is not None:
                side.has_allocated = True
                self.allocated.append(Block(side, 8 * count, outcome.value.copy_(self.values(count))))

        allocating = side.publisher.allocate((count,), torch.int64)
        self.call("allocate", side, allocating, finish, nbytes=bytes_of([count]))

    def blocks(self) -> list[Block]:
        """Return the blocks of the publisher that is open."""
        return [block for block in self.allocated if block.side is self.publisher]

    @precondition(lambda self: self.blocks())
    @rule(block=one_of(lambda self: self.blocks()))
    def publish_allocated(self, block: Block) -> None:
        assert block.owner is not None
        self._publish([block.owner])

    @precondition(lambda self: self.publisher and not self.of(self.publisher, "drain", "wait"))
    @rule(count=st.integers(0, 8))
    def drain_or_wait_for_subscribers(self, count: int) -> None:
        side = self.open_side
        if count:
            self.call("wait", side, side.publisher.wait_for_subscribers(min(count, self.size)))
        else:
            self.call("drain", side, side.publisher.drain())

    @precondition(lambda self: self.publisher)
    @rule()
    def close_publisher(self) -> None:
        side = self.open_side
        for one in self.living:
            self.lose(one)
        side.is_closed = True
        self.call("close", side, side.publisher.aclose())

    # The subscribers

    @precondition(lambda self: len(self.living) < self.size and len(self.subscribers) < 3 * self.size)
    @rule()
    def open_subscriber(self) -> None:
        subscriber = Subscriber[object](self.place)
        side = SubscriberSide(len(self.subscribers), subscriber)
        if self.publisher is not None:
            side.opened_after = len(self.publisher.published)
        self.subscribers.append(side)
        opening = self.steps.start(subscriber.__aenter__())
        self.turn()
        opening.result()  # opening never waits
        self.steps.watch(worker_of(subscriber))

    @precondition(lambda self: self.living)
    @rule(side=_subscribers, iterates=st.booleans())
    def receive(self, side: SubscriberSide, iterates: bool) -> None:
        def finish(call: Call, outcome: Outcome) -> None:
            if outcome.value is not None:
                self.was_received(side, outcome.value)

        receiving = anext(side.subscriber) if iterates else side.subscriber.receive()
        self.call("receive", side, receiving, finish)

    @precondition(lambda self: self.living)
    @rule(side=_subscribers)
    def receive_nowait(self, side: SubscriberSide) -> None:
        self._receive_now(side)

    def _receive_now(self, side: SubscriberSide) -> AioTensorError | None:
        """Receive a publication that has arrived; return the error if there is none."""
        unclaimed = side.subscriber.statistics().unclaimed
        try:
            with self.steps.inside():
                received = side.subscriber.receive_nowait()
        except WouldBlockError as error:
            # The call first reads the withdrawals.
            may_be_withdrawn = any(one.limits.slow == "drop" for one in self.publishers)
            if unclaimed and not may_be_withdrawn:
                raise AssertionError(f"{unclaimed} publications have arrived") from error
            return error.with_traceback(None)
        except PeerLostError as error:
            if not side.may_be_lost:
                raise AssertionError("nothing was lost") from error
            return error.with_traceback(None)
        self.was_received(side, received)
        return None

    @precondition(lambda self: self.living)
    @rule(side=_subscribers, keeps=st.booleans())
    def receive_everything(self, side: SubscriberSide, keeps: bool) -> None:
        """Receive all publications that have arrived, when nothing is in transit."""
        self.settle()
        while side.subscriber.statistics().unclaimed:
            error = self._receive_now(side)  # of an earlier connection, perhaps
            assert not isinstance(error, WouldBlockError), f"{side} does not receive what has arrived"
            if error is None and not keeps:
                side.views.pop().tensors.clear()

    def views(self) -> list[tuple[SubscriberSide, View]]:
        """Return the received messages that live."""
        return [(side, view) for side in self.subscribers for view in side.views]

    @precondition(lambda self: self.views())
    @rule(one=one_of(lambda self: self.views()))
    def free(self, one: tuple[SubscriberSide, View]) -> None:
        side, view = one
        side.views.remove(view)
        view.tensors.clear()

    def full_views(self) -> list[View]:
        """Return those that have tensors."""
        return [view for _, view in self.views() if view.tensors]

    @precondition(lambda self: self.full_views())
    @rule(view=one_of(lambda self: self.full_views()))
    def write_to_a_tensor(self, view: View) -> None:
        """Write to a received tensor, which no other process and no other subscriber sees."""
        values = self.values(view.tensors[0].numel())
        view.tensors[0].copy_(values)
        view.expected[0] = values

    @precondition(lambda self: self.living)
    @rule(side=_subscribers)
    def close_subscriber(self, side: SubscriberSide) -> None:
        side.is_closed = True
        self.call("close", side, side.subscriber.aclose())

    @precondition(lambda self: self.living)
    @rule(side=_subscribers)
    def cut_a_connection(self, side: SubscriberSide) -> None:
        session = session_of_subscriber(side.subscriber)
        if session is not None and not session.transport.is_closed:
            cut(session.transport)
            self.lose(side)

    # The comparison

    @invariant()
    def no_bound_is_exceeded(self) -> None:
        for side in self.publishers:
            now, limit = side.publisher.statistics(), side.limits
            assert now.bytes_in_use <= now.peak_bytes_in_use <= now.arena_bytes == limit.arena_bytes
            assert now.history <= limit.history
            for lag in now.lags:
                assert lag.behind <= limit.max_behind, lag
                assert limit.max_held_bytes is None or lag.held_bytes <= limit.max_held_bytes, lag
                assert not lag.dropped or limit.slow == "drop", lag
        for _, view in self.views():
            assert all(map(torch.equal, view.tensors, view.expected)), f"{view} has changed"

    @rule()
    def settle(self) -> None:
        """Run the loop until nothing changes, and compare all sides with the model."""
        self.become_quiet()
        if self.publisher is not None:
            self._check_publisher(self.publisher)
        for subscriber in self.living:
            now, receiving = subscriber.subscriber.statistics(), self.of(subscriber, "receive")
            assert now.waiting == len(receiving)
            assert not receiving or not now.unclaimed, f"{receiving} wait, and {now.unclaimed} have arrived"
            assert now.received == len(subscriber.received)
        for call in self.calls:
            assert not call.side.is_closed, f"{call} hangs, though it is closed"

    def _check_publisher(self, side: PublisherSide) -> None:
        now = side.publisher.statistics()
        assert now.published == len(side.published)
        lags = {lag.subscriber: lag for lag in now.lags}
        names = {one.subscriber.id: one for one in self.living}
        assert lags.keys() <= names.keys(), "a subscriber that has closed is still there"
        for name, subscriber in names.items():
            if name not in lags:
                assert has_ended(subscriber.subscriber), f"{subscriber} did not find {side}"
                continue
            session, lag = session_of_subscriber(subscriber.subscriber), lags[name]
            assert session is not None
            assert session.connection.theirs is not None
            # Each publication of this connection was delivered, dropped, or is still to be taken.
            total = len(side.published) - session.connection.theirs.first
            assert lag.delivered + lag.dropped + lag.behind == total, (subscriber, total, lag)
            subscriber.may_be_lost &= has_ended(subscriber.subscriber)
            if subscriber.last is not None and subscriber.last.side is side:
                subscriber.known = subscriber.last
        publishing, allocating = self.of(side, "publish"), self.of(side, "allocate")
        assert now.waiting == len(publishing) + len(allocating), f"{publishing + allocating} do not wait"
        is_full = side.limits.slow == "wait" and now.behind >= side.limits.max_behind
        turns = held_by_publisher(side.publisher)["turns"]
        assert turns == bool(publishing or is_full), f"{turns} turns are held, {publishing} wait"
        for_memory = [*publishing[: not is_full], *allocating]
        most = max((call.nbytes for call in for_memory), default=0)
        assert not for_memory or now.largest_free_bytes < most, f"{for_memory} wait for nothing: {now}"
        if self.of(side, "drain"):
            assert now.behind, "a call waits for subscribers that have taken everything"

    # The end

    def free_all(self) -> None:
        for one in self.views():
            self.free(one)
        super().free_all()

    def bring_everything_to_its_end(self) -> None:
        """Receive everything until no call waits, and check that all memory is free."""
        side = self.publisher
        if side is None:
            return
        for _ in range(4 * len(self.calls) + 8):
            self.free_all()
            for subscriber in self.living:
                while not isinstance(self._receive_now(subscriber), WouldBlockError):
                    self.free_all()
            self.settle()
            now = side.publisher.statistics()
            if not (now.behind or self.of(side, "publish", "allocate", "drain")):
                break
        else:
            raise AssertionError(f"{self.calls} never end: {side.publisher.statistics()}")
        self.free_all()
        self.settle()
        now = side.publisher.statistics()
        assert [lag.held_bytes for lag in now.lags] == [0] * now.subscribers
        whole = self.steps.start(side.publisher.allocate((side.limits.arena_bytes,), torch.uint8))
        for _ in range(4):
            self.turn(QUIET_TURNS)
            self.steps.pass_time(0.3)  # a subscriber that has gone may have pins until then
        assert whole.done(), f"not all memory is free: {side.publisher.statistics()}"
        whole.result()
        del whole
        self.turn(QUIET_TURNS)
        assert side.publisher.statistics().bytes_in_use == 0

    def close_all(self) -> None:
        if self.now % 2 and self.publisher is not None:
            self.close_publisher()
            self.turn(self.now % 3)
        for subscriber in self.living:
            self.close_subscriber(subscriber)
        if self.publisher is not None:
            self.close_publisher()
