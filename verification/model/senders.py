"""The rules of the senders' applications: their calls, in any order."""

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from aiotensor import AioTensorError, DiscardedError, TensorSender, WouldBlockError
from verification.internals import permits_of, worker_of
from verification.model.records import Block, Call, Message, Outcome, Sender
from verification.model.stage import nothing, one_of
from verification.model.world import World, is_copied

SMALL, BIG, BIGGER = 3, 3_000, 5_000  # elements of int64: in a frame, or in shared memory
ARENAS = st.sampled_from([64 << 10, 128 << 10])
counts = st.sampled_from([SMALL, SMALL, BIG, BIGGER])
seldom = st.integers(0, 7).map(lambda number: number == 7)
senders = one_of(lambda self: self.living)
blocks = one_of(lambda self: self.sendable())


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
    @rule(sender=senders, count=counts, is_strided=st.booleans())
    def send(self, sender: Sender, count: int, is_strided: bool) -> None:
        values = self.values(2 * count)[::2] if is_strided else self.values(count)
        self._send(sender, values, Block(sender, values.nbytes) if count > SMALL else None)

    def _send(self, sender: Sender, values: torch.Tensor, block: Block | None) -> None:
        message = self._begin(sender)

        def finish(call: Call, outcome: Outcome) -> None:
            if outcome.value is not None:
                self.sent(message, expected, block, outcome.value)
                self.became_whole(message)
            else:
                message.state = "dropped"

        expected = values.clone()
        self.call("send", sender, sender.sender.send(values), finish, message=message, block=block)

    def _begin(self, sender: Sender) -> Message:
        message = Message(sender, self.tick())
        sender.messages.append(message)
        return message

    @precondition(lambda self: self.living)
    @rule(sender=senders, count=counts)
    def send_nowait(self, sender: Sender, count: int) -> None:
        values = self.values(count)
        block = Block(sender, values.nbytes) if count > SMALL else None
        message = self._sent_now("send_nowait", sender, values, block)
        if message is not None:
            self.became_whole(message)

    @precondition(lambda self: self.living)
    @rule(sender=senders, count=counts, is_strided=st.booleans())
    def post(self, sender: Sender, count: int, is_strided: bool) -> None:
        values = self.values(2 * count)[::2] if is_strided else self.values(count)
        self._post(sender, values, Block(sender, values.nbytes) if count > SMALL else None)

    def sendable(self) -> list[Block]:
        """Return the blocks that can still be sent."""
        return [block for block in self.allocated if not block.side.end]

    @precondition(lambda self: self.sendable())
    @rule(block=blocks)
    def post_allocated(self, block: Block) -> None:
        self._post(block.side, self._owner_of(block), block)

    def _owner_of(self, block: Block) -> torch.Tensor:
        """Return the tensor of a block that is about to be sent; after a loss, it may be copied first."""
        losses = block.side.losses
        block.may_be_copied |= any(loss.noticed is None or block.began < loss.noticed for loss in losses)
        assert block.owner is not None
        return block.owner

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
        call = Call(what, None, self.tick(), 0.0, nothing, sender)
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
    @rule(sender=senders, count=st.sampled_from([SMALL, BIG, BIGGER]))
    def allocate(self, sender: Sender, count: int) -> None:
        def finish(call: Call, outcome: Outcome) -> None:
            if outcome.value is not None:
                sender.latest_allocation = max(sender.latest_allocation, call.began)
                outcome.value.copy_(self.values(count))
                self.allocated.append(
                    Block(sender, outcome.value.nbytes, outcome.value, is_allocated=True, began=self.tick())
                )

        self.call("allocate", sender, sender.sender.allocate((count,), torch.int64), finish)

    @precondition(lambda self: self.sendable())
    @rule(block=blocks)
    def send_allocated(self, block: Block) -> None:
        self._send(block.side, self._owner_of(block), block)

    # Several tensors

    @precondition(lambda self: self.living)
    @rule(sender=senders)
    def begin_message(self, sender: Sender) -> None:
        message = self._begin(sender)
        message.ending = self.steps.loop.create_future()

        def finish(call: Call, outcome: Outcome) -> None:
            message.ending = None
            if outcome.value is not None:
                self.became_whole(message)
            else:
                message.state = "dropped"

        self.call("message", sender, _block(message), finish, message=message)

    @precondition(lambda self: self.open_messages())
    @rule(message=one_of(lambda self: self.open_messages()), count=counts)
    def send_in_message(self, message: Message, count: int) -> None:
        values = self.values(count)
        block = Block(message.sender, values.nbytes) if count > SMALL else None
        assert message.opened is not None

        def finish(call: Call, outcome: Outcome) -> None:
            if outcome.value is not None:
                self.sent(message, values, block, outcome.value)

        sending = message.opened.send(values)
        self.call("send in a message", message.sender, sending, finish, message=message)

    @precondition(lambda self: self.open_messages())
    @rule(message=one_of(lambda self: self.open_messages()), raises=seldom)
    def end_message(self, message: Message, raises: bool) -> None:
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

    def sent_messages(self) -> list[Message]:
        return [tensor.message for tensor in self.known.values() if not tensor.message.sender.end]

    @precondition(lambda self: self.sent_messages())
    @rule(message=one_of(lambda self: self.sent_messages()))
    def discard_at_the_sender(self, message: Message) -> None:
        with self.steps.inside():
            message.sender.sender.discard(message.tensors[0].handle)
        if message.state == "open":
            message.state = "dropped"
        message.discarded_here = True

    @precondition(lambda self: self.living)
    @rule(sender=senders)
    def drain(self, sender: Sender) -> None:
        sent = [message for message in sender.messages if message.state == "whole"]

        def finish(call: Call, outcome: Outcome) -> None:
            for message in sent if outcome.error is None and not outcome.is_cancelled else ():
                has_ended = message.is_taken or self.is_discarded(message) or message.may_be_lost
                assert has_ended, f"drained, with {message} on its way"

        self.call("drain", sender, sender.sender.drain(), finish)

    @precondition(lambda self: self.living)
    @rule(sender=senders, only_long=st.booleans())
    def hold_or_let_go_of_a_worker(self, sender: Sender, only_long: bool) -> None:
        worker = worker_of(sender.sender)
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
