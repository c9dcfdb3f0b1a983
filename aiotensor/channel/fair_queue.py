"""The order in which a server takes requests."""

from collections import OrderedDict, deque
from collections.abc import Iterator

from aiotensor.channel.remote_client import IncomingRequest, RemoteClient

__all__ = ["FairQueue"]


class FairQueue:
    """Order requests so that clients take turns; the requests of one client stay in their order.

    A client with many waiting requests gets no more turns than a client with one.
    """

    def __init__(self) -> None:
        # The client whose turn it is first.
        self._waiting: OrderedDict[RemoteClient, deque[IncomingRequest]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[IncomingRequest]:
        for requests in self._waiting.values():
            yield from requests

    def add(self, incoming: IncomingRequest) -> None:
        """Add a request behind the others of its client."""
        self._waiting.setdefault(incoming.client, deque()).append(incoming)

    def put_back(self, incoming: IncomingRequest) -> None:
        """Return a request to the front, as if it had not been taken."""
        self._waiting.setdefault(incoming.client, deque()).appendleft(incoming)
        self._waiting.move_to_end(incoming.client, last=False)

    def take(self) -> IncomingRequest:
        """Take a request of the client whose turn it is, which is the last one then.

        Raises:
            KeyError: no request waits.
        """
        client, requests = self._waiting.popitem(last=False)
        incoming = requests.popleft()
        if requests:
            self._waiting[client] = requests
        return incoming

    def remove(self, incoming: IncomingRequest) -> None:
        """Remove a request if it waits."""
        requests = self._waiting.get(incoming.client)
        if requests is not None and incoming in requests:
            requests.remove(incoming)
            if not requests:
                del self._waiting[incoming.client]
