"""The order in which a server takes messages."""

from collections import OrderedDict, deque
from collections.abc import Iterator

from aiotensor.channel.asked import Asked, Client

__all__ = ["Turns"]


class Turns:
    """Order messages so that clients take turns; the messages of one client stay in their order.

    A client with many waiting messages gets no more turns than a client with one.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[Client, deque[Asked]] = OrderedDict()  # whose turn it is first

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Asked]:
        for messages in self._waiting.values():
            yield from messages

    def add(self, asked: Asked) -> None:
        """Add a message behind the others of its client."""
        self._waiting.setdefault(asked.client, deque()).append(asked)

    def put_back(self, asked: Asked) -> None:
        """Return a message to the front, as if it had not been taken."""
        self._waiting.setdefault(asked.client, deque()).appendleft(asked)
        self._waiting.move_to_end(asked.client, last=False)

    def take(self) -> Asked:
        """Take a message of the client whose turn it is, which is the last one then.

        Raises:
            KeyError: no message waits.
        """
        client, messages = self._waiting.popitem(last=False)
        asked = messages.popleft()
        if messages:
            self._waiting[client] = messages
        return asked

    def remove(self, asked: Asked) -> None:
        """Remove a message if it waits."""
        messages = self._waiting.get(asked.client)
        if messages is not None and asked in messages:
            messages.remove(asked)
            if not messages:
                del self._waiting[asked.client]
