"""The comparison with the model, when nothing is in transit."""

import gc

import torch

from aiotensor import WouldBlockError
from aiotensor.sender import MessageState
from verification.internals import memory_of, permits_of, senders_of, worker_of
from verification.model.ends import EndRules
from verification.model.records import Message, Receiver, Sender, Tensor

_IN_FLIGHT = {MessageState.OPEN.value: "open", MessageState.WHOLE.value: "whole"}


class SettledWorld(EndRules):
    """Compare both sides with the model whenever nothing is in transit."""

    def settle(self) -> None:
        self.become_quiet()
        self._note_what_is_known_now()
        for sender in self.living:
            self._check_sender(sender)
        if self.receiver is not None:
            self._check_receiver(self.receiver)
        self._check_that_nobody_waits_in_vain()
        for tensor in self.alive():
            assert tensor.view is not None
            assert torch.equal(tensor.view, tensor.values), f"{tensor} changed after it was taken"

    def collect(self) -> bool:
        """Free what anyio leaves to the garbage collector; nothing else may need it."""
        if self.has_cancelled_a_thread:
            self.has_cancelled_a_thread = False
            gc.collect()
            return True
        return False

    # The knowledge of both sides

    def _note_what_is_known_now(self) -> None:
        receiver = self.receiver
        for sender in self.senders:
            for loss in sender.losses:
                if loss.noticed is None:
                    loss.noticed = self.tick()
            if sender.end:
                sender.met = None
            elif receiver is not None:
                is_here = sender.sender.id in senders_of(receiver.receiver)
                assert is_here or sender.may_be_refused, f"{sender} did not find {receiver}"
                sender.met = receiver if is_here else None
                if is_here:
                    sender.introduced.add(receiver)
            for message in sender.messages:
                if sender.met or (sender.end and receiver):
                    message.is_gone |= self._is_gone(message)

    def _is_gone(self, message: Message) -> bool:
        given_up = self.receiver is not None and self.is_discarded(message, self.receiver)
        return given_up or message.discarded_here or message.is_lost or message.sender.end == "killed"

    def has_ended(self, message: Message) -> bool:
        """Return whether a message has returned its permit, with its sender connected or gone."""
        return message.is_taken or message.state == "dropped" or self._is_gone(message)

    def is_unclear(self, message: Message) -> bool:
        """Return whether the model cannot decide if a loss or an old discard has ended a message."""
        may_have_ended = message.may_be_lost or self.is_discarded(message)
        return may_have_ended and not self.has_ended(message)

    # One side

    def _check_sender(self, sender: Sender) -> None:
        statistics = sender.sender.statistics()
        present = {
            holder.message: _IN_FLIGHT[holder.state]
            for holder in statistics.holders
            if holder.message is not None and holder.state in _IN_FLIGHT
        }
        for message in sender.messages:
            if message.number is not None and self.is_unclear(message):
                if message.number in present:
                    message.outlived = message.known = self.tick()
                else:
                    message.was_lost = True
        if sender.met is None:
            return
        numbered = [message for message in sender.messages if message.number is not None]
        expected = {message.number: message.state for message in numbered if not self.has_ended(message)}
        assert present == expected, f"{sender} holds permits for {present}, and not for {expected}"
        if self.steps.is_held(worker_of(sender.sender)):
            return
        calls = self.of(sender, "send", "message", "send in a message", "allocate")
        waiting = [call for call in calls if not (call.what == "message" and call.begun.opened)]
        assert statistics.waiting == len(waiting), f"{sender}: {waiting} wait for nothing"
        for_bytes = memory_of(sender.sender).gate.waiting
        assert statistics.bytes_in_use or not for_bytes, f"{sender}: {waiting} wait for bytes that are free"
        begun = [m for m in sender.messages if m.number is None and m.opened and not self.has_ended(m)]
        asking = [call for call in waiting if call.message is not None and call.message.opened is None]
        granted = len(asking) - permits_of(sender.sender).waiting
        if not any(message.may_be_lost for message in begun):
            assert statistics.in_flight == len(present) + len(begun) + granted, f"{sender} has permits left"
        held = [tensor for tensor in self.known.values() if tensor.message.sender is sender]
        is_unclear = any(tensor.view is not None and self._may_be_unpinned(tensor) for tensor in held)
        if not is_unclear and not any(tensor.block and tensor.block.may_be_copied for tensor in held):
            self._check_bytes(sender, held)

    def _may_be_unpinned(self, tensor: Tensor) -> bool:
        return tensor.message.may_be_lost and not tensor.message.is_lost

    def _check_bytes(self, sender: Sender, tensors: list[Tensor]) -> None:
        blocks = {tensor.block for tensor in tensors if tensor.block is not None and self._is_pinned(tensor)}
        blocks |= {block for block in self.allocated if block.side is sender}
        blocks |= {call.block for call in self.of(sender) if call.block and call.block.is_allocated}
        expected = sum(block.nbytes for block in blocks)
        in_use = sender.sender.statistics().bytes_in_use
        holders = sender.sender.statistics().holders
        assert in_use == expected, f"{sender} has {in_use} bytes in use for {holders}, and not for {blocks}"

    def _is_pinned(self, tensor: Tensor) -> bool:
        if tensor.message.is_lost:
            return False
        if tensor.is_taken:
            return tensor.view is not None and not tensor.is_copy
        return not self.has_ended(tensor.message)

    def _check_receiver(self, receiver: Receiver) -> None:
        statistics = receiver.receiver.statistics()
        calls = self.of(receiver, "receive", "iterate")
        assert statistics.waiting == len(calls), f"{calls} wait at {receiver}"
        met = [sender for sender in self.living if sender.met is receiver]
        assert statistics.senders == len(met)
        promised = sum(sender.limit for sender in met)
        assert statistics.promised_messages >= promised
        messages = [message for sender in self.senders for message in sender.messages]
        if any(self.is_unclear(message) for message in messages):
            return
        if any(tensor.block and tensor.block.may_be_copied for tensor in self.known.values()):
            return
        messages = [message for message in messages if self._is_there(receiver, message)]
        left = [message for message in messages if message.sender not in met]
        expected = promised + len(left)
        assert statistics.promised_messages == expected, f"{receiver} has other messages than {left}"
        there = [t for m in messages for t in m.tensors if not t.is_taken]
        assert statistics.unclaimed_tensors == len(there), f"{receiver} has other tensors than {there}"
        leased = [t for t in there if t.block is not None]
        leased += [t for t in self.alive() if t.block and t.taken_by is receiver and not t.is_copy]
        assert statistics.leases == len(leased), f"{receiver} has {statistics.leases} leases: {leased}"
        assert statistics.leased_bytes == sum(t.values.nbytes for t in leased)

    def _is_there(self, receiver: Receiver, message: Message) -> bool:
        sender = message.sender
        is_here = sender.met is receiver or (sender.end == "closed" and message.state == "whole")
        if message.is_posted and message.state == "open":
            return False  # its tensor is not copied yet
        return is_here and not self.has_ended(message) and not message.may_be_lost

    def _check_that_nobody_waits_in_vain(self) -> None:
        receiver = self.receiver
        for call in self.calls:
            is_left = call.what == "message" and call.begun.opened is not None  # its block ends it
            is_over = call.side.is_gone if isinstance(call.side, Receiver) else bool(call.side.end)
            assert is_left or not is_over, f"{call} hangs, though it is closed"
            assert call.message is None or not call.message.ending or not call.message.ending.done(), call
            if call.what == "drain":
                assert isinstance(call.side, Sender)
                assert call.side.sender.statistics().in_flight, f"{call} waits for nothing"
            elif call.what == "copied":
                worker = worker_of(call.begun.sender.sender)
                assert self.steps.is_held(worker), f"{call} waits for nothing"
            elif call.what == "receive" and receiver is not None and call.key is not None:
                sender = next(one for one in self.senders if one.sender.id == call.key[0])
                is_gone = sender.end and receiver in sender.introduced
                assert not is_gone, f"{call} waits for one that is gone"
                if call.key not in self.known:
                    continue
                tensor = self.known[call.key]
                assert tensor.taken_by is not receiver, f"{call} waits for what was taken"
                assert not self._can_be_taken_now(tensor), f"{call} waits for what is here"
                is_met = tensor.message.sender.met is receiver
                assert not (is_met and self.has_ended(tensor.message)), f"{call} waits for what is gone"
            elif call.what == "iterate":
                claimed = {one.key for one in self.calls}
                missed = [self.known[key] for key in self.known.keys() - claimed]
                missed = [tensor for tensor in missed if self._can_be_taken_now(tensor)]
                assert not missed, f"{call} waits, and {missed} are here"

    def _can_be_taken_now(self, tensor: Tensor) -> bool:
        return not tensor.is_taken and self.can_be_taken(tensor.message)

    # The end

    def end(self, *, is_checked: bool) -> None:
        for sender in self.senders:
            self.let_go(sender)
        super().end(is_checked=is_checked)

    def bring_everything_to_its_end(self) -> None:
        """Take all available tensors until no call waits any more, and check the outcome of each tensor."""
        self.free_all()
        if self.receiver is None:
            return
        sending = list(self.calls)
        for _ in range(2 * len(self.calls) + 4):  # each may have to begin, and to end
            self.settle()
            for message in self.open_messages():
                assert message.ending is not None
                with self.steps.inside():
                    message.ending.set_result(None)
            for tensor in list(self.known.values()):
                if not tensor.is_taken:
                    self.take_now(tensor.handle)
                tensor.view = None
            self.free_all()
            sending = [call for call in self.calls if isinstance(call.side, Sender) and call.side.met]
            if sending:
                continue
            met = self._met()
            self.settle()
            if self._met() == met:
                break  # no sender was admitted that was refused before, and whose calls begin now
        else:
            raise AssertionError(f"{sending} never end")
        for tensor in self.known.values():
            fate = self.take_now(tensor.handle)
            assert fate is not None, f"{tensor} came from nowhere"
            is_unknown = tensor.message.sender.met is None and not self.can_be_taken(tensor.message)
            assert not isinstance(fate, WouldBlockError) or is_unknown, f"the outcome of {tensor} is unknown"
            assert tensor.is_taken or not self.can_be_taken(tensor.message), f"{tensor} is {fate!r}"
        for sender in self.living:
            now = sender.sender.statistics()
            if sender.met:
                assert (now.in_flight, now.bytes_in_use, now.waiting) == (0, 0, 0), f"{sender} has {now}"

    def _met(self) -> list[Sender]:
        return [sender for sender in self.living if sender.met]

    def close_all(self) -> None:
        sides: list[Sender | Receiver] = [*self.living]
        sides += [self.receiver] if self.receiver is not None else []
        for side in sides if self.now % 2 else reversed(sides):
            if isinstance(side, Sender):
                self._close_sender(side)
            else:
                self._close_receiver(side)
            self.turn(self.now % 3)

    def check_that_nothing_is_left(self) -> None:
        for sender in self.senders:
            assert sender.sender.statistics().waiting == 0, f"a call waits at {sender}, which is closed"
        for receiver in self.receivers:
            assert receiver.receiver.statistics().unclaimed_tensors == 0, f"{receiver} is closed"
        super().check_that_nothing_is_left()
