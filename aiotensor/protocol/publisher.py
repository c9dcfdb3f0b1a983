"""A publisher's end of one connection to a subscriber.

    OPENING --admit--> OPEN --Close, either way; violation--> CLOSED
       |                                                        ^
       '--refuse; violation-------------------------------------'

The `Subscribe` has arrived when the object is created. `Backlog` implements the states of publications.
"""

from msgspec.structs import replace

from aiotensor.errors import ProtocolError
from aiotensor.protocol.audience import Backlog, Item
from aiotensor.protocol.broadcast import (
    FROM_SUBSCRIBER,
    Admit,
    Detach,
    FromSubscriber,
    ToSubscriber,
)
from aiotensor.protocol.connection import CLOSED, OPEN, OPENING, Close
from aiotensor.protocol.frames import (
    MAX_RECORD_BYTES,
    VERSION,
    Attach,
    Discard,
    Discarded,
    Release,
    Subscribe,
    Taken,
    Welcome,
    encode_record,
)
from aiotensor.protocol.records import RecordConnection

__all__ = ["PublisherConnection"]


class PublisherConnection(RecordConnection[FromSubscriber, ToSubscriber]):
    """A publisher's end of one connection.

    Args:
        subscribe: the first frame of the subscriber.
        welcome: the answer to it, if the subscriber is admitted.

    Attributes:
        subscribe: the first frame of the subscriber.
        mismatch: the reason to refuse the subscriber because of its version; None if there is none.
        backlog: the publications of the subscriber; empty until it is admitted.
        freed: the blocks that the subscriber has released, once for each pin; the owner of this object
            removes these pins.
    """

    def __init__(self, subscribe: Subscribe, welcome: Welcome) -> None:
        super().__init__(
            "publisher", "the subscriber", FROM_SUBSCRIBER, welcome.max_frame_bytes, MAX_RECORD_BYTES
        )
        self.subscribe = subscribe
        self.mismatch = self.record_hello(subscribe.version, subscribe.pid, VERSION)
        self.backlog = Backlog(1, None)
        self.freed: list[int] = []
        self._welcome = welcome

    # Commands

    def admit(self, backlog: Backlog, admit: Admit) -> None:
        """Admit the subscriber, with its backlog and the frame that states the limits."""
        self.backlog = backlog
        self._send(self._welcome)
        self._send(admit)
        self.state = OPEN

    def refuse(self, reason: str) -> None:
        """Close the connection because of a limit, or because of the version of the subscriber."""
        if self.state is OPENING:  # the subscriber reads the version in the `Welcome`
            self._send(replace(self._welcome, is_admitted=False))
        self.close(Close(reason, is_refusal=True))

    def attach(self, segment: int, placement: str, nbytes: int) -> bytes:
        """Return the record that shares a segment; write it after earlier records, with the descriptor."""
        return encode_record([Attach(segment, placement, nbytes)])

    def detach(self, segment: int) -> None:
        """Withdraw a segment in which the subscriber uses no block."""
        self._send(Detach(segment))

    def announce(self, item: Item) -> None:
        """Announce a publication with its record, which is the same for all subscribers."""
        if self.state is CLOSED:
            return
        if self._frames:
            self._records = list(self.data_to_send())
        self._records.append(item.record)

    def withdraw(self, number: int) -> None:
        """Withdraw a publication; the subscriber confirms this unless it has taken the publication."""
        self._send(Discard(number))

    # Frames of the subscriber

    def _validate(self, frame: FromSubscriber) -> None:
        if self.state is not OPEN:
            self.check_open()
        match frame:
            case Taken():
                for number in frame.messages:
                    self.backlog.taken(number)
            case Release():
                for block in frame.blocks:
                    self.backlog.released(block)
                    self.freed.append(block)  # kept even if the next block is a violation
            case Discarded():
                for number in frame.messages:
                    self.freed += [block for block, _ in self.backlog.discarded(number).blocks]
            case Close():
                self.state = CLOSED
            case _:
                raise ProtocolError("it sent a frame that no subscriber sends")
