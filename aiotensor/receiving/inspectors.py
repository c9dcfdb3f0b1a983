"""Those who look at a receiver, and the accounts of senders that they wait for.

An observer has a connection of its own, on which it says nothing but that it looks. It is told at once what
the receiver knows. What a sender holds is known to that sender alone, which is asked. Until it has answered
it is not asked again, and whoever looks meanwhile waits for the same answer: what a stopped sender has to
read does not grow. Nothing here waits, since an observer knows best for how long it wants to.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from aiotensor.errors import ProtocolError
from aiotensor.protocol.frames import MAX_ROWS, Account, Inquire, Report, SenderRow, encode
from aiotensor.transports.base import ReceiverLink
from aiotensor.types import MAX_NUMBER, ReceiverStatistics

__all__ = ["Observers", "reports"]

_INQUIRE = encode(Inquire())


def reports(statistics: ReceiverStatistics, senders: Sequence[SenderRow]) -> Iterator[Report]:
    """Tell of a receiver and its senders, in as many parts as records need."""
    told = _bounded(statistics)
    for start in range(0, max(1, len(senders)), MAX_ROWS):
        end = start + MAX_ROWS
        yield Report(told, tuple(senders[start:end]), last=end >= len(senders))


def _bounded(statistics: ReceiverStatistics) -> ReceiverStatistics:
    """Have what is more than a frame can say be the most: a limit may be as large as its user likes."""
    numbers = msgspec.structs.asdict(statistics).items()
    large = {name: MAX_NUMBER for name, number in numbers if isinstance(number, int) and number > MAX_NUMBER}
    return msgspec.structs.replace(statistics, **large)


class Observers:
    """Who looks at a receiver, and which senders owe an account to whom."""

    def __init__(self) -> None:
        self._observers: dict[ReceiverLink, None] = {}  # in the order in which they began to look
        self._asked: dict[ReceiverLink, set[ReceiverLink]] = {}  # senders, and the observers of each

    def __contains__(self, link: ReceiverLink) -> bool:
        return link in self._observers

    def __len__(self) -> int:
        return len(self._observers)

    @property
    def oldest(self) -> ReceiverLink | None:
        """The connection that has looked for longest; None if none looks."""
        return next(iter(self._observers), None)

    def add(self, observer: ReceiverLink) -> None:
        """Note that a connection is that of an observer."""
        self._observers[observer] = None

    def ask(self, observer: ReceiverLink, senders: Iterable[ReceiverLink]) -> None:
        """Have the account of each sender handed to an observer, as soon as there is one."""
        for sender in senders:
            asked = self._asked.get(sender)
            if asked is not None:
                asked.add(observer)
                continue
            self._asked[sender] = {observer}
            sender.write(_INQUIRE)  # if that fails, it is forgotten right here

    def answered(self, link: ReceiverLink, sender: str, account: Account) -> None:
        """Hand the account of a sender to those who look.

        Raises:
            ProtocolError: it was not asked for one.
        """
        observers = self._asked.pop(link, None)
        if observers is None:
            raise ProtocolError("it gave an account that nobody asked for")
        if observers:
            record = encode(msgspec.structs.replace(account, sender=sender))
            for observer in list(observers):
                observer.write(record)

    def forget(self, link: ReceiverLink) -> None:
        """Note that somebody is gone, a sender or an observer."""
        self._asked.pop(link, None)
        if link in self._observers:
            del self._observers[link]
            for observers in self._asked.values():
                observers.discard(link)
