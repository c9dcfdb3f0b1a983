"""The exceptions that aiotensor defines.

    AioTensorError
    |-- ClosedError             you closed this object, or all producers of a queue have closed
    |-- PeerLostError           the other side died, broke the connection or stopped its work
    |-- RefusedError            the other side refused this one, because of a limit or a version
    |-- DiscardedError          the message of this tensor was discarded
    |-- AlreadyTakenError       the tensor of this handle was received before
    |-- WouldBlockError         a call would have to wait, or has waited, for longer than allowed
    |   `-- UnavailableError    because no process at the other side has answered
    |-- TooLargeError           the requested amount could never fit
    |-- UnsupportedTensorError  this tensor cannot be sent unchanged (also a TypeError)
    |-- ProtocolError           the peer violated the protocol
    |-- AccessDeniedError       the peer runs as another user, or the keys do not match
    |-- RemoteError             the handler on the other side raised an error
    `-- UsageError              this object cannot be used from here (also a RuntimeError)

Invalid arguments, such as a limit of zero or a path in place of a tensor, raise the built-in ``ValueError``
and ``TypeError``.
"""

import errno
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
    "UnavailableError",
    "UnsupportedTensorError",
    "UsageError",
    "WouldBlockError",
]

E = TypeVar("E", bound=Exception)

# No descriptors, memory or threads are left in this process or on this machine. A later call may succeed.
_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.ENOBUFS, errno.EAGAIN))


# All keyword arguments below have defaults, so that errors can be pickled: unpickling creates an error from
# its text alone, and then restores the attributes.


_NONE = Usage()


class AioTensorError(Exception):
    """The base class of all exceptions that aiotensor defines."""


class ClosedError(AioTensorError):
    """You closed this object, so open a new one; or all producers of a queue have closed it."""


class PeerLostError(AioTensorError):
    """The other side died, broke the connection, or stopped its work on a request.

    Attributes:
        pid: the process id of the other side, or None if it is unknown.
    """

    def __init__(self, text: str, *, pid: int | None = None) -> None:
        super().__init__(text)
        self.pid = pid


class RefusedError(AioTensorError):
    """The other side refused the connection, because of a limit or a version.

    The other side has reached one of its limits (`max_senders`, `max_mapped_bytes`, `max_unclaimed_messages`,
    `max_subscribers`, `max_clients`, or `ulimit -v` of its process), the two sides use different versions of
    the protocol, or the two ends of a pipe have different settings. The text names the cause. The connection
    is not retried in the background, because waiting would not help: change the limit, the version or the
    setting. The next call tries again.

    Attributes:
        pid: the process id of the other side, or None if it is unknown.
    """

    def __init__(self, text: str, *, pid: int | None = None) -> None:
        super().__init__(text)
        self.pid = pid


class DiscardedError(AioTensorError):
    """The tensor's message was discarded by either side, or its sender closed without sending it."""


class AlreadyTakenError(AioTensorError):
    """The tensor of this handle was received before; a tensor can be received only once."""


class WouldBlockError(AioTensorError):
    """A call would have to wait, or has waited, for longer than allowed.

    A ``_nowait`` call never waits, other calls wait for at most `max_wait_s`, and no call begins a wait that
    could never end.

    Attributes:
        messages: the limit, the usage and the requested number of messages.
        bytes: the limit, the usage and the requested number of bytes of shared memory.
    """

    def __init__(self, text: str, *, messages: Usage = _NONE, bytes: Usage = _NONE) -> None:  # noqa: A002
        super().__init__(text)
        self.messages = messages
        self.bytes = bytes


class UnavailableError(WouldBlockError):
    """No process at the other side has answered, and the call must not wait for one any longer.

    Calls wait for a receiver, a publisher or a server for at most `max_wait_s`. If no receiver or server has
    been connected for `grace_s` seconds, they fail at once. No process has received anything of the message,
    so the call can be repeated.
    """


class TooLargeError(AioTensorError):
    """The requested amount could never fit.

    Attributes:
        limit: the largest possible amount.
        requested: the requested amount.
        unit: the unit of both: ``bytes``, or ``tensors`` of one message.
    """

    def __init__(self, text: str, *, limit: int = 0, requested: int = 0, unit: str = "bytes") -> None:
        super().__init__(text)
        self.limit = limit
        self.requested = requested
        self.unit = unit


class UnsupportedTensorError(AioTensorError, TypeError):
    """This tensor cannot be sent unchanged; the text names the property and a remedy."""


class ProtocolError(AioTensorError):
    """The peer violated the protocol; its connection is closed, and nothing more is read from it."""


class AccessDeniedError(AioTensorError):
    """The peer runs as another user, or the two sides do not agree on their keys."""


class RemoteError(AioTensorError):
    """The handler on the other side raised an error.

    Attributes:
        type_name: the name of the type of that error.
    """

    def __init__(self, text: str, *, type_name: str = "") -> None:
        super().__init__(text)
        self.type_name = type_name


class UsageError(AioTensorError, RuntimeError):
    """This object cannot be used in this way: unopened, after a fork, or in another thread or event loop."""


def again(error: E) -> E:
    """Return a copy of an error without its traceback."""
    again = type(error)(*error.args)
    again.__dict__.update(error.__dict__)
    again.__cause__ = error.__cause__
    return again


def is_shortage(error: BaseException) -> bool:
    """Return whether descriptors, memory or threads were missing, so that a later attempt may succeed."""
    # The errors of ZeroMQ have an `errno`, too, but are not instances of `OSError`.
    return isinstance(error, MemoryError) or getattr(error, "errno", None) in _EXHAUSTED
