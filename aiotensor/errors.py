"""Every error that aiotensor raises on purpose.

    AioTensorError
    |-- ClosedError             you closed this object
    |-- PeerLostError           the other side died, broke the connection or stopped its work
    |-- RefusedError            the other side does not admit this one: a limit, or another version
    |-- DiscardedError          the message of this tensor was discarded
    |-- AlreadyTakenError       this handle was received before
    |-- WouldBlockError         a call would have to wait, or has waited, for longer than it may
    |-- TooLargeError           could never fit
    |-- UnsupportedTensorError  this tensor cannot travel faithfully (also a TypeError)
    |-- ProtocolError           the peer sent what the protocol forbids
    |-- AccessDeniedError       the peer is another user
    |-- RemoteError             the handler on the other side raised
    `-- UsageError              this object cannot be used from here (also a RuntimeError)

Arguments that are wrong in themselves (a limit of zero, a path where a tensor belongs) raise the
built-in ``ValueError`` and ``TypeError``.
"""

from typing import TypeVar

from aiotensor.types import Usage

__all__ = [
    "AccessDeniedError",
    "AioTensorError",
    "AlreadyTakenError",
    "ClosedError",
    "DiscardedError",
    "PeerLostError",
    "ProtocolError",
    "RefusedError",
    "RemoteError",
    "TooLargeError",
    "UnsupportedTensorError",
    "UsageError",
    "WouldBlockError",
]

E = TypeVar("E", bound=Exception)


# The keyword arguments below all have defaults, so that errors survive pickle: it rebuilds them
# from the text alone and then restores the attributes.


_NONE = Usage()


class AioTensorError(Exception):
    """The root of every error that aiotensor raises on purpose."""


class ClosedError(AioTensorError):
    """You closed this object; open a new one."""


class PeerLostError(AioTensorError):
    """The other side died, broke the connection, or stopped its work on a request.

    Attributes:
        pid: the process id of the other side, or None if it is unknown.
    """

    def __init__(self, text: str, *, pid: int | None = None) -> None:
        super().__init__(text)
        self.pid = pid


class RefusedError(AioTensorError):
    """The other side refuses this one.

    It has reached one of its limits (`max_senders`, `max_mapped_bytes`, `max_unclaimed_messages`,
    `max_clients`, or `ulimit -v` of its process), or the two sides speak different versions of the protocol.
    The text names the limit or the versions. Nothing is retried in the background, since waiting does not
    help: change the limit or the version. The next call asks again.

    Attributes:
        pid: the process id of the other side, or None if it is unknown.
    """

    def __init__(self, text: str, *, pid: int | None = None) -> None:
        super().__init__(text)
        self.pid = pid


class DiscardedError(AioTensorError):
    """The tensor's message was discarded by either side, or its sender closed without sending it."""


class AlreadyTakenError(AioTensorError):
    """This handle was received before; a tensor can be taken once."""


class WouldBlockError(AioTensorError):
    """A call would have to wait, or has waited, for longer than it may.

    A ``_nowait`` call may not wait at all, others for as long as `max_wait_s` says; and none where waiting
    would never end.

    Attributes:
        messages: limit, in use and requested, counted in messages.
        bytes: the same, in bytes of shared memory.
    """

    def __init__(self, text: str, *, messages: Usage = _NONE, bytes: Usage = _NONE) -> None:  # noqa: A002
        super().__init__(text)
        self.messages = messages
        self.bytes = bytes


class TooLargeError(AioTensorError):
    """The requested amount could never fit.

    Attributes:
        limit: the largest possible amount, in bytes (or in tensors of one message).
        requested: the requested amount.
    """

    def __init__(self, text: str, *, limit: int = 0, requested: int = 0) -> None:
        super().__init__(text)
        self.limit = limit
        self.requested = requested


class UnsupportedTensorError(AioTensorError, TypeError):
    """This tensor cannot be sent unchanged; the text names the property and a remedy."""


class ProtocolError(AioTensorError):
    """The peer sent what the protocol forbids; its link is closed and nothing more is read from it."""


class AccessDeniedError(AioTensorError):
    """The peer runs as another user."""


class RemoteError(AioTensorError):
    """The handler on the other side raised.

    Attributes:
        type_name: the name of the error's type over there.
    """

    def __init__(self, text: str, *, type_name: str = "") -> None:
        super().__init__(text)
        self.type_name = type_name


class UsageError(AioTensorError, RuntimeError):
    """This object cannot be used from here: after a fork, from another thread or event loop, or unopened."""


def again(error: E) -> E:
    """Return a copy of an error without its traceback."""
    again = type(error)(*error.args)
    again.__dict__.update(error.__dict__)
    again.__cause__ = error.__cause__
    return again
