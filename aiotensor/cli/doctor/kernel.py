"""Checks of the kernel, by trial: memfds, Unix sockets, the end of processes, and copied pages."""

import ctypes
import errno
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from aiotensor.cli.doctor.finding import Finding, Status
from aiotensor.cli.doctor.software import release_of

__all__ = ["copied_pages", "kernel", "process_ends", "shared_memory", "unix_sockets"]

_DATA = b"written at one end, read at the other"
_SIZE = mmap.PAGESIZE
_FIRST_WITH_MEMFD = (3, 17)
_PEER = struct.Struct("iII")  # struct ucred: pid, uid, gid
_SO_PEERPIDFD = 77  # the module `socket` of Python 3.11 has no name for it
_ENTRY = struct.Struct("Q")  # of a page in /proc/self/pagemap, with these flags
_IN_USE = 3 << 62  # in memory or swapped out
_OF_FILE = 1 << 61  # of a file or of shared memory
_FORBIDDEN = "Allow it: an old kernel, a sandbox or the seccomp profile of a container forbids it"
_SHORT = {
    errno.EMFILE: "Raise the limit on open files: ulimit -n 1024",
    errno.ENFILE: "Raise the limit on open files of the whole machine: sysctl fs.file-max",
    errno.EFBIG: "Raise the limit on the size of files: ulimit -f unlimited",
    errno.ENOENT: "Mount /proc: shared memory is opened by its path there",
    errno.ENOMEM: "Free some memory, or raise the limit: ulimit -v unlimited",
}
_NOT_LINUX = "Use the kernel directly: a layer above it, such as a sandbox, does not behave like Linux"


class _TrialError(Exception):
    """A trial has failed.

    Args:
        what: the failure, as a phrase.
        advice: the remedy.
    """

    def __init__(self, what: str, advice: str = _NOT_LINUX) -> None:
        super().__init__(what)
        self.advice = advice


def kernel(system: str, release: str) -> Finding:
    """Check the results of `platform.system()` and `platform.release()`."""
    found = f"{system} {release}".strip()
    if system != "Linux":
        return Finding(Status.PROBLEM, found, "Use Linux: aiotensor supports no other system")
    if release_of(release) < _FIRST_WITH_MEMFD:
        return Finding(Status.PROBLEM, found, "Update it: memfd_create requires Linux 3.17")
    return Finding(Status.OK, found)


def shared_memory() -> Finding:
    """Check that a memfd can be sealed, passed over a socket, and mapped on both ends."""
    return _tried(_share_a_memfd, "a memfd can be sealed, passed over a socket and mapped")


def unix_sockets() -> Finding:
    """Check that a pair of sockets preserves records, and reports the credentials of the peer."""
    return _tried(_send_records, "SOCK_SEQPACKET preserves records, SO_PEERCRED identifies the peer")


