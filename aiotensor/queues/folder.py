"""The folder of a queue: its settings, and a numbered slot for each producer and consumer.

A slot is a file of one byte, which its process locks. The kernel releases the lock when the process ends, so
that the file shows how it ended:

    UNUSED --claimed--> LIVE --closed--> CLOSED
                        |  ^
                ended   |  |   claimed again
                        v  |
                        DEAD

A producer closes its slot once all its messages were taken. A closed slot of a producer is not claimed again,
but that of a consumer is. Methods without `await` take a few system calls, and none of them waits.
"""

import asyncio
import contextlib
import enum
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import quote

from aiotensor.errors import ClosedError, UsageError
from aiotensor.runtime.descriptors import Descriptor
from aiotensor.transports.address import socket_path

__all__ = ["Folder", "Kind", "Slot", "SlotState"]

# Other processes lock a dead slot for a moment to read its state, so one attempt to claim it may fail.
_ATTEMPTS = 10
_RETRY_S = 0.02

_UNUSED, _OPEN, _CLOSED = b"-", b"o", b"c"

_SETTINGS = "settings"  # the numbers of producers and consumers
_OWNER = "owner"  # locked by the process that has made a private folder
_CLOSING = "closing"  # exists once the queue was closed
_SOCKETS = ("messages", "tensors")  # of a consumer, in a folder of its own


