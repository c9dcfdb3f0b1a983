"""The memory limits of the control groups of this process, and whether an arena fits into them.

When such a limit is exceeded, no call fails: the kernel kills a process of the group (the "OOM killer").
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from aiotensor.runtime.logs import logger_of

__all__ = ["MemoryLimit", "memory_limits", "warn_if_too_large"]

logger = logger_of("sender")

ROOT = Path("/")  # the folder of `proc` and `sys`

_UNLIMITED = 1 << 60  # cgroup v1 expresses "no limit" as a number of about this size or more


class MemoryLimit(NamedTuple):
    """The limit of one control group.

    Attributes:
        nbytes: the maximum number of bytes that the processes of the group may use together.
        used: the number of bytes in use that the kernel cannot reclaim, that is, without cached files.
        file: the path of the file with the limit; bytes that are not UTF-8 are escaped.
    """

    nbytes: int
    used: int
    file: str

    @property
    def available(self) -> int:
        """The number of bytes that may still be used; negative if the limit was lowered below the usage."""
        return self.nbytes - self.used


class _Version(NamedTuple):
    """The names in one version of the kernel's interface."""

    controller: str
    limit: str
    usage: str
    prefix: str  # of the fields of memory.stat


_V1 = _Version("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2 = _Version("", "memory.max", "memory.current", "")
_CACHED = ("active_file", "inactive_file")  # fields of memory.stat, which do not include shared memory


def memory_limits(root: Path) -> Iterator[MemoryLimit]:
    """Yield the memory limits that apply to this process: of its control group and of the groups above it.

    In a container, only some of these groups are visible; `mountinfo` names the topmost one.

    Args:
        root: the folder of `proc` and `sys`.
    """
    groups = _groups_of_this_process(root)
    for line in _read(root, "proc/self/mountinfo").split("\n"):
        ours, _, theirs = line.partition(" - ")
        fields, kind = ours.split(" "), theirs.split(" ")
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            version = _V2
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            version = _V1
        else:
            continue
        mounted = PurePosixPath(_unescaped(fields[4]))
        inside = _inside(groups.get(version.controller, "/"), _unescaped(fields[3]))
        for folder in (mounted / inside, *(mounted / parent for parent in inside.parents)):
            limit = _limit_of(root, folder, version)
            if limit is not None:
                yield limit


def warn_if_too_large(sender: str, arena_bytes: int, root: Path | None = None) -> None:
    """Log a warning if an arena is larger than the free memory of a control group of this process."""
    limit = min(memory_limits(root or ROOT), key=lambda one: one.available, default=None)
    if limit is None or arena_bytes <= limit.available:
        return
    logger.warning(
        "arena_bytes=%s does not fit into the memory limit of this process's control group: %s of %s bytes "
        "are in use (%s); when the arena fills up, the kernel kills a process instead of `send` raising an "
        "OSError: raise the limit, or lower arena_bytes",
        arena_bytes,
        limit.used,
        limit.nbytes,
        limit.file,
        extra={
            "event": "arena_too_large",
            "sender_id": sender,
            "arena_bytes": arena_bytes,
            "limit_bytes": limit.nbytes,
            "used_bytes": limit.used,
            "file": limit.file,
        },
    )


def _limit_of(root: Path, folder: PurePosixPath, version: _Version) -> MemoryLimit | None:
    file = folder / version.limit
    limit = _read(root, file).strip()
    if not limit.isdecimal() or int(limit) >= _UNLIMITED:  # "max", or no such file
        return None
    usage = _read(root, folder / version.usage).strip()
    cached = 0
    for line in _read(root, folder / "memory.stat").split("\n"):
        name, _, value = line.partition(" ")
        if name.startswith(version.prefix) and name[len(version.prefix) :] in _CACHED and value.isdecimal():
            cached += int(value)
    used = int(usage) if usage.isdecimal() else 0
    shown = os.fsencode(file).decode(errors="backslashreplace")
    return MemoryLimit(int(limit), max(used - cached, 0), shown)


def _read(root: Path, path: PurePosixPath | str) -> str:
    """Return the text of a file, decoded like a path; an empty text if the file cannot be read."""
    try:
        return os.fsdecode((root / str(path).lstrip("/")).read_bytes())
    except (OSError, ValueError):  # a path may be invalid
        return ""


def _groups_of_this_process(root: Path) -> dict[str, str]:
    """Return the paths of the control groups by controller; the controller of cgroup v2 is empty."""
    groups = {}
    for line in _read(root, "proc/self/cgroup").split("\n"):
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon:
            groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _inside(group: str, mount_root: str) -> PurePosixPath:
    """Return the path of a group below a mount; the mount itself if the group is not visible there."""
    path = PurePosixPath(group)
    if ".." in path.parts or not path.is_relative_to(mount_root):
        return PurePosixPath()
    return path.relative_to(mount_root)


def _unescaped(field: str) -> str:
    """Decode the octal escapes in a path from `mountinfo`, such as those of blanks."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)