def process_ends() -> Finding:
    """Check how a publisher is notified when the process of a subscriber ends."""
    unnoticed = "the memory of a killed subscriber stays in use until other memory replaces it"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else "missing in this build of Python"
        return Finding(
            Status.NOTE,
            f"the end of another process cannot be detected (pidfd_open: {reason}): {unnoticed}",
            "Use Linux 5.3 or later, and allow pidfd_open in the seccomp profile of a container",
        )
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours, theirs:
            os.close(ours.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    except OSError as error:
        return Finding(
            Status.NOTE,
            f"subscribers are identified by their pids (SO_PEERPIDFD: {error.strerror}): if another process "
            f"gets that pid, {unnoticed}",
            "Use Linux 6.5 or later; it matters only if subscribers are killed",
        )
    return Finding(Status.OK, "SO_PEERPIDFD and pidfd_open report the end of a subscriber")


def copied_pages() -> Finding:
    """Check that /proc/self/pagemap distinguishes copied pages from shared ones."""
    try:
        is_copied = _copied()
    except OSError as error:
        found = f"/proc/self/pagemap cannot be read: {error.strerror or error}"
    else:
        if is_copied == [False, True]:
            return Finding(Status.OK, "/proc/self/pagemap shows which pages a subscriber has written")
        found = "/proc/self/pagemap does not show which pages were written"
    return Finding(
        Status.NOTE,
        f"{found}: a subscriber maps all pages of a tensor again for the next one, written or not",
        "Mount /proc without restrictions; subscribers work without it, but need more processor time",
    )


def _copied() -> list[bool]:
    """Return, for a shared page and a private one, whether the kernel reports it as a copied page."""
    with (
        mmap.mmap(-1, _SIZE, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as shared,
        mmap.mmap(-1, _SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as private,
        open("/proc/self/pagemap", "rb", buffering=0) as pagemap,
    ):
        entries = []
        for page in (shared, private):
            page[0] = 1
            # The object with the address must be freed before the page can be unmapped.
            address = ctypes.addressof(ctypes.c_char.from_buffer(page))
            data = os.pread(pagemap.fileno(), _ENTRY.size, address // _SIZE * _ENTRY.size)
            if len(data) != _ENTRY.size:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            entries.append(_ENTRY.unpack(data)[0])
    return [bool(entry & _IN_USE) and not entry & _OF_FILE for entry in entries]


def _tried(trial: Callable[[], None], found: str) -> Finding:
    try:
        trial()
    except _TrialError as error:
        return Finding(Status.PROBLEM, str(error), error.advice)
    return Finding(Status.OK, found)


@contextmanager
def _step(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        advice = _SHORT.get(error.errno or 0, _FORBIDDEN)
        raise _TrialError(f"{what} failed: {error.strerror or error}", advice) from error


def _share_a_memfd() -> None:
    if not hasattr(os, "memfd_create") or not hasattr(fcntl, "F_ADD_SEALS"):
        raise _TrialError(
            "this build of Python has no os.memfd_create or no fcntl.F_ADD_SEALS",
            "Use a build for glibc 2.27 or later, such as that of a Linux distribution",
        )
    with _step("memfd_create"):
        descriptor = os.memfd_create("aiotensor-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "r+b", buffering=0):
        with _step("setting the size of a memfd"):
            os.ftruncate(descriptor, _SIZE)
        with _step("sealing a memfd"):
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        for size in (0, 2 * _SIZE):
            with suppress(OSError):
                os.ftruncate(descriptor, size)
                raise _TrialError("a sealed memfd can still be resized, so a reader could be crashed")
        with _step("mapping a sealed memfd"), mmap.mmap(descriptor, _SIZE) as ours:
            ours[: len(_DATA)] = _DATA
            received = _passed_over_a_socket(descriptor)
            with (
                open(received, "r+b", buffering=0),
                _step("mapping a memfd that was passed over a socket"),
                mmap.mmap(received, _SIZE) as theirs,
            ):
                if theirs[: len(_DATA)] != _DATA:
                    raise _TrialError(
                        "a memfd that was passed over a socket does not contain the written data"
                    )
        with _step("opening a memfd under /proc/self/fd"):
            os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))


def _passed_over_a_socket(descriptor: int) -> int:
    """Pass a descriptor over a pair of sockets, and return the received one, which the caller must close."""
    with _step("passing a descriptor (SCM_RIGHTS)"):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours, theirs:
            theirs.setblocking(False)
            socket.send_fds(ours, [b"x"], [descriptor])
            _, received, _, _ = socket.recv_fds(theirs, 1, 1)
    if not received:
        raise _TrialError("a descriptor that was passed over a socket (SCM_RIGHTS) did not arrive")
    return received[0]


def _send_records() -> None:
    with _step("a Unix socket of type SOCK_SEQPACKET"):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.setblocking(False)  # a sent record can be received immediately, or never
        with _step("sending over SOCK_SEQPACKET"):
            ours.send(b"first")
            ours.send(b"second")
            records_are_kept = theirs.recv(64) == b"first" and theirs.recv(64) == b"second"
        if not records_are_kept:
            raise _TrialError("SOCK_SEQPACKET does not preserve the boundaries of records")
        with _step("SO_PEERCRED"):
            answer = ours.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    if len(answer) != _PEER.size or _PEER.unpack(answer)[:2] != (os.getpid(), os.geteuid()):
        raise _TrialError("SO_PEERCRED does not identify the process at the other end")
