"""The credit for messages that may wait at a server, counted by both ends of a connection.

    client: SendWindow                           server: ReceiveWindow
      sent, in messages and bytes --- messages --->   arrived
      taken  <--- in answers, or alone once half of the window was taken ---  taken

Both ends count from the beginning of the connection, so a late total is harmless. The messages that the
client has sent and the server has not taken never exceed the window; their bytes exceed it by at most one
message.
"""

from aiotensor.errors import ProtocolError

__all__ = ["ReceiveWindow", "SendWindow"]


class SendWindow:
    """The client's end, which computes the remaining credit.

    Args:
        messages: the maximum number of messages that may wait at the server.
        nbytes: the bytes of waiting messages at which the client stops sending.
    """

    def __init__(self, messages: int, nbytes: int) -> None:
        self._limit = messages
        self._limit_bytes = nbytes
        self._sent = self._sent_bytes = 0
        self._taken = self._taken_bytes = 0

    @property
    def credit(self) -> int:
        """The number of messages that may be sent now; their bytes may use up the credit earlier."""
        has_bytes = self._sent_bytes - self._taken_bytes < self._limit_bytes
        return self._limit - (self._sent - self._taken) if has_bytes else 0

    def sent(self, nbytes: int) -> None:
        """Count a sent message of `nbytes` bytes."""
        self._sent += 1
        self._sent_bytes += nbytes

    def taken(self, messages: int, nbytes: int) -> None:
        """Record the total messages and bytes that the server has taken.

        Raises:
            ProtocolError: a total is less than before, or more than was sent.
        """
        if not (self._taken <= messages <= self._sent and self._taken_bytes <= nbytes <= self._sent_bytes):
            raise ProtocolError(
                f"it took {messages} messages with {nbytes} bytes, but {self._sent} with {self._sent_bytes} "
                f"bytes were sent, and it had taken {self._taken} with {self._taken_bytes} bytes before"
            )
        self._taken, self._taken_bytes = messages, nbytes


class ReceiveWindow:
    """The server's end, which counts the messages that wait, and the messages that were taken.

    The arguments are those of `SendWindow`.

    Attributes:
        waiting: the number of messages that wait.
        taken: the number of messages that no longer wait.
        taken_bytes: the bytes of the messages that no longer wait.
    """

    def __init__(self, messages: int, nbytes: int) -> None:
        self.waiting = 0
        self.taken = self.taken_bytes = 0
        self._limit = messages
        self._limit_bytes = nbytes
        self._waiting_bytes = 0
        self._reported = self._reported_bytes = 0

    def arrived(self, nbytes: int) -> None:
        """Count a message of `nbytes` bytes that begins to wait.

        Raises:
            ProtocolError: the client had no credit for the message.
        """
        if self.waiting >= self._limit or self._waiting_bytes >= self._limit_bytes:
            raise ProtocolError(
                f"it sent another message while {self.waiting} messages of {self._waiting_bytes} bytes were "
                "already waiting"
            )
        self.waiting += 1
        self._waiting_bytes += nbytes

    def take(self, nbytes: int) -> bool:
        """Count a message of `nbytes` bytes that no longer waits, and return whether to report the totals.

        The totals are reported even without an answer once half of the window was taken since the last
        report, because the client may be waiting for credit.
        """
        self.waiting -= 1
        self._waiting_bytes -= nbytes
        self.taken += 1
        self.taken_bytes += nbytes
        return (
            2 * (self.taken - self._reported) >= self._limit
            or 2 * (self.taken_bytes - self._reported_bytes) >= self._limit_bytes
        )

    def reported(self, messages: int, nbytes: int) -> None:
        """Record the totals that were sent to the client."""
        self._reported = max(self._reported, messages)
        self._reported_bytes = max(self._reported_bytes, nbytes)
