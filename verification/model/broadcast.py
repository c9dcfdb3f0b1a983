"""The comparison of a publisher and its subscribers with the model, when nothing is in transit."""

import msgspec
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from aiotensor import AioTensorError, WouldBlockError
from aiotensor.broadcast import PublisherStatistics, SubscriberLag
from verification.internals import (
    arrived_at,
    has_ended,
    held_by_publisher,
    landed_bytes,
    session_of_subscriber,
)
from verification.model.broadcast_records import PublisherSide, SubscriberSide
from verification.model.publishing import limits, messages
from verification.model.subscribing import SubscriberRules

__all__ = ["WholeBroadcast"]

_QUIET_TURNS = 10  # iterations without a change, after which nothing will change


class WholeBroadcast(SubscriberRules):
    """Compare all sides with the model whenever nothing is in transit."""

    @initialize(data=st.data(), subscribers=st.integers(0, 8))
    def begin(self, data: st.DataObject, subscribers: int) -> None:
        self.open_the_publisher(data.draw(limits(self.size)))
        for _ in range(min(subscribers, self.size)):
            self.open_subscriber()

    @invariant()
    def no_bound_is_exceeded(self) -> None:
        for side in self.publishers:
            now, limit = side.publisher.statistics(), side.limits
            assert now.bytes_in_use <= now.peak_bytes_in_use <= now.arena_bytes == limit.arena_bytes
            assert limit.max_subscribers is None or now.subscribers <= limit.max_subscribers
            assert now.history <= limit.history
            for lag in now.lags:
                assert lag.behind <= limit.max_behind, lag
                # A publisher that closes announces all pending publications, since no more will follow. This
                # takes several iterations between machines, and none on one machine.
                is_last = side.is_closed and self.delivery is not None
                most = None if is_last else limit.max_held_bytes
                assert most is None or lag.held_bytes <= most, lag
                assert not lag.dropped or limit.slow == "drop", lag
        for _, view in self.views():
            assert all(map(torch.equal, view.tensors, view.expected)), f"{view} has changed"

    @rule()
    def settle_and_compare(self) -> None:
        self.settle()

    @precondition(lambda self: self.publisher)
    @rule(counts=messages)
    def publish_when_all_is_known(self, counts: list[int]) -> None:
        """Publish without a wait when the model knows which subscribers get it, and which lose another."""
        self.settle()
        side = self.publisher
        assert side is not None
        before = side.publisher.statistics()
        full = [lag for lag in before.lags if lag.behind == side.limits.max_behind]
        published = self.publish_now(counts)
        if isinstance(published, AioTensorError):
            return
        lost = len(full) if side.limits.slow == "disconnect" else 0
        assert published.delivered == before.subscribers - lost, (published, before)
        assert published.dropped == (len(full) if side.limits.slow == "drop" else 0), (published, before)

    @precondition(lambda self: self.living)
    @rule(data=st.data(), keeps=st.booleans())
    def receive_everything(self, data: st.DataObject, keeps: bool) -> None:
        """Receive all publications that have arrived, when nothing is in transit."""
        self.settle()
        side = data.draw(st.sampled_from(self.living))
        while side.subscriber.statistics().unclaimed:
            error = self.receive_now(side)  # of an earlier connection, perhaps
            assert not isinstance(error, WouldBlockError), f"{side} does not receive what has arrived"
            if error is None and not keeps:
                side.views.pop().tensors.clear()
        if not keeps:
            self.settle()

    def settle(self) -> None:
        """Run the loop until nothing changes, and compare all sides with the model."""
        self.let_go_of_memory()
        for _ in range(self.searches):
            self.steps.pass_time(0.3)  # subscribers look for a publisher
            before = None
            while before != (before := self._state()):
                self.turn(_QUIET_TURNS)
        side = self.publisher
        if side is not None:
            self._check_publisher(side)
        for subscriber in self.living:
            self._check_subscriber(subscriber)
        for call in self.calls:
            assert not call.side.is_closed, f"{call} hangs, though it is closed"

    def _state(self) -> object:
        """Return values that change as long as something is in transit."""
        return (
            len(self.calls),
            self.traffic(),
            [_without_times(one.publisher.statistics()) for one in self.publishers],
            [one.subscriber.statistics() for one in self.subscribers],
        )

    # The publisher

    def _check_publisher(self, side: PublisherSide) -> None:
        now = side.publisher.statistics()
        assert now.published == len(side.published)
        lags = {lag.subscriber: lag for lag in now.lags}
        names = {one.subscriber.id: one for one in self.living}
        assert lags.keys() <= names.keys(), "a subscriber that has closed is still there"
        for name, subscriber in names.items():
            if name in lags:
                self._check_lag(side, subscriber, lags[name])
            else:
                assert has_ended(subscriber.subscriber), f"{subscriber} did not find {side}"
        self._check_calls(side, now)
        self._check_bytes(side, now, lags)

    def _check_lag(self, side: PublisherSide, subscriber: SubscriberSide, lag: SubscriberLag) -> None:
        session = session_of_subscriber(subscriber.subscriber)
        assert session is not None
        assert session.connection.theirs is not None
        # Each publication of this connection was delivered, dropped, or is still to be taken.
        since = session.connection.theirs.first
        total = len(side.published) - since
        assert lag.delivered + lag.dropped + lag.behind == total, f"{subscriber} since {since}: {lag}"
        arrived = [one for one in arrived_at(subscriber.subscriber) if one.session is session]
        there = [one.number for one in arrived if not one.is_taken]
        end = len(side.published)
        assert there == list(range(end - lag.behind, end - lag.behind + len(there))), (there, lag)
        kept = [one.number for one in arrived if one.is_taken]
        if not subscriber.was_lost:
            held = {block for view in subscriber.views for block in view.publication.blocks}
            for number in [*kept, *there]:
                held |= set(side.published[number].blocks)
            if not side.may_keep_pins and not self._is_unclear(side):
                assert lag.held_bytes == sum(block.nbytes for block in held), (subscriber, lag, held)
        if len(there) < lag.behind:
            waiting = side.published[end - lag.behind + len(there)]
            nbytes = sum(block.nbytes for block in {*waiting.blocks, *waiting.copies})
            most = side.limits.max_held_bytes
            assert most is not None, f"{waiting} does not reach {subscriber}"
            assert lag.held_bytes + nbytes > most, f"{waiting} does not reach {subscriber}"
        if not subscriber.was_lost and side.limits.slow != "drop":
            last = subscriber.last
            following = session.first if last is None or last.number is None else last.number + 1
            first = [*kept, *range(end - lag.behind, end + 1)][0]
            assert first == following, f"{subscriber} has lost some of {following} to {first}"
        if not has_ended(subscriber.subscriber):
            subscriber.may_be_lost = subscriber.may_be_refused = False
        if subscriber.last is not None and subscriber.last.side is side:
            subscriber.known = subscriber.last

    def _is_unclear(self, side: PublisherSide) -> bool:
        """Return whether some publication may be a copy of a tensor from `allocate`."""
        return any(publication.copies for publication in side.published)

    def _check_calls(self, side: PublisherSide, now: PublisherStatistics) -> None:
        publishing, allocating = self.of(side, "publish"), self.of(side, "allocate")
        assert now.waiting == len(publishing) + len(allocating), f"{publishing + allocating} do not wait"
        is_full = side.limits.slow == "wait" and now.behind >= side.limits.max_behind
        turns = held_by_publisher(side.publisher)["turns"]
        assert turns == bool(publishing or is_full), f"{turns} turns are held, {publishing} wait"
        for_memory = sorted([*publishing[: not is_full], *allocating], key=lambda call: call.began)
        if for_memory:
            # The first one in line; it may have some of its blocks already.
            most = max(call.nbytes for call in for_memory)
            assert now.largest_free_bytes < most, f"{for_memory} wait for nothing: {now}"
        if self.of(side, "drain"):
            assert now.behind, "a call waits for subscribers that have taken everything"

    def _check_bytes(
        self, side: PublisherSide, now: PublisherStatistics, lags: dict[str, SubscriberLag]
    ) -> None:
        if self.of(side, "publish", "allocate") or self._is_unclear(side):
            return
        end = len(side.published)
        blocks = {
            block for publication in side.published[end - now.history :] for block in publication.blocks
        }
        blocks |= {block for owner, block in self.allocated if owner is side}
        for subscriber in self.living:
            lag = lags.get(subscriber.subscriber.id)
            if lag is not None:
                behind = side.published[end - lag.behind :]
                blocks |= {block for publication in behind for block in publication.blocks}
            if lag is not None and not (subscriber.was_lost and side.may_keep_pins):
                for view in subscriber.views:
                    blocks |= set(view.publication.blocks) if view.publication.side is side else set()
                session = session_of_subscriber(subscriber.subscriber)
                for one in arrived_at(subscriber.subscriber):
                    if one.is_taken and one.session is session:
                        blocks |= set(side.published[one.number].blocks)
        nbytes = sum(block.nbytes for block in blocks)
        if side.may_keep_pins:
            assert now.bytes_in_use >= nbytes, f"{side} has {now.bytes_in_use} bytes in use, and {blocks}"
        else:
            assert now.bytes_in_use == nbytes, f"{side} has {now.bytes_in_use} bytes in use, and {blocks}"

    # A subscriber

    def _check_subscriber(self, subscriber: SubscriberSide) -> None:
        now = subscriber.subscriber.statistics()
        receiving = self.of(subscriber, "receive")
        assert now.waiting == len(receiving)
        assert not receiving or not now.unclaimed, f"{receiving} wait, and {now.unclaimed} have arrived"
        tensors = sum(block.nbytes for view in subscriber.views for block in view.publication.blocks)
        assert now.received == len(subscriber.received)
        assert now.leases == 0 or tensors or now.unclaimed or self._is_copied(subscriber)

    def _is_copied(self, subscriber: SubscriberSide) -> bool:
        return any(view.publication.copies for view in subscriber.views)

    # The end

    def end(self, *, is_checked: bool) -> None:
        if is_checked:
            self.settle()
            self._bring_everything_to_its_end()
        self._close_all()
        if is_checked:
            self.check_that_nothing_is_left()

    def _free_all(self) -> None:
        for side, view in self.views():
            side.views.remove(view)
            view.tensors.clear()
        for _, block in self.allocated:
            block.owner = None
        self.allocated.clear()

    def _bring_everything_to_its_end(self) -> None:
        """Receive everything until no call waits, and check that all memory is free."""
        side = self.publisher
        if side is None:
            return
        for _ in range(4 * len(self.calls) + 8):
            self._free_all()
            for subscriber in self.living:
                while not isinstance(self.receive_now(subscriber), WouldBlockError):
                    self._free_all()
            self.settle()
            now = side.publisher.statistics()
            if not (now.behind or self.of(side, "publish", "allocate", "drain")):
                break
        else:
            raise AssertionError(f"{self.calls} never end: {side.publisher.statistics()}")
        self._free_all()
        self.settle()
        now = side.publisher.statistics()
        assert [lag.held_bytes for lag in now.lags] == [0] * now.subscribers
        whole = self.steps.start(side.publisher.allocate((side.limits.arena_bytes,), torch.uint8))
        for _ in range(4):
            self.turn(_QUIET_TURNS)
            self.steps.pass_time(0.3)  # a subscriber that has gone may have pins until then
        assert whole.done(), f"not all memory is free: {side.publisher.statistics()}"
        whole.result()
        del whole
        self.turn(_QUIET_TURNS)
        assert side.publisher.statistics().bytes_in_use == 0
        self.steps.pass_time(0.3)  # a message that frees a block may wait for others
        self.turn(_QUIET_TURNS)
        for subscriber in self.living:
            left = landed_bytes(subscriber.subscriber)
            assert not left, f"{left} bytes are left at {subscriber}, and the publisher has freed them"

    def _close_all(self) -> None:
        self.let_go_of_memory()
        self._free_all()
        for call in self.calls:
            if call.what != "close":
                self.cancel(call)
        if self.now % 2 and self.publisher is not None:
            self.close_publisher()
            self.turn(self.now % 3)
        for subscriber in self.living:
            self.close_the_subscriber(subscriber)
        if self.publisher is not None:
            self.close_publisher()
        for _ in range(6):
            self.turn(_QUIET_TURNS)
            self.steps.pass_time(0.3)
        assert not self.calls, f"{self.calls} hang"
        self.steps.close()


def _without_times(statistics: PublisherStatistics) -> PublisherStatistics:
    lags = tuple(msgspec.structs.replace(lag, behind_s=0) for lag in statistics.lags)
    return msgspec.structs.replace(statistics, longest_wait_s=0, lags=lags)
