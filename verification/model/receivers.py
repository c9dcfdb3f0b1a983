"""The rules of a receiver's application: its calls, in any order."""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from aiotensor import AioTensorError, TensorHandle, TensorReceiver
from verification.internals import worker_of
from verification.model.records import Call, Outcome, Receiver, Tensor, key_of
from verification.model.stage import one_of
from verification.model.world import World


class ReceiverRules(World):
    """Rules that call a receiver."""

    @precondition(lambda self: all(receiver.is_gone for receiver in self.receivers))
    @rule(max_messages=st.sampled_from([None, None, 4]))
    def open_receiver(self, max_messages: int | None) -> None:
        if any(self.of(receiver, "close") for receiver in self.receivers):
            return  # the previous receiver still listens there
        self._open_receiver(max_messages)

    def _open_receiver(self, max_messages: int | None) -> None:
        receiver = TensorReceiver(self.place, max_unclaimed_messages=max_messages)
        record = Receiver(len(self.receivers), receiver)
        self.max_messages = max_messages
        promised = sum(one.limit for one in self.senders)
        for one in self.senders:
            one.may_be_refused |= max_messages is not None and promised > max_messages
        opening = self.steps.start(receiver.__aenter__())
        while not opening.done():
            self.turn()
        opening.result()
        record.is_open = True
        self.receivers.append(record)
        self.steps.watch(worker_of(receiver))

    def handles(self, data: st.DataObject) -> TensorHandle:
        """Choose the handle of a known or a future tensor."""
        if len(self.known) and data.draw(st.integers(0, 2)):
            tensor: Tensor = data.draw(st.sampled_from(list(self.known.values())))
            return tensor.handle
        sender = data.draw(st.sampled_from(self.senders))
        numbers = [message.number for message in sender.messages if message.number is not None]
        number = max(numbers, default=-1) + data.draw(st.sampled_from([1, 1, 2]))
        return TensorHandle(sender.sender.id, number, data.draw(st.integers(0, 1)), "int64", (3,), "cpu")

    @precondition(lambda self: self.receiver and self.senders)
    @rule(data=st.data(), copy=st.booleans())
    def receive(self, data: st.DataObject, copy: bool) -> None:
        receiver, handle = self.receiver, self.handles(data)
        assert receiver is not None
        key = key_of(handle)

        def finish(call: Call, outcome: Outcome) -> None:
            if outcome.value is not None:
                self.took(receiver, key, outcome.value, call)

        receiving = receiver.receiver.receive(handle, copy=copy)
        self.call("receive", receiver, receiving, finish, key=key, is_copy=copy)

    @precondition(lambda self: self.receiver and self.known)
    @rule(data=st.data(), turns=st.integers(1, 4))
    def begin_a_copy_and_cancel_it(self, data: st.DataObject, turns: int) -> None:
        self.receive(data, copy=True)
        copying = self.calls[-1]
        self.turn(turns)
        if copying in self.calls:
            self.cancel(copying)

    @precondition(lambda self: self.receiver and self.senders)
    @rule(data=st.data())
    def receive_nowait(self, data: st.DataObject) -> None:
        self.take_now(self.handles(data))

    def take_now(self, handle: TensorHandle) -> AioTensorError | None:
        receiver, key = self.receiver, key_of(handle)
        assert receiver is not None
        self.copying_in_turn = {call.key for call in self.calls if call.is_copy}
        try:
            with self.steps.inside():
                got = receiver.receiver.receive_nowait(handle)
        except AioTensorError as error:
            self.check_not_taken(receiver, key, error)
            return error.with_traceback(None)
        self.took(receiver, key, got)
        return None

    @precondition(lambda self: self.receiver)
    @rule()
    def take_the_next(self) -> None:
        receiver = self.receiver
        assert receiver is not None

        def finish(call: Call, outcome: Outcome) -> None:
            if outcome.value is not None:
                key = key_of(outcome.value.handle)
                assert key in self.known, "the tensor was never announced"
                self.iterated.append(key)
                self.took(receiver, key, outcome.value.tensor, call)

        self.call("iterate", receiver, anext(receiver.receiver), finish)

    @precondition(lambda self: self.receiver and self.senders)
    @rule(data=st.data())
    def discard_at_the_receiver(self, data: st.DataObject) -> None:
        receiver, handle = self.receiver, self.handles(data)
        assert receiver is not None
        with self.steps.inside():
            receiver.receiver.discard(handle)
        self.discards.setdefault((receiver, handle.sender, handle.message), self.tick())

    @precondition(lambda self: self.alive())
    @rule(tensor=one_of(lambda self: self.alive()))
    def free(self, tensor: Tensor) -> None:
        tensor.view = None

    def free_all(self) -> None:
        for tensor in self.alive():
            tensor.view = None
        super().free_all()

    def alive(self) -> list[Tensor]:
        return [tensor for tensor in self.known.values() if tensor.view is not None]
