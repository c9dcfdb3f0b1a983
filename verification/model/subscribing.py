"""The rules of the subscribers' applications: their calls, in any order."""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from aiotensor import AioTensorError, PeerLostError, RefusedError, WouldBlockError
from aiotensor.broadcast import Subscriber
from verification.internals import session_of_subscriber, worker_of
from verification.model.broadcast_records import Call, SubscriberSide, View
from verification.model.publishing import PublisherRules, must_succeed
from verification.model.records import Outcome

__all__ = ["SubscriberRules"]


class SubscriberRules(PublisherRules):
    """Rules that call subscribers."""

    @precondition(lambda self: len(self.living) < self.size and len(self.subscribers) < 3 * self.size)
    @rule()
    def open_subscriber(self) -> None:
        subscriber = Subscriber[object](self.place)
        side = SubscriberSide(len(self.subscribers), subscriber)
        if self.publisher is not None:
            side.opened_after = len(self.publisher.published)
        self.subscribers.append(side)
        self.note_the_limit()
        opening = self.steps.start(subscriber.__aenter__())
        self.turn()
        opening.result()  # opening never waits
        self.steps.watch(worker_of(subscriber))

    @precondition(lambda self: self.living)
    @rule(data=st.data(), iterates=st.booleans())
    def receive(self, data: st.DataObject, iterates: bool) -> None:
        side = data.draw(st.sampled_from(self.living))
        self.note_the_limit()  # it may connect again

        def finish(call: Call, outcome: Outcome) -> None:
            if outcome.value is not None:
                self.was_received(side, outcome.value)
            elif outcome.error is not None:
                self.check_not_received(call, outcome.error)

        receiving = anext(side.subscriber) if iterates else side.subscriber.receive()
        self.call("receive", side, receiving, finish)

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def receive_nowait(self, data: st.DataObject) -> None:
        self.receive_now(data.draw(st.sampled_from(self.living)))

    def receive_now(self, side: SubscriberSide) -> AioTensorError | None:
        """Receive a publication that has arrived; return the error if there is none."""
        self.note_the_limit()
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
        except (PeerLostError, RefusedError) as error:
            if not (side.may_be_lost or side.may_be_refused):
                raise AssertionError("nothing was lost") from error
            return error.with_traceback(None)
        self.was_received(side, received)
        return None

    def views(self) -> list[tuple[SubscriberSide, View]]:
        """Return the received messages that live."""
        return [(side, view) for side in self.subscribers for view in side.views]

    @precondition(lambda self: self.views())
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        side, view = data.draw(st.sampled_from(self.views()))
        side.views.remove(view)
        view.tensors.clear()

    @precondition(lambda self: any(view.tensors for _, view in self.views()))
    @rule(data=st.data())
    def write_to_a_tensor(self, data: st.DataObject) -> None:
        """Write to a received tensor, which no other process and no other subscriber sees."""
        _, view = data.draw(st.sampled_from([one for one in self.views() if one[1].tensors]))
        values = self.values(view.tensors[0].numel())
        view.tensors[0].copy_(values)
        view.expected[0] = values

    @precondition(lambda self: self.delivery is not None and self.living)
    @rule(data=st.data())
    def hold_or_let_go_of_the_memory(self, data: st.DataObject) -> None:
        self.hold_or_let_go_of_memory(data.draw(st.sampled_from(self.living)).subscriber)

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def close_subscriber(self, data: st.DataObject) -> None:
        self.close_the_subscriber(data.draw(st.sampled_from(self.living)))

    def close_the_subscriber(self, side: SubscriberSide) -> None:
        publisher = self.publisher
        if publisher is not None:
            # It may be disconnected for being slow before the publisher reads its answers.
            may_be_disconnected = publisher.limits.slow == "disconnect"
            has_tensors = bool(side.views) or bool(self.of(side, "receive"))
            publisher.may_keep_pins |= has_tensors or side.was_lost or may_be_disconnected
        side.is_closed = True
        self.let_go_of_memory()
        self.call("close", side, side.subscriber.aclose(), must_succeed)

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def cut_a_connection(self, data: st.DataObject) -> None:
        side = data.draw(st.sampled_from(self.living))
        session = session_of_subscriber(side.subscriber)
        if session is not None and not session.transport.is_closed:
            self.cut(session.transport)
            self.lose(side)
            self.note_the_limit()

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def cancel_a_call(self, data: st.DataObject) -> None:
        calls = [call for call in self.calls if call.what != "close"]
        if calls:
            self.cancel(data.draw(st.sampled_from(calls)))

    @rule(times=st.integers(1, 4))
    def let_the_loop_turn(self, times: int) -> None:
        self.turn(times)

    @rule(seconds=st.sampled_from([0.005, 0.6, 40.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.steps.pass_time(seconds)
        self.turn()
