"""How many messages may wait at a server, counted at both ends of a connection.

    client: Window                               server: Tally
      sent, in messages and bytes --- messages --->   arrived
      taken  <--- in answers, or by itself once half of the window was taken --- taken

Both count from the beginning of the connection, so a count that comes late does no harm. What one side sent
and the other has not taken is never more than the window; in bytes, than that and one message.
"""

from aiotensor.errors import ProtocolError

__all__ = ["Tally", "Window"]


class Window:
    """The client's end.

    Args:
        messages: the most that may wait.
        nbytes: after how many bytes of them no more is sent.
    """

    def __init__(self, messages: int, nbytes: int) -> None:
        self._limit = messages
        self._limit_bytes = nbytes
        self._sent = self._sent_bytes = 0
        self._taken = self._taken_bytes = 0

    @property
    def is_open(self) -> bool:
        """Say whether another message may be sent."""
        return (
            self._sent - self._taken < self._limit
            and self._sent_bytes - self._taken_bytes < self._limit_bytes
        )

    def sent(self, nbytes: int) -> None:
        """Count a message."""
        self._sent += 1
        self._sent_bytes += nbytes

    def taken(self, messages: int, nbytes: int) -> None:
        """Take what the server says that it has taken in all.

        Raises:
            ProtocolError: it took less than before, or more than was sent.
        """
        if not (self._taken <= messages <= self._sent and self._taken_bytes <= nbytes <= self._sent_bytes):
            raise ProtocolError(f"it took {messages} messages, of {self._sent} that were sent")
        self._taken, self._taken_bytes = messages, nbytes


class Tally:
    """The server's end.

    Args:
        messages: the most that may wait.
        nbytes: after how many bytes of them no more may be sent.
    """

    def __init__(self, messages: int, nbytes: int) -> None:
        self.taken = self.taken_bytes = 0
        self._limit = messages
        self._limit_bytes = nbytes
        self._waiting = self._waiting_bytes = 0
        self._told = self._told_bytes = 0

    def arrived(self, nbytes: int) -> None:
        """Count a message that waits.

        Raises:
            ProtocolError: it is one too many.
        """
        if self._waiting >= self._limit or self._waiting_bytes >= self._limit_bytes:
            raise ProtocolError(
                f"it sent another message while {self._waiting}, of {self._waiting_bytes} bytes, wait already"
            )
        self._waiting += 1
        self._waiting_bytes += nbytes

    @property
    def waiting(self) -> int:
        """Count the messages that wait."""
        return self._waiting

    def take(self, nbytes: int) -> None:
        """Count a message that waits no more."""
        self._waiting -= 1
        self._waiting_bytes -= nbytes
        self.taken += 1
        self.taken_bytes += nbytes

    def told(self, messages: int, nbytes: int) -> None:
        """Note that the client hears of what was taken at some moment."""
        self._told, self._told_bytes = max(self._told, messages), max(self._told_bytes, nbytes)

    @property
    def is_due(self) -> bool:
        """Say whether the client must hear of it without an answer, since it may be waiting for that."""
        return (
            2 * (self.taken - self._told) >= self._limit
            or 2 * (self.taken_bytes - self._told_bytes) >= self._limit_bytes
        )
