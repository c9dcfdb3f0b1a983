"""The file of a socket that listens: taking its path from a dead receiver, and leaving nothing there."""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import threading

from aiotensor.errors import UsageError

__all__ = ["SocketFile"]

_BACKLOG = 128


class SocketFile:
    """A socket and the path where it listens.

    Taking the path may have to wait for another process, so it runs in a thread, which goes on when whoever
    asked for it is cancelled. Then the thread cleans up, since only it knows what there is.

    Args:
        path: where it is to listen.
        sock: what is to listen; belongs to this object.
    """

    def __init__(self, path: str, sock: socket.socket) -> None:
        self._path = path
        self._sock = sock
        self._identity: tuple[int, int] | None = None  # of the file
        self._changing = threading.Lock()
        self._is_taking = False
        self._is_left = False

    def take(self) -> None:
        """Give the socket its path, which only this user may use, and listen. Not for the event loop.

        Raises:
            UsageError: a receiver listens there, or no socket can be there.
        """
        with self._changing:
            if self._is_left:
                return
            self._is_taking = True
        try:
            self._bind()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UsageError(
                    f"there is a file at {self._path} already that is no socket of this user: "
                    "choose another path"
                ) from error
            raise UsageError(f"nobody can listen at {self._path}: {error.strerror}") from error
        finally:
            self._taken()

    def leave(self) -> None:
        """Remove the file, and close the socket; if the path is being taken, that is done when it is."""
        with self._changing:
            self._is_left = True
            if not self._is_taking:
                self._clean_up()

    def _bind(self) -> None:
        # The file gets the mode that the socket has now, so that there is no moment when others may connect.
        os.fchmod(self._sock.fileno(), 0o600)
        folder = os.open(os.path.dirname(self._path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Two receivers that find the same stale socket must not both replace it.
            fcntl.flock(folder, fcntl.LOCK_EX)
            if self._is_left:
                return  # nobody shall see what nobody wants any more
            self._remove_stale()
            self._sock.bind(self._path)
            status = os.stat(self._path)
            self._identity = status.st_dev, status.st_ino
            # While the folder is locked: a socket that does not listen looks stale.
            self._sock.listen(_BACKLOG)
        finally:
            self._taken()  # while the folder is locked: the next receiver finds either all or nothing
            os.close(folder)

    def _taken(self) -> None:
        with self._changing:
            self._is_taking = False
            if self._is_left:
                self._clean_up()

    def _clean_up(self) -> None:
        # Somebody may have put another file there in the meantime.
        if self._identity is not None:
            with contextlib.suppress(OSError):
                status = os.stat(self._path)
                if (status.st_dev, status.st_ino) == self._identity:
                    os.unlink(self._path)
            self._identity = None
        self._sock.close()

    def _remove_stale(self) -> None:
        """Remove the socket of a receiver that is dead.

        Raises:
            UsageError: it is alive.
        """
        # A datagram socket never connects to one with connections: if that lives, the kernel says that it is
        # of another kind, and the receiver does not notice.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
            try:
                probe.connect(self._path)
            except FileNotFoundError:
                return
            except ConnectionRefusedError:
                if self._may_remove():
                    os.unlink(self._path)
                return  # if not, binding says what is wrong
            except OSError as error:
                if error.errno != errno.EPROTOTYPE:
                    raise
        raise UsageError(
            f"a receiver listens at {self._path} already: close that one, or choose another path"
        )

    def _may_remove(self) -> bool:
        """Say whether there is a socket of this user, and not somebody's file."""
        try:
            status = os.lstat(self._path)
        except FileNotFoundError:
            return False
        return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid()
