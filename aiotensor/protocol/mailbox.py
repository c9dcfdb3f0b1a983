"""The tensors that have arrived at a receiver, and the states of their messages and senders.

A message:

    (unknown) --put--> open --end--> whole --every tensor taken--> taken
        |               |              |
        '---------------+--------------'--discard, by either side--> discarded

A tensor can be taken only from a whole message, so a message arrives completely or not at all. A sender:

    (unknown) --join--> joined --leave--> left      its whole messages stay until they are taken
                           |
                           '----lose----> lost      its tensors cannot be taken any more
                           ^               |
                           '-----join------'        tensors of earlier connections stay lost

A tensor is taken in two steps, because the call can be cancelled in between: `hold` reserves the tensor, then
`finish` takes it or `put_back` returns it. A *claim* is a call that waits for one tensor by its handle;
`hold_next`, which serves iterations, skips claimed tensors. It returns messages in the order in which they
became whole; once it has returned one tensor of a message, it continues with this message.

`Connection` has validated the order of frames before they change a mailbox.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

from aiotensor.errors import (
    AioTensorError,
    AlreadyTakenError,
    DiscardedError,
    PeerLostError,
    ProtocolError,
    RefusedError,
)
from aiotensor.protocol.arrived import ArrivedMessage, Claims, Key, SenderRecord

T = TypeVar("T")

# The maximum number of ranges of ended messages that are remembered for each sender over all its connections,
# and of departed senders that are remembered. Errors for older messages are less exact (taken, discarded or
# lost), and a call with a handle of an older sender waits as if the sender had not connected yet.
REMEMBERED_RANGES = 1024
REMEMBERED_SENDERS = 4096


class Mailbox(Generic[T]):
    """Store tensors as they arrive, and return each of them once.

    Methods that change the result of `hold` for some tensors return the keys of these tensors, so that the
    caller can wake the calls that wait for them.

    Attributes:
        claims: the calls that wait for tensors by their handles; `hold_next` skips these tensors.
        messages_discarded: the number of discarded messages.
        messages_left: the number of untaken messages of senders that have closed.
    """

    def __init__(self) -> None:
        self.claims = Claims()
        self.messages_discarded = 0
        self.messages_left = 0
        self._senders: dict[str, SenderRecord[T]] = {}
        self._departed: OrderedDict[str, None] = OrderedDict()
        self._never_connected: OrderedDict[str, None] = OrderedDict()  # known only from discarded handles
        # Whole messages by their first keys, in the order in which iterations deliver them.
        self._whole: OrderedDict[Key, ArrivedMessage[T]] = OrderedDict()

    @property
    def unclaimed_tensors(self) -> int:
        """The number of stored tensors."""
        return sum(record.unclaimed_tensors for record in self._senders.values())

    @property
    def unclaimed_bytes(self) -> int:
        """The bytes of the stored tensors."""
        return sum(record.unclaimed_bytes for record in self._senders.values())

    # Frames of senders

    def join(self, sender: str, pid: int, limit: int, first: int = 0) -> Sequence[Key]:
        """Record that a sender has connected, for the first time or again.

        Args:
            sender: the id of the sender.
            pid: the process id of the sender.
            limit: the maximum number of messages that the sender may have in flight.
            first: the number of the first message of this connection; earlier ones are lost.

        Raises:
            ProtocolError: a sender with this id is connected or has closed, or numbers of messages repeat.
        """
        record = self._record(sender)
        if (record.joined and record.loss is None) or first < record.next:
            raise ProtocolError(f"sender {sender} has already connected, or reuses numbers of messages")
        self._never_connected.pop(sender, None)
        self._departed.pop(sender, None)
        record.joined = True
        record.loss = None
        record.pid = pid
        record.limit = limit
        record.first = record.next = first
        record.ended.keep_last(REMEMBERED_RANGES)  # each connection may add a gap
        return self.claims.of_sender(sender) if first else []

    def has_joined(self, sender: str) -> bool:
        """Return whether a sender is remembered as connected, closed, lost or refused."""
        record = self._senders.get(sender)
        return record is not None and record.joined

    def wants(self, sender: str, number: int) -> bool:
        """Return whether to store the tensors of a message: False if it has ended, even before it arrived."""
        record = self._senders[sender]
        if number in record.messages:
            return True
        if number >= record.next:
            record.next = number + 1
            if not record.discarded:
                return True
        return number not in record.ended

    def put(self, key: Key, item: T, nbytes: int, *, last: bool = False) -> Sequence[Key]:
        """Store the next tensor of a message that `wants` accepts; `last` makes the message whole."""
        record = self._senders[key.sender]
        message = record.messages.get(key.message)
        if message is None:
            message = record.messages[key.message] = ArrivedMessage()
        message.tensors[key.tensor] = item
        message.keys.append(key)
        message.sizes.append(nbytes)
        record.unclaimed_tensors += 1
        record.unclaimed_bytes += nbytes
        if not last or key.tensor or self.claims.by_message:
            return self.end(key.sender, key.message) if last else []
        message.count = 1  # as `end`, without a call
        self._whole[key] = message
        return message.keys

    def end(self, sender: str, number: int) -> Sequence[Key]:
        """Complete a message, which becomes whole; this has no effect on a message that has ended."""
        message = self._senders[sender].messages.get(number)
        if message is None:
            return []
        count = message.count = len(message.tensors)
        keys = message.keys
        self._whole[keys[0]] = message
        for tensor in self.claims.by_message.get((sender, number), ()):
            if not 0 <= tensor < count:
                keys = [*keys, Key(sender, number, tensor)]
        return keys

    def leave(self, sender: str) -> Sequence[Key]:
        """Record that a sender has closed: its whole messages stay, and the others are discarded."""
        record = self._senders[sender]
        for number in [number for number, message in record.messages.items() if message.count is None]:
            self.messages_discarded += 1
            self._drop(record, number)
        record.left = True
        self.messages_left += len(record.messages)
        self._remember(self._departed, sender)
        return self.claims.of_sender(sender)

    def lose(self, sender: str, error: AioTensorError, pid: int | None = None) -> Sequence[Key]:
        """Record that a sender is gone or was refused, so that its tensors cannot be taken any more.

        This has no effect on a sender that has closed.
        """
        record = self._record(sender)
        if record.left:
            return []
        self._never_connected.pop(sender, None)
        record.pid = pid or record.pid
        record.joined = True
        record.loss = record.last_loss = error
        for number in list(record.messages):
            self._drop(record, number)
        self._remember(self._departed, sender)
        return self.claims.of_sender(sender)

    def discard(self, sender: str, number: int) -> Sequence[Key]:
        """Discard a message, even before it arrives; this has no effect on a message that has ended.

        The sender may be unknown. It may also be lost: its hello of a new connection may be unread.
        """
        record = self._record(sender)
        if not record.joined:
            self._remember(self._never_connected, sender)
        if (
            number in record.ended
            or (record.loss is not None and number < record.next)
            or (record.left and number not in record.messages)
        ):
            return []
        self._drop(record, number)
        # Each message in flight may add a gap, but handles of unknown messages have arbitrary numbers.
        record.ended.keep_first(record.limit + REMEMBERED_RANGES)
        self.messages_discarded += 1
        return self.claims.of_message(sender, number)

    # Calls that take tensors

    def hold(self, key: Key) -> T | None:
        """Reserve a tensor and return it; None if it has not arrived.

        Raises:
            AlreadyTakenError: the tensor was taken before, or another call holds it.
            DiscardedError: its message was discarded, or the message ended or its sender closed without it.
            PeerLostError: its sender is gone.
            RefusedError: its sender was refused.
        """
        record = self._senders.get(key.sender)
        if record is None:
            return None
        message = record.messages.get(key.message)
        is_expected = record.loss is None and not (record.left or record.discarded)
        if message is None and key.message >= record.next and is_expected:
            return None  # the usual reason to wait, found without a call
        # A stored message has neither ended nor been lost.
        if (
            message is None
            or message.count is None
            or key.tensor not in message.tensors
            or key.tensor in message.held
        ):
            reason = self._why_never(key, record)
            if reason is not None:
                raise reason
            return None
        message.held.add(key.tensor)
        return message.tensors[key.tensor]

    def _why_never(self, key: Key, record: SenderRecord[T]) -> AioTensorError | None:
        """Return the error to raise for a tensor that cannot be held; None if it may still arrive."""
        name = f"tensor {key.tensor} of message {key.message} of sender {key.sender}"
        is_lost = record.loss is not None or key.message < record.first
        message = record.messages.get(key.message)
        if key.message in record.ended:
            if key.message in record.discarded:
                return _lost(key, record) if is_lost else DiscardedError(f"{name} was discarded")
        elif is_lost:
            return _lost(key, record)
        elif message is None or message.count is None:
            if record.left:
                return DiscardedError(f"{name} was never sent: its sender (pid {record.pid}) closed")
            return None
        elif not 0 <= key.tensor < message.count:
            return DiscardedError(f"{name} was never sent: the message ended after {message.count} tensors")
        return AlreadyTakenError(f"{name} was already received: keep the tensor, or send it again")

    def finish(self, key: Key) -> bool:
        """Take a held tensor, and return whether it was the last one of its message."""
        record = self._senders.get(key.sender)
        message = record.messages.get(key.message) if record is not None else None
        if record is None or message is None:
            return False  # discarded or lost while it was held; the call receives it nevertheless
        del message.tensors[key.tensor]
        record.unclaimed_tensors -= 1
        record.unclaimed_bytes -= message.sizes[key.tensor]
        if message.tensors:
            return False
        del record.messages[key.message], self._whole[message.keys[0]]
        self.messages_left -= record.left
        stops = record.ended.stops
        if stops and stops[-1] == key.message:  # as `add`, without a call
            stops[-1] += 1
        else:
            record.ended.add(key.message)
        return True

    def put_back(self, key: Key) -> Sequence[Key]:
        """Return a held tensor to its place."""
        record = self._senders.get(key.sender)
        message = record.messages.get(key.message) if record is not None else None
        if message is None:
            return []  # discarded or lost while it was held
        message.held.discard(key.tensor)
        return [key]

    def hold_next(self) -> tuple[Key, T, int] | None:
        """Reserve the next tensor that no call claims, and return it; None if there is none.

        Returns:
            the key of the tensor, the tensor, and the number of all tensors of its message.
        """
        claims = self.claims.by_message
        for message in self._whole.values():
            for tensor, item in message.tensors.items():
                key = message.keys[tensor]
                if tensor in message.held or (claims and key in self.claims):
                    continue
                message.held.add(tensor)
                count = len(message.keys)
                if count > 1:
                    self._whole.move_to_end(message.keys[0], last=False)
                return key, item, count
        return None

    def unclaimed_of(self, sender: str) -> tuple[int, int]:
        """Return the number of stored tensors of a sender, and their bytes."""
        record = self._senders[sender]
        return record.unclaimed_tensors, record.unclaimed_bytes

    def clear(self) -> None:
        """Drop all tensors; claims stay until their calls withdraw them."""
        for record in self._senders.values():
            record.messages.clear()
            record.unclaimed_tensors = record.unclaimed_bytes = 0
        self._whole.clear()
        self.messages_left = 0

    def _record(self, sender: str) -> SenderRecord[T]:
        record = self._senders.get(sender)
        if record is None:
            record = self._senders[sender] = SenderRecord()
        return record

    def _drop(self, record: SenderRecord[T], number: int) -> None:
        """Drop the tensors of a message, and discard it."""
        message = record.messages.pop(number, None)
        record.discard(number)
        if message is not None:
            record.unclaimed_tensors -= len(message.tensors)
            record.unclaimed_bytes -= sum(message.sizes[tensor] for tensor in message.tensors)
            self._whole.pop(message.keys[0], None)  # absent unless the message is whole
            self.messages_left -= record.left

    def _remember(self, senders: OrderedDict[str, None], sender: str) -> None:
        """Remember a sender that is not connected; beyond the limit, forget the oldest one."""
        senders[sender] = None
        if len(senders) > REMEMBERED_SENDERS:
            # A sender with messages that can still be taken stays.
            oldest = next((name for name in senders if not self._senders[name].messages), None)
            if oldest is not None:
                del senders[oldest], self._senders[oldest]


def _lost(key: Key, record: SenderRecord[T]) -> AioTensorError:
    # Messages of an earlier connection were lost with that connection, and not by the refusal.
    if isinstance(record.loss, RefusedError) and key.message >= record.next:
        return RefusedError(
            f"sender {key.sender} (pid {record.pid}) was refused: {record.loss}", pid=record.pid
        )
    error = PeerLostError(
        f"the connection to sender {key.sender} (pid {record.pid}) was lost before its tensors were taken: "
        f"{record.last_loss or 'it had connected to another receiver'}",
        pid=record.pid,
    )
    error.__cause__ = record.last_loss
    return error
