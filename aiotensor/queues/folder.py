"""The folder of a queue: the sockets of its consumers, and a file with a slot for each producer and consumer.

A slot is one byte of the file. The process that claims a slot locks this byte, and the kernel releases the
lock when the process ends. So the byte of a producer and its lock show whether it is open, and how it ended:

    UNUSED --claimed--> LIVE --closed--> CLOSED
                        |  ^
                 ended  |  |  claimed again
                        v  |
                        DEAD

A producer closes its slot once all its messages were taken, and a closed slot is not claimed again. The byte
of a consumer never changes; its lock shows whether another one may take its place. The methods take a few
system calls, and wait at most while another process creates the file.
"""

import contextlib
import enum
import fcntl
import os
import stat
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from aiotensor.errors import ClosedError, PeerLostError, UsageError
from aiotensor.runtime.descriptors import Descriptor, change_lock, conflicting_lock
from aiotensor.transports.endpoints import route_to

_SLOTS = "slots"  # the numbers of producers and consumers follow the slots in this file

# The bytes of slots. Whether an open one is live or dead depends on its lock.
_UNUSED, _OPEN, _CLOSED = b"-", b"o", b"c"

# The first byte is the state of the queue; the process that has made a private folder locks it.
_REMOVED = b"r"


class SlotState(enum.Enum):
    """The state of the slot of a producer."""

    UNUSED = "no process has claimed it"
    LIVE = "its process has it open"
    CLOSED = "its process has closed it"
    DEAD = "its process has ended without closing it"


