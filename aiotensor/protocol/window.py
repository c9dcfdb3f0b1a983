"""Credit for the messages that may wait at a server, counted at both ends of a connection.

    client: Window                               server: Tally
      sent, in messages and bytes --- messages --->   arrived
      taken  <--- in answers, or alone once half of the window was taken ---  taken

Both count from the beginning of the connection, so a late count does no harm. The messages that the client
has sent and the server has not taken never exceed the window; their bytes exceed it by at most one message.
"""

from aiotensor.errors import ProtocolError

__all__ = ["Tally", "Window"]


class Window:
    """The client's end: the credit that is left.

    Args:
        messages: the most messages that may wait.
        nbytes: the bytes of waiting messages at which the client stops sending.
    """

    def __init__(self, messages: int, nbytes: int) -> None:
        self._limit = messages
        self._limit_bytes = nbytes
        self._sent = self._sent_bytes = 0
        self._taken = self._taken_bytes = 0

    @property
    def credit(self) -> int:
        """The number of messages that may be sent, if their bytes do not end it before."""
        has_bytes = self._sent_bytes - self._taken_bytes < self._limit_bytes
        return self._limit - (self._sent - self._taken) if has_bytes else 0

    def sent(self, nbytes: int) -> None:
        """Count a sent message."""
        self._sent += 1
        self._sent_bytes += nbytes

    def taken(self, messages: int, nbytes: int) -> None:
        """Update the total that the server has taken.

        Raises:
            ProtocolError: the total is less than before, or more than was sent.
        """
        if not (self._taken <= messages <= self._sent and self._taken_bytes <= nbytes <= self._sent_bytes):
            raise ProtocolError(f"it took {messages} messages, of {self._sent} that were sent")
        self._taken, self._taken_bytes = messages, nbytes


class Tally:
    """The server's end: the messages that wait, and those taken.

    Args:
        messages: the most messages that may wait.
        nbytes: the bytes of waiting messages at which the client must stop sending.
    """

    def __init__(self, messages: int, nbytes: int) -> None:
        self.taken = self.taken_bytes = 0
        self._limit = messages
        self._limit_bytes = nbytes
        self._waiting = self._waiting_bytes = 0
        self._told = self._told_bytes = 0

    def arrived(self, nbytes: int) -> None:
        """Count a message that begins to wait.

        Raises:
            ProtocolError: the client had no credit for it.
        """
        if self._waiting >= self._limit or self._waiting_bytes >= self._limit_bytes:
            raise ProtocolError(
                f"it sent another message while {self._waiting}, of {self._waiting_bytes} bytes, wait already"
            )
        self._waiting += 1
        self._waiting_bytes += nbytes

    @property
    def waiting(self) -> int:
        """The number of messages that wait."""
        return self._waiting

    def take(self, nbytes: int) -> None:
        """Count a message that no longer waits."""
        self._waiting -= 1
        self._waiting_bytes -= nbytes
        self.taken += 1
        self.taken_bytes += nbytes

    def told(self, messages: int, nbytes: int) -> None:
        """Record the totals that were sent to the client."""
        self._told, self._told_bytes = max(self._told, messages), max(self._told_bytes, nbytes)

    @property
    def is_due(self) -> bool:
        """Return whether to send credit without an answer, since the client may be waiting for it."""
        return (
            2 * (self.taken - self._told) >= self._limit
            or 2 * (self.taken_bytes - self._told_bytes) >= self._limit_bytes
        )
