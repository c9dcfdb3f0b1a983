"""Real senders and a real receiver on one loop, with a model that checks every result."""

from typing import Any

import torch

from aiotensor import (
    AlreadyTakenError,
    ClosedError,
    DiscardedError,
    PeerLostError,
    RefusedError,
    TensorHandle,
    UsageError,
    WouldBlockError,
)
from aiotensor.sender import MessageState
from verification.internals import worker_of
from verification.model.records import Block, Call, Key, Message, Outcome, Receiver, Sender, Tensor, key_of
from verification.model.stage import Stage

_LOSSES = (PeerLostError, RefusedError, ClosedError)


class World(Stage):
    """Keep a record of every message and tensor, and compare what each call returns with it.

    The model does not predict concurrent events, but bounds them: while a discard or a loss is in transit,
    either side may see it first. When nothing is in transit, the state is known again, and compared
    completely.
    """

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0
        self.receivers: list[Receiver] = []
        self.senders: list[Sender] = []
        self.known: dict[Key, Tensor] = {}
        self.discards: dict[tuple[Receiver, str, int], int] = {}  # when receivers discarded which messages
        self.max_messages: int | None = None
        # anyio keeps the task of a cancelled thread in a cycle, if the loop has no main task.
        self.has_cancelled_a_thread = False

    # The current objects

    @property
    def receiver(self) -> Receiver | None:
        """The receiver that can be used now."""
        return next((one for one in self.receivers if one.is_open and not one.is_gone), None)

    @property
    def living(self) -> list[Sender]:
        return [sender for sender in self.senders if not sender.end]

    def objects(self) -> list[Any]:
        return [one.sender for one in self.senders] + [one.receiver for one in self.receivers]

    # Calls

    def cancel(self, call: Call) -> None:
        self.has_cancelled_a_thread |= call.is_copy
        super().cancel(call)

    def turn(self, times: int = 1) -> bool:
        """Run iterations of the loop, and check the results of calls; return whether any call ended."""
        has_any = False
        for _ in range(times):
            self.turns += 1
            self.steps.turn()
            for sender in self.senders:
                for message in sender.messages:
                    if message.opened is not None and message.known is None:
                        message.known = self.tick()
                    if message.is_posted and message.state == "open" and is_copied(message):
                        self.became_whole(message)
            has_any |= self._hear()
        return has_any

    def _hear(self) -> bool:
        keys, copies = ({call.key for call in self.calls}, {call.key for call in self.calls if call.is_copy})
        ended = self.ended_calls()
        if not ended:
            return False
        self.claimed_in_turn, self.copying_in_turn = keys, copies
        self.iterated: list[Key] = []
        for call, outcome in ended:
            is_lost = outcome.is_cancelled or isinstance(outcome.error, _LOSSES)
            assert is_lost or not call.must_be_lost, f"{call} did not hear of the loss"
        self.finish(sorted(ended, key=_order))
        for key in self.iterated:
            self.check_in_order(key)
        return True

    def check_error(self, call: Call, error: BaseException) -> None:
        if isinstance(call.side, Sender):
            # Leaving a block during one of its sends is misuse, and raises an error.
            if not (call.what == "message" and isinstance(error, UsageError)):
                self.check_not_sent(call, error)
        elif call.key is not None:
            self.check_not_taken(call.side, call.key, error)
        else:
            assert isinstance(error, StopAsyncIteration)
            assert call.side.is_gone

    # Results of a sender's calls

    def sent(
        self, message: Message, values: torch.Tensor, block: Block | None, handle: TensorHandle
    ) -> Tensor:
        """Record that a tensor was announced."""
        assert handle.sender == message.sender.sender.id
        assert message.number in (None, handle.message), "two numbers for one message"
        message.number = handle.message
        if message.known is None:
            message.known = self.tick()
        tensor = Tensor(message, handle, values, block)
        assert key_of(handle) not in self.known, "two tensors of one name"
        self.known[key_of(handle)] = tensor
        message.tensors.append(tensor)
        message.tensors.sort(key=lambda tensor: tensor.handle.tensor)  # the sends may return in another order
        return tensor

    def became_whole(self, message: Message) -> None:
        assert message.state == "open" or self.is_discarded(message), "whole, though it was dropped"
        if message.state == "open":
            message.state = "whole" if message.tensors else "dropped"
        numbers = [tensor.handle.tensor for tensor in message.tensors]
        assert numbers == list(range(len(numbers))), "the tensors of a message are not counted up"
        message.whole_in_turn = self.turns

    def check_not_sent(self, call: Call, error: BaseException) -> None:
        """Check the error of a send."""
        sender, message = call.side, call.message
        assert isinstance(sender, Sender)
        may_be_lost = sender.may_have_lost(message.began if message is not None else call.began)
        match error:
            case PeerLostError() | RefusedError():
                assert may_be_lost, f"{call}: nothing was lost: {error}"
            case ClosedError():
                assert sender.end, f"{call}: it was not closed"
            case DiscardedError():
                assert message is not None
                ending = None if call.what == "message" else message.ending
                is_over = message.state == "dropped" or (ending is not None and ending.done())
                assert is_over or self.is_discarded(message), f"{call}: not discarded"
            case WouldBlockError():
                in_use = sender.sender.statistics().bytes_in_use
                # A loss in the same iteration has released everything.
                assert in_use or self.of(sender) or may_be_lost, f"{call}: {error}, and nothing is in use"
            case _:
                raise AssertionError(f"{call} failed: {error!r}") from error

    def is_discarded(self, message: Message, at: Receiver | None = None) -> bool:
        """Return whether either side has discarded a message."""
        if message.discarded_here and at is None:
            return True
        who = [at] if at is not None else self.receivers
        name = message.sender.sender.id
        return message.number is not None and any((one, name, message.number) in self.discards for one in who)

    # Results of a receiver's calls

    def took(self, receiver: Receiver, key: Key, got: torch.Tensor, call: Call | None = None) -> None:
        """Check that a tensor may be taken, and that it is the right one."""
        tensor = self.known[key]
        message = tensor.message
        assert not tensor.is_taken, f"{tensor} was taken twice"
        assert message.state == "whole" or self.is_discarded(message), f"{tensor} of a part of a message"
        assert not message.is_gone, f"{tensor} was taken though it is gone"
        given_up = self.discards.get((receiver, key[0], key[1]))
        was_held = call is not None and call.is_copy and given_up is not None and call.began < given_up
        assert given_up is None or was_held, f"{tensor} was taken though it was discarded"
        assert torch.equal(got, tensor.values), f"{tensor} has other values"
        tensor.is_taken, tensor.taken_at, tensor.taken_by = True, self.tick(), receiver
        tensor.view, tensor.is_copy = got, call is not None and call.is_copy

    def check_in_order(self, key: Key) -> None:
        """Check that an iteration skipped an earlier tensor only if another call waits for it."""
        taken = self.known[key]
        for other in taken.message.sender.messages:
            if other.whole_in_turn < taken.message.whole_in_turn and self.can_be_taken(other):
                passed = [one for one in other.tensors if not one.is_taken]
                passed = [one for one in passed if key_of(one.handle) not in self.claimed_in_turn]
                assert not passed, f"{taken} overtook {passed}"

    def can_be_taken(self, message: Message) -> bool:
        """Return whether a message is certainly available, or in transit."""
        return (
            message.state == "whole"
            and message.sender.end != "killed"
            and not message.may_be_lost
            and not self.is_discarded(message)
        )

    def check_not_taken(self, receiver: Receiver, key: Key, error: BaseException) -> None:
        """Check the error of a receive."""
        tensor = self.known.get(key)
        sender = next(one for one in self.senders if one.sender.id == key[0])
        message = next((one for one in sender.messages if one.number == key[1]), None)
        match error:
            case AlreadyTakenError():
                # The receiver does not store how many tensors a taken message had.
                is_taken = tensor.is_taken if tensor is not None else message is not None and message.is_taken
                assert is_taken or key in self.copying_in_turn, f"{tensor or key} was not taken"
            case DiscardedError():
                if message is not None and message.state == "open" and sender.end == "closed":
                    message.state = "dropped"  # its sender is closing, so it must not become whole any more
                is_known = message is not None and (
                    message.state == "dropped"
                    or self.is_discarded(message)
                    or (message.state == "whole" and key[2] >= len(message.tensors))
                )
                is_over = message is None and sender.end
                given_up = (receiver, key[0], key[1]) in self.discards
                assert is_known or is_over or given_up, f"{tensor or key} was not discarded: {error}"
            case PeerLostError() | RefusedError():
                began = message.began if message is not None else 0
                is_killed = sender.end == "killed" or sender.losses
                assert is_killed or sender.may_have_lost(began), f"{tensor or key} was not lost: {error}"
                assert message is None or sender.end == "killed" or message.may_be_lost
            case ClosedError():
                assert receiver.is_gone
            case WouldBlockError():
                pass  # `settle` checks it
            case _:
                raise AssertionError(f"receiving {tensor or key} failed: {error!r}") from error

    # Ends

    def note_who_waits(self, senders: list[Sender], *, frees_memory: bool = False) -> None:
        """Mark the calls that a loss must end, when nothing else in transit could end them.

        Args:
            senders: the senders of these calls.
            frees_memory: whether the receiver releases memory before the loss, which allocations may get.
        """
        kinds = ["send", "send in a message", "drain", "message"]
        for sender in senders:
            if self.steps.is_held(worker_of(sender.sender)):
                continue
            for call in self.of(sender, *kinds, *([] if frees_memory else ["allocate"])):
                has_its_permit = call.what == "message" and call.begun.opened is not None
                is_over = call.message is not None and call.message.state == "dropped"
                call.must_be_lost |= not has_its_permit and not is_over

    def lose_receiver(self, receiver: Receiver) -> None:
        receiver.is_gone = True
        for sender in self.senders:
            sender.lose(self.tick(), is_certain=sender.met is receiver)
            if sender.met is receiver:
                sender.met = None


def _order(ended: tuple[Call, Outcome]) -> int:
    """Sort results: sends in a message, ends of messages, closings of senders, successful receives, others.

    Each may depend on the results of the kinds before it.
    """
    call, outcome = ended
    if isinstance(call.side, Receiver):
        return 3 + (outcome.error is not None or outcome.is_cancelled)
    return {"message": 1, "close": 2, "drain": 5}.get(call.what, 0)


def is_copied(message: Message) -> bool:
    """Return whether the tensor of a posted message was announced, which wakes its waiters later."""
    session = message.sender.sender._session
    if session is None or message.number not in session.announced:
        return False
    return session.announced[message.number].state is MessageState.WHOLE