class Slot:
    """A slot that this process has claimed, until it is released.

    Args:
        file: the file of slots; its locks belong to this slot.
        place: the byte in the file.
        number: the number among the slots of its kind.
    """

    def __init__(self, file: Descriptor, place: int, number: int) -> None:
        self.number = number
        self._file = file
        self._place = place

    def mark_closed(self) -> None:
        """Record that the producer has closed."""
        os.pwrite(self._file.number, _CLOSED, self._place)

    def release(self) -> None:
        """Unlock the slot; called once."""
        with contextlib.closing(self._file):
            # Closing the descriptor is not sufficient: a child that another thread is starting has a copy of
            # it until the child runs its program.
            change_lock(self._file.number, fcntl.F_UNLCK, self._place, 1)


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

    @property
    def numbers(self) -> str:
        """The numbers of producers and consumers, as arguments of a `MessageQueue`."""
        return f"producers={self.producers}, consumers={self.consumers}"

    def addresses(self) -> list[str]:
        """Return the addresses of all consumers."""
        return [f"unix://{quote(os.fsencode(path))}" for path in self._sockets()]

    def _sockets(self) -> list[str]:
        return [os.path.join(self.path, f"c{number}") for number in range(self.consumers)]

    @property
    def _slots(self) -> str:
        return os.path.join(self.path, _SLOTS)

    # The life of the folder

    def create(self) -> None:
        """Create the file of slots, and the folder, unless they exist.

        Raises:
            ValueError: the path of the folder is too long for a socket.
            UsageError: the folder belongs to a queue with other numbers of producers or consumers, or to
                another user.
            OSError: the folder cannot be created; a `FileNotFoundError` if its parent does not exist.
        """
        route_to(self.addresses()[-1])  # raises the error
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path, 0o700)
        found = os.stat(self.path)
        if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
            raise UsageError(f"{self.path} is not a folder of this user: choose another folder for the queue")
        numbers = self.numbers.encode()
        file = Descriptor(os.open(self._slots, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        with contextlib.closing(file):
            fcntl.flock(file.number, fcntl.LOCK_EX)  # another process may be creating it at the same time
            slots = 1 + self.producers + self.consumers
            if not os.fstat(file.number).st_size:
                os.pwrite(file.number, _UNUSED * slots + numbers, 0)
            content = os.pread(file.number, os.fstat(file.number).st_size, 0)
        existing = content.lstrip(_UNUSED + _OPEN + _CLOSED + _REMOVED)
        if existing != numbers:
            raise UsageError(
                f"the queue in {self.path} was created with {existing.decode(errors='replace')}, not with "
                f"{self.numbers}: pass the same numbers to each MessageQueue of this folder, or choose "
                "another folder"
            )

    def own(self) -> Slot:
        """Lock a private folder, which other processes remove if this one is killed."""
        file = self._open()
        change_lock(file.number, fcntl.F_WRLCK, 0, 1)
        return Slot(file, 0, 0)

    def close(self, owner: Slot | None) -> None:
        """Remove the files of the folder: now, or when the last producer or consumer ends.

        Args:
            owner: the lock of a private folder.
        """
        with contextlib.suppress(ClosedError), contextlib.closing(self._open()) as file:
            os.pwrite(file.number, _CLOSED, 0)
        if owner is not None:
            owner.release()
        self._remove_if_unused()

    def release(self, slot: Slot) -> None:
        """Release a slot, and remove the files if the queue was closed, and this was the last one."""
        slot.release()
        self._remove_if_unused()

    def _remove_if_unused(self) -> None:
        """Remove the files of a closed queue, or of one whose owner was killed, if no process uses them."""
        with contextlib.suppress(ClosedError, BlockingIOError), contextlib.closing(self._open()) as file:
            if not self.is_private and os.pread(file.number, 1, 0) == _UNUSED:
                return
            change_lock(file.number, fcntl.F_WRLCK, 0, 0)  # also all slots, so no process can claim one
            os.pwrite(file.number, _REMOVED, 0)
            for path in (*self._sockets(), self._slots):  # killed processes have left sockets
                with contextlib.suppress(OSError):
                    os.unlink(path)
            if self.is_private:
                with contextlib.suppress(OSError):
                    os.rmdir(self.path)

    def _open(self) -> Descriptor:
        """Open the file of slots.

        Raises:
            ClosedError: the files of the queue were removed, or another process is removing them.
        """
        try:
            file = Descriptor(os.open(self._slots, os.O_RDWR | os.O_CLOEXEC))
        except FileNotFoundError:
            raise self._was_closed() from None
        self._check_exists(file)
        return file

    def _check_exists(self, file: Descriptor) -> None:
        if os.pread(file.number, 1, 0) == _REMOVED:
            file.close()
            raise self._was_closed()

    def _was_closed(self) -> ClosedError:
        return ClosedError(
            f"the queue in {self.path} was closed: close a MessageQueue after its producers and consumers"
        )

    # Slots

    def claim(self, name: Literal["producer", "consumer"]) -> Slot:
        """Claim a free slot of one kind, and return it.

        Raises:
            ClosedError: the queue was closed.
            UsageError: all slots are claimed or closed.
        """
        is_producer = name == "producer"
        count = self.producers if is_producer else self.consumers
        first = 1 if is_producer else 1 + self.producers
        file = self._open()
        for wanted in (_UNUSED, _OPEN):  # a new producer, or else one that takes the place of a dead one
            for number, place in enumerate(range(first, first + count)):
                if _locked(file, place, wanted):
                    if is_producer:
                        os.pwrite(file.number, _OPEN, place)
                    self._check_exists(file)
                    return Slot(file, place, number)
        self._check_exists(file)  # all slots are locked while another process removes the files
        file.close()
        advice = f"pass a larger number of {name}s to MessageQueue"
        if is_producer and not self.is_private:  # a folder may have been used before
            advice += (
                "; if these are the producers of an earlier run, call `close()` at its end, or remove the "
                f"folder {self.path}"
            )
        raise UsageError(
            f"the number of {name}s of this queue is {count}, and as many are open or have closed: {advice}"
        )

    def producer_states(self) -> list[SlotState]:
        """Return the states of the slots of producers, for a process that has claimed a slot.

        Raises:
            PeerLostError: the files of the queue were removed, but not by a process of the queue.
        """
        try:
            file = self._open()
        except ClosedError:
            raise PeerLostError(
                f"the files of the queue in {self.path} were removed while it was in use, so its other "
                "processes cannot be found: pass a `folder` that no cleaner of temporary files removes"
            ) from None
        with contextlib.closing(file):
            return [_state(file.number, place) for place in range(1, 1 + self.producers)]


class QueueSettings(NamedTuple):
    """The arguments of a `MessageQueue`, and its folder."""

    folder: Folder
    message_type: Any
    max_messages: int
    arena_bytes: int
    max_body_bytes: int | None
    redeliver: bool
    grace_s: float | None


def _state(file: int, place: int) -> SlotState:
    state = os.pread(file, 1, place)
    if state == _OPEN:
        if conflicting_lock(file, fcntl.F_WRLCK, place, 1) is not None:
            return SlotState.LIVE
        state = os.pread(file, 1, place)  # it may have been closed since
    if state == _OPEN:
        return SlotState.DEAD
    return SlotState.CLOSED if state == _CLOSED else SlotState.UNUSED


def _locked(file: Descriptor, place: int, wanted: bytes) -> bool:
    """Try to lock a slot whose byte is `wanted`; another process may lock or change it at the same time."""
    if os.pread(file.number, 1, place) != wanted:
        return False
    try:
        change_lock(file.number, fcntl.F_WRLCK, place, 1)
    except BlockingIOError:
        return False
    if os.pread(file.number, 1, place) == wanted:
        return True
    change_lock(file.number, fcntl.F_UNLCK, place, 1)
    return False
