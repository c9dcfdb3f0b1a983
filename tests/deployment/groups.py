"""Control groups with a memory limit, of version 1 or 2."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["MemoryGroup", "NoMemoryGroupsError", "memory_group"]

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class NoMemoryGroupsError(Exception):
    """This machine cannot limit the memory of processes, for the given reason."""


class MemoryGroup:
    """A control group.

    Attributes:
        folder: its folder, to whose `cgroup.procs` a process is added.
    """

    def __init__(self, folder: Path, is_v1: bool) -> None:
        self.folder = folder
        self._is_v1 = is_v1

    def limit(self, nbytes: int) -> None:
        """Limit the memory of its processes, and use no swap."""
        name = "memory.limit_in_bytes" if self._is_v1 else "memory.max"
        (self.folder / name).write_text(str(nbytes))
        swap = "memory.memsw.limit_in_bytes" if self._is_v1 else "memory.swap.max"
        if (self.folder / swap).exists():
            (self.folder / swap).write_text(str(nbytes if self._is_v1 else 0))

    @property
    def shared_bytes(self) -> int:
        """The shared memory that is charged to it, including that of memfds."""
        fields = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        return int(fields["shmem"])

    @property
    def kills(self) -> int:
        """How many of its processes the kernel has killed because of the limit."""
        name = "memory.oom_control" if self._is_v1 else "memory.events"
        fields = dict(line.split() for line in (self.folder / name).read_text().splitlines())
        return int(fields["oom_kill"])


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Create a group below the topmost one, and remove it at the end, when it has no processes.

    Raises:
        NoMemoryGroupsError: there is no controller for memory, or this user may not create groups.
    """
    is_v1 = (_V1 / "memory.limit_in_bytes").exists()
    if not is_v1:
        try:
            controllers = (_V2 / "cgroup.subtree_control").read_text().split()
        except OSError as error:
            raise NoMemoryGroupsError(f"control groups are not mounted: {error}") from error
        if "memory" not in controllers:
            raise NoMemoryGroupsError(
                f"the controller `memory` is not enabled in {_V2}/cgroup.subtree_control"
            )
    folder = (_V1 if is_v1 else _V2) / f"aiotensor-{os.getpid()}-{secrets.token_hex(3)}"
    try:
        folder.mkdir()
    except OSError as error:
        raise NoMemoryGroupsError(f"this user may not create control groups: {error}") from error
    try:
        yield MemoryGroup(folder, is_v1)
    finally:
        folder.rmdir()
