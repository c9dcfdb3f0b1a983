"""The rules of the senders' applications: their calls, in any order."""

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from aiotensor import (
    AioTensorError,
    DiscardedError,
    TensorSender,
    UsageError,
    WouldBlockError,
)
from verification.internals import permits_of, worker_of
from verification.model.records import Block, Call, Message, Outcome, Sender
from verification.model.world import World, is_copied

SMALL, BIG, BIGGER = 3, 3_000, 5_000  # elements of int64: in a frame, or in shared memory
ARENAS = st.sampled_from([64 << 10, 128 << 10])
counts = st.sampled_from([SMALL, SMALL, BIG, BIGGER])
seldom = st.integers(0, 7).map(lambda number: number == 7)


class _RaisedInBlockError(Exception):
    pass


class SenderRules(World):
    """Rules that call senders."""

    @precondition(lambda self: len(self.senders) < 4)
    @rule(limit=st.integers(1, 3), arena_bytes=ARENAS)
    def open_sender(self, limit: int, arena_bytes: int) -> None:
        sender = TensorSender(self.place, limit, arena_bytes)
        record = Sender(len(self.senders), sender, limit, arena_bytes)
        self.senders.append(record)
        promised = sum(one.limit for one in self.senders)
        for one in self.senders:
            one.may_be_refused |= self.max_messages is not None and promised > self.max_messages
        opening = self.steps.start(sender.__aenter__())
        self.turn()
        opening.result()  # opening never waits
        self.steps.watch(worker_of(sender))

    # One tensor

    @precondition(lambda self: self.living)
    @rule(data=st.data(), count=counts, is_strided=st.booleans())
    def send(self, data: st.DataObject, count: int, is_strided: bool) -> None:
        sender = data.draw(st.sampled_from(self.living))
        values = self.values(2 * count)[::2] if is_strided else self.values(count)
        self._send(sender, values, Block(sender, values.nbytes) if count > SMALL else None)

    def _send(self, sender: Sender, values: torch.Tensor, block: Block | None) -> None:
        message = self._begin(sender)

        def finish(call: Call, outcome: Outcome) -> None:
            if outcome.value is not None:
                self.sent(message, expected, block, outcome.value)
                self.became_whole(message)
                return
            if outcome.error is not None:
                self.check_not_sent(call, outcome.error)
            message.state = "dropped"

        expected = values.clone()
        self.call("send", sender, sender.sender.send(values), finish, message=message, block=block)

    def _begin(self, sender: Sender) -> Message:
        message = Message(sender, self.tick())
        sender.messages.append(message)
        return message

    @precondition(lambda self: self.living)
    @rule(data=st.data(), count=counts)
    def send_nowait(self, data: st.DataObject, count: int) -> None:
        sender = data.draw(st.sampled_from(self.living))
        values = self.values(count)
        block = Block(sender, values.nbytes) if count > SMALL else None
        message = self._sent_now("send_nowait", sender, values, block)
        if message is not None:
            self.became_whole(message)

    @precondition(lambda self: self.living)
    @rule(data=st.data(), count=counts, is_strided=st.booleans())
    def post(self, data: st.DataObject, count: int, is_strided: bool) -> None:
        sender = data.draw(st.sampled_from(self.living))
        values = self.values(2 * count)[::2] if is_strided else self.values(count)
        self._post(sender, values, Block(sender, values.nbytes) if count > SMALL else None)

    @precondition(lambda self: any(not block.sender.end for block in self.allocated))
    @rule(data=st.data())
    def post_allocated(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([one for one in self.allocated if not one.sender.end]))
        assert block.owner is not None
        self._note_losses(block)
        self._post(block.sender, block.owner, block)

    def _post(self, sender: Sender, values: torch.Tensor, block: Block | None) -> None:
        message = self._sent_now("post", sender, values, block)
        if message is None:
            return
        message.is_posted = True
        if block is None or is_copied(message):  # it may be announced at once
            self.became_whole(message)
        self._await_copy(message)

    def _await_copy(self, message: Message) -> None:
        """Wait until a posted tensor is copied, and again if the wait is cancelled."""
        sender, handle = message.sender, message.tensors[0].handle

        async def copied() -> bool:
            await sender.sender.copied(handle)
            return True

        def finish(call: Call, outcome: Outcome) -> None:
            if outcome.is_cancelled:
                if not sender.end:
                    self._await_copy(message)
            elif outcome.error is not None:
                self.check_not_sent(call, outcome.error)
                message.state = "dropped"
            elif message.state != "whole":
                self.became_whole(message)

        self.call("copied", sender, copied(), finish, message=message)

    def _sent_now(
        self, what: str, sender: Sender, values: torch.Tensor, block: Block | None
    ) -> Message | None:
        """Send a tensor without waiting; return its message unless it was refused."""
        new_bytes = 0 if block is None or (block.is_allocated and not block.may_be_copied) else values.nbytes
        before = sender.sender.statistics()
        others_wait = permits_of(sender.sender).waiting > 0
        message = self._begin(sender)
        message.waits_in_line = False
        call = Call(what, None, self.tick(), 0.0, _never, sender)
        expected = values.clone()
        try:
            with self.steps.inside():
                handle = getattr(sender.sender, what)(values)
        except WouldBlockError as error:
            message.state, why = "dropped", str(error)
            is_full = before.in_flight == before.max_concurrent_videos or before.waiting
            has_no_room = new_bytes and before.bytes_in_use + new_bytes > before.arena_bytes * 3 // 4
            reads_not = "no receiver" in why or "slow to read" in why
            assert is_full or has_no_room or reads_not, why
        except AioTensorError as error:
            message.state = "dropped"
            self.check_not_sent(call, error)
        else:
            assert before.in_flight < before.max_concurrent_videos, "a permit more than there are"
            assert not others_wait, "it came later, and got a permit first"
            self.sent(message, expected, block, handle)
            return message
        return None

    # Memory of the sender

    @precondition(lambda self: self.living)
    @rule(data=st.data(), count=st.sampled_from([SMALL, BIG, BIGGER]))
    def allocate(self, data: st.DataObject, count: int) -> None:
        sender = data.draw(st.sampled_from(self.living))

        def finish(call: Call, outcome: Outcome) -> None:
            if outcome.value is not None:
                sender.latest_allocation = max(sender.latest_allocation, call.began)
                outcome.value.copy_(self.values(count))
                self.allocated.append(
                    Block(sender, outcome.value.nbytes, outcome.value, is_allocated=True, began=self.tick())
                )
            elif outcome.error is not None:
                self.check_not_sent(call, outcome.error)

        self.call("allocate", sender, sender.sender.allocate((count,), torch.int64), finish)

    @precondition(lambda self: any(not block.sender.end for block in self.allocated))
    @rule(data=st.data())
    def send_allocated(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([one for one in self.allocated if not one.sender.end]))
        assert block.owner is not None
        self._note_losses(block)
        self._send(block.sender, block.owner, block)

    def _note_losses(self, block: Block) -> None:
        losses = [loss for loss in block.sender.losses if loss.noticed is None or block.began < loss.noticed]
        block.may_be_copied |= bool(losses)

    @precondition(lambda self: self.allocated)
    @rule(data=st.data())
    def free_allocated(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.allocated))
        self.allocated.remove(block)
        block.owner = None

    # Several tensors

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def begin_message(self, data: st.DataObject) -> None:
        sender = data.draw(st.sampled_from(self.living))
        message = self._begin(sender)
        message.ending = self.steps.loop.create_future()

        def finish(call: Call, outcome: Outcome) -> None:
            message.ending = None
            if outcome.value is not None:
                self.became_whole(message)
                return
            # Leaving a block during one of its sends is misuse, and raises an error.
            if outcome.error is not None and not isinstance(outcome.error, UsageError):
                self.check_not_sent(call, outcome.error)
            message.state = "dropped"

        self.call("message", sender, _block(message), finish, message=message)

    @precondition(lambda self: self.open_messages())
    @rule(data=st.data(), count=counts)
    def send_in_message(self, data: st.DataObject, count: int) -> None:
        message = data.draw(st.sampled_from(self.open_messages()))
        values = self.values(count)
        block = Block(message.sender, values.nbytes) if count > SMALL else None
        assert message.opened is not None

        def finish(call: Call, outcome: Outcome) -> None:
            if outcome.value is not None:
                self.sent(message, values, block, outcome.value)
            elif outcome.error is not None:
                self.check_not_sent(call, outcome.error)

        sending = message.opened.send(values)
        self.call("send in a message", message.sender, sending, finish, message=message)

    @precondition(lambda self: self.open_messages())
    @rule(data=st.data(), raises=seldom)
    def end_message(self, data: st.DataObject, raises: bool) -> None:
        message = data.draw(st.sampled_from(self.open_messages()))
        assert message.ending is not None
        with self.steps.inside():
            if raises:
                message.ending.set_exception(_RaisedInBlockError())
            else:
                message.ending.set_result(None)

    def open_messages(self) -> list[Message]:
        return [
            message
            for sender in self.living
            for message in sender.messages
            if message.opened is not None and message.ending is not None and not message.ending.done()
        ]

    # Other calls

    @precondition(lambda self: any(not tensor.message.sender.end for tensor in self.known.values()))
    @rule(data=st.data())
    def discard_at_the_sender(self, data: st.DataObject) -> None:
        known = [tensor for tensor in self.known.values() if not tensor.message.sender.end]
        message = data.draw(st.sampled_from(known)).message
        with self.steps.inside():
            message.sender.sender.discard(message.tensors[0].handle)
        if message.state == "open":
            message.state = "dropped"
        message.discarded_here = True

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        sender = data.draw(st.sampled_from(self.living))
        sent = [message for message in sender.messages if message.state == "whole"]

        def finish(call: Call, outcome: Outcome) -> None:
            if outcome.error is not None:
                self.check_not_sent(call, outcome.error)
            elif not outcome.is_cancelled:
                for message in sent:
                    has_ended = message.is_taken or self.is_discarded(message) or message.may_be_lost
                    assert has_ended, f"drained, with {message} on its way"

        self.call("drain", sender, sender.sender.drain(), finish)

    @precondition(lambda self: self.living)
    @rule(data=st.data(), only_long=st.booleans())
    def hold_or_let_go_of_a_worker(self, data: st.DataObject, only_long: bool) -> None:
        worker = worker_of(data.draw(st.sampled_from(self.living)).sender)
        if self.steps.is_held(worker):
            self.steps.let_go(worker)
        else:
            self.steps.hold(worker, only_long=only_long)


async def _block(message: Message) -> bool:
    assert message.ending is not None
    try:
        async with message.sender.sender.message() as message.opened:
            await message.ending
    except _RaisedInBlockError:
        message.state = "dropped"
        raise DiscardedError("its block raised") from None
    return True


def _never(call: Call, outcome: Outcome) -> None:
    raise AssertionError("this call does not wait")