class Kind(enum.Enum):
    """The kind of a slot; the value begins the name of its file."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


class SlotState(enum.Enum):
    """The state of a slot."""

    UNUSED = "no process has claimed it"
    LIVE = "its process has it open"
    CLOSED = "its process has closed it"
    DEAD = "its process has ended without closing it"


class Slot:
    """A slot that this process has claimed, until it is released.

    Attributes:
        number: its number.
    """

    def __init__(self, number: int, file: Descriptor) -> None:
        self.number = number
        self._file = file

    def mark_closed(self) -> None:
        """Record that the producer or consumer has closed properly."""
        os.pwrite(self._file.number, _CLOSED, 0)

    def release(self) -> None:
        """Unlock the slot; releasing again has no effect."""
        _unlock(self._file)


class Folder(NamedTuple):
    """The folder of a queue, as every process sees it.

    Attributes:
        path: the absolute path.
        producers: the number of slots for producers.
        consumers: the number of slots for consumers.
        is_private: whether the folder was made for this queue, and is removed with it.
    """

    path: str
    producers: int
    consumers: int
    is_private: bool

    # Names

    def address(self, consumer: int) -> str:
        """Return the address of a consumer.

        Raises:
            ValueError: the path of the folder is too long for a socket.
        """
        address = "engine://" + quote(os.fsencode(self._of(f"c{consumer}")))
        socket_path(address, "ipc")
        return address

    def _of(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _slot(self, kind: Kind, number: int) -> str:
        return self._of(f"{kind.value}-{number}")

    def count(self, kind: Kind) -> int:
        """Return the number of slots of one kind."""
        return self.producers if kind is Kind.PRODUCER else self.consumers

    @property
    def _slots(self) -> Iterator[str]:
        for kind in Kind:
            for number in range(self.count(kind)):
                yield self._slot(kind, number)

    # The life of the folder

    def create(self) -> None:
        """Create the missing files of the folder, and the folder itself unless it exists.

        Raises:
            UsageError: the folder belongs to a queue with other numbers of producers or consumers, or to
                another user.
            OSError: the folder cannot be created.
        """
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path, 0o700)
        found = os.stat(self.path)
        if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
            raise UsageError(f"{self.path} is not a folder of this user: choose another folder for the queue")
        for number in range(self.consumers):
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._of(f"c{number}"), 0o700)
        for path in self._slots:
            _create(path, _UNUSED)
        settings = f"{self.producers} producers and {self.consumers} consumers"
        _create(self._of(_SETTINGS), settings.encode())
        with open(self._of(_SETTINGS)) as file:
            existing = file.read()
        if existing != settings:
            raise UsageError(
                f"the queue in {self.path} has {existing}, not {settings}: pass the same numbers to each "
                "MessageQueue of this folder, or choose another folder"
            )

    def own(self) -> Descriptor:
        """Lock a private folder for the process that has made it; the folder remains until its release."""
        path = self._of(_OWNER)
        _create(path, b"")
        file = Descriptor(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        fcntl.flock(file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file

    def close(self, owner: Descriptor | None) -> None:
        """Remove the files of the folder: now, or when the last producer or consumer ends.

        Args:
            owner: the lock of a private folder.
        """
        if owner is not None:
            _unlock(owner)
        if os.path.exists(self._of(_SETTINGS)):
            _create(self._of(_CLOSING), b"")
        self.remove_if_unused()

    def remove_if_unused(self) -> None:
        """Remove the files of a closed queue, or of a queue whose owner is dead, if no process uses them."""
        is_closing = os.path.exists(self._of(_CLOSING))
        if not (is_closing or self.is_private):
            return
        paths = [self._of(_OWNER)] * self.is_private + list(self._slots)
        with contextlib.ExitStack() as locked:
            for path in paths:
                file = _locked(path)
                if file is None:
                    return
                locked.callback(_unlock, file)
            # While all files are locked, no process claims a slot. A process that has opened one of these
            # files finds afterwards that it was removed.
            self._remove(paths)

    def _remove(self, slots: list[str]) -> None:
        for number in range(self.consumers):
            for name in _SOCKETS:
                _unlink(os.path.join(self._of(f"c{number}"), name))  # left by a killed process
            with contextlib.suppress(OSError):
                os.rmdir(self._of(f"c{number}"))
        for path in [*slots, self._of(_SETTINGS), self._of(_CLOSING)]:
            _unlink(path)
        if self.is_private:
            with contextlib.suppress(OSError):
                os.rmdir(self.path)

    # Slots

    async def claim(self, kind: Kind) -> Slot:
        """Claim a free slot, and return it.

        Waits at most 0.2 s. Cancellation claims no slot.

        Raises:
            ClosedError: the queue was closed.
            UsageError: all slots are claimed, or all producers have closed.
        """
        for _ in range(_ATTEMPTS):
            slot = self._try_to_claim(kind)
            if slot is not None:
                return slot
            await asyncio.sleep(_RETRY_S)
        count, name = self.count(kind), kind.value
        raise UsageError(
            f"this queue is for {count} {name}s, and as many are open or have closed: pass a larger number "
            f"of {name}s to MessageQueue"
        )

    def _try_to_claim(self, kind: Kind) -> Slot | None:
        states = self.states(kind)
        is_producer = kind is Kind.PRODUCER
        if is_producer and all(state is SlotState.CLOSED for state in states):
            raise UsageError(
                f"all {len(states)} producers of this queue have closed, so its consumers have reached the "
                "end: create a new MessageQueue, or pass a larger number of producers"
            )
        for wanted in (SlotState.UNUSED, SlotState.DEAD, SlotState.CLOSED):
            for number, state in enumerate(states):
                file = _locked(self._slot(kind, number)) if state is wanted else None
                if file is None:
                    continue
                if is_producer and os.pread(file.number, 1, 0) == _CLOSED:
                    _unlock(file)
                    continue
                os.pwrite(file.number, _OPEN, 0)
                return Slot(number, file)
        return None

    def states(self, kind: Kind) -> list[SlotState]:
        """Return the states of the slots of one kind.

        Raises:
            ClosedError: the queue was closed.
        """
        return [self._state(self._slot(kind, number)) for number in range(self.count(kind))]

    def _state(self, path: str) -> SlotState:
        try:
            file = Descriptor(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except FileNotFoundError:
            raise self._was_closed() from None
        with contextlib.closing(file):
            state = os.pread(file.number, 1, 0)
            if state == _OPEN:
                try:
                    fcntl.flock(file.number, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return SlotState.LIVE
                state = os.pread(file.number, 1, 0)  # it may have been closed since
                fcntl.flock(file.number, fcntl.LOCK_UN)
        if state == _OPEN:
            return SlotState.DEAD
        return SlotState.CLOSED if state == _CLOSED else SlotState.UNUSED

    def _was_closed(self) -> ClosedError:
        return ClosedError(
            f"the queue in {self.path} was closed: close a MessageQueue after its producers and consumers"
        )


def _create(path: str, content: bytes) -> None:
    """Create a file with its content, unless it exists; other processes never see it without the content."""
    if os.path.exists(path):
        return
    temporary = f"{path}.{secrets.token_hex(8)}"
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, content)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.close(file)
        os.unlink(temporary)


def _locked(path: str) -> Descriptor | None:
    """Lock a file, and return it; return None if another process has locked or removed it."""
    try:
        file = Descriptor(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    if os.fstat(file.number).st_nlink == 0:
        _unlock(file)
        return None
    return file


def _unlock(file: Descriptor) -> None:
    # Closing the descriptor is not sufficient: a child that another thread is starting has a copy of it until
    # the child runs its program.
    if file.number >= 0:
        with contextlib.closing(file):
            fcntl.flock(file.number, fcntl.LOCK_UN)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
