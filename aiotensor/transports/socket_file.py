"""The file of a listening socket: takes over the path of a dead receiver, and removes the file at the end."""

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import stat

from aiotensor.errors import UsageError
from aiotensor.runtime.descriptors import Descriptor, close_after_fork
from aiotensor.runtime.logs import logger_of

__all__ = ["BACKLOG", "SocketFile"]

logger = logger_of("transports")

BACKLOG = 128

# The delays between attempts while another process holds the lock of the folder, usually for a few system
# calls. A wait of `_LONG_WAIT_S` is logged.
_FIRST_RETRY_S = 0.005
_LAST_RETRY_S = 0.25
_LONG_WAIT_S = 1.0

# Why the kernel refuses a socket or its folder, apart from a path that is in use.
_REASONS = {
    errno.ENOENT: "the folder of the socket does not exist",
    errno.ENOTDIR: "the folder of the socket is not a directory",
    errno.EACCES: "this user may not create a socket in the folder",
    errno.EPERM: "this user may not create a socket in the folder",
    errno.EROFS: "the folder of the socket is on a read-only file system",
}


class SocketFile:
    """A socket and the path where it listens; belongs to the event loop's thread.

    Args:
        path: the path.
        sock: the socket, which belongs to this object.
    """

    def __init__(self, path: str, sock: socket.socket) -> None:
        close_after_fork(sock)
        self.path = path
        self._folder = os.path.dirname(path)
        self.sock = sock
        self._identity: tuple[int, int] | None = None  # of the file

    async def take(self) -> None:
        """Bind the socket to its path, with a file that only this user may use, and listen.

        Waits while another process holds the lock of the folder, as a receiver does briefly while it opens
        there. Never blocks the event loop, and uses no thread. Cancellation leaves nothing at the path.

        Raises:
            UsageError: another object listens at the path, or the file there is not a socket of this user.
            FileNotFoundError: the folder does not exist; `filename` names it.
            NotADirectoryError: the folder is not a directory.
            PermissionError: this user may not read the folder, or not create a socket in it.
            OSError: the file system is read-only or does not support sockets, or no descriptor is left.
        """
        try:
            folder = Descriptor(os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError as error:
            raise self._refused(error) from error
        with contextlib.closing(folder):
            await self._lock(folder.number)
            try:
                self._listen()
            finally:
                # A child that another thread is starting has a copy of the descriptor until it runs its
                # program. Closing the descriptor here would leave the folder locked until then.
                fcntl.flock(folder.number, fcntl.LOCK_UN)

    def leave(self) -> None:
        """Remove the file, if it is still this socket's, and close the socket."""
        if self._identity is not None:
            with contextlib.suppress(OSError):
                if _identity_of(self.path) == self._identity:
                    os.unlink(self.path)
            self._identity = None
        self.sock.close()

    async def _lock(self, folder: int) -> None:
        """Wait for the lock of the folder: two receivers that find one stale socket must not both replace it.

        The folder itself is locked, because a separate lock file would be left behind.
        """
        # This polls, because a thread that waits in the kernel cannot be cancelled, and would keep the
        # interpreter from exiting.
        loop = asyncio.get_running_loop()
        began, delay, was_logged = loop.time(), _FIRST_RETRY_S, False
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waited_s = loop.time() - began
                if waited_s >= _LONG_WAIT_S and not was_logged:
                    was_logged = True
                    logger.warning(
                        "waiting for the lock of the folder %s, which another process holds: %s cannot be "
                        "opened before it is released",
                        self._folder,
                        self.path,
                        extra={
                            "event": "folder_locked",
                            "address": self.path,
                            "folder": self._folder,
                            "waited_s": waited_s,
                        },
                    )
                await asyncio.sleep(delay)
                delay = min(2 * delay, _LAST_RETRY_S)
            except OSError as error:  # not every file system supports locks
                raise self._refused(error) from error
            else:
                return

    def _listen(self) -> None:
        # The file gets the mode that the socket has when it is bound, so other users can never connect.
        os.fchmod(self.sock.fileno(), 0o600)
        self._remove_stale()
        try:
            self.sock.bind(self.path)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UsageError(
                    f"a file that is not a socket of this user already exists at {self.path}: choose another "
                    "path"
                ) from error
            raise self._refused(error) from error
        self._identity = _identity_of(self.path)
        # Listen while the folder is still locked: a socket that does not listen looks stale.
        self.sock.listen(BACKLOG)

    def _remove_stale(self) -> None:
        """Remove the socket file of a dead receiver.

        Raises:
            UsageError: the receiver is alive.
        """
        # A datagram socket cannot connect to a socket of another type. If the receiver is alive, the kernel
        # reports the wrong type (EPROTOTYPE), and the receiver does not notice the attempt.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
            try:
                probe.connect(self.path)
            except FileNotFoundError:
                return
            except ConnectionRefusedError:
                try:
                    status = os.lstat(self.path)
                    if stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid():
                        os.unlink(self.path)
                except OSError as error:
                    if not isinstance(error, FileNotFoundError):
                        raise self._refused(error) from error
                return  # binding raises the error if the path names another file
            except PermissionError:
                return  # a file of another user, or a closed folder: binding raises the error
            except OSError as error:
                if error.errno != errno.EPROTOTYPE:
                    raise OSError(error.errno, error.strerror, self.path) from error
        raise UsageError(
            f"a running receiver, publisher or server already listens at {self.path}: stop it, or choose "
            "another path"
        )

    def _refused(self, error: OSError) -> OSError:
        """Return an error that names the folder; `OSError` chooses the subclass by the errno."""
        reason = _REASONS.get(error.errno or 0)
        if reason is None:
            return OSError(error.errno, f"cannot listen at {self.path}: {error.strerror}", self._folder)
        return OSError(error.errno, f"{reason}, so nothing can listen at {self.path}", self._folder)


def _identity_of(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
