"""How a connection of ZeroMQ ended: closed by the peer, reset, or ended here."""

import errno
import os
import socket

from aiotensor.runtime.descriptors import Descriptor, copy_of

__all__ = ["ConnectionEnd"]

_CLOSE_WAIT = 8  # the state of TCP in which the peer has closed, and nothing else has happened


class ConnectionEnd:
    """Find out from the kernel how a connection ended, by a copy of its descriptor.

    The error that ZeroMQ reports does not tell. The first call that meets a reset consumes its error, and a
    read after that looks like one after a clean close. After a timeout it is that of an earlier failure, of
    any connection of the same thread.

    Args:
        descriptor: of the connection. ZeroMQ may have closed it by now, and the number be that of another
            connection: then the answer may be wrong, and one more handshake is needed to tell.
    """

    def __init__(self, descriptor: int) -> None:
        try:
            self._copy = Descriptor(os.dup(descriptor))
        except OSError:  # ZeroMQ has closed it, or there are no descriptors left
            self._copy = Descriptor(-1)

    def is_clean(self, error: int) -> bool:
        """Return whether the peer closed the connection and all its data was read.

        Args:
            error: errno, as ZeroMQ reports it; decides if the kernel cannot be asked.
        """
        if error != errno.EPIPE or self._copy.number < 0:
            return error == errno.EPIPE
        try:
            with copy_of(self._copy.number) as sock:
                is_at_end = not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                if sock.family == socket.AF_UNIX:
                    return is_at_end
                [state] = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        except OSError:  # it was reset, or it is still open
            return False
        return is_at_end and state == _CLOSE_WAIT

    def close(self) -> None:
        """Release the copy, without which the peer would not see the end of the connection."""
        self._copy.close()
