"""Is there room for the shared memory of a sender, and for its descriptors?

Nothing here is needed to start, so nothing here is a problem: a machine that is short of memory is
found out when it is used up.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from resource import RLIM_INFINITY

from aiotensor.cli.doctor.finding import Finding, Status, in_words

__all__ = [
    "available_memory",
    "cgroup_limit",
    "dev_shm",
    "huge_pages",
    "mapped_bytes",
    "open_files",
    "process_limits",
]

_UNLIMITED = 1 << 60  # cgroup v1 has no word for it, but a number of about this size or more
_BESIDE_ARENA = 512 << 20  # what two processes that imported torch use themselves
_FEW_DESCRIPTORS = 64
_EACH_HAS_ITS_OWN = "each sender has an arena of its own"


def cgroup_limit(arena_bytes: int, root: Path = Path("/")) -> Finding:
    """Compare the memory limit of this process's cgroup, v1 or v2, with an arena.

    Args:
        arena_bytes: what one sender may have in shared memory, all of which counts for the cgroup.
        root: where `proc` and `sys` are.
    """
    limits = [*_cgroup_limits(root)]
    if not limits:
        return Finding("memory cgroup", Status.OK, "no limit")
    limit, file = min(limits)
    found = f"a limit of {in_words(limit)} ({file})"
    if limit >= arena_bytes + _BESIDE_ARENA:
        return Finding("memory cgroup", Status.OK, f"{found}, enough for an arena of {in_words(arena_bytes)}")
    return Finding(
        "memory cgroup",
        Status.NOTE,
        f"{found}, too little for an arena of {in_words(arena_bytes)} and the processes",
        "Raise it (docker run --memory, MemoryMax= of systemd), or give senders a smaller arena_bytes; "
        + _EACH_HAS_ITS_OWN,
    )


def available_memory(arena_bytes: int, root: Path = Path("/")) -> Finding:
    """Compare the memory that the whole machine has to spare with an arena.

    Args:
        arena_bytes: what one sender may have in shared memory.
        root: where `proc` is.
    """
    text = _read(root / "proc/meminfo")
    line = re.search(r"^MemAvailable:\s+(\d+) kB$", text or "", re.MULTILINE)
    if line is None:
        return Finding("memory", Status.NOTE, "/proc/meminfo does not say what is available", "Mount /proc")
    available = int(line[1]) * 1024
    found = f"{in_words(available)} available"
    if available >= arena_bytes:
        return Finding("memory", Status.OK, f"{found}, enough for an arena of {in_words(arena_bytes)}")
    return Finding(
        "memory",
        Status.NOTE,
        f"{found}, too little for an arena of {in_words(arena_bytes)}",
        f"End what else uses memory, or give senders a smaller arena_bytes; {_EACH_HAS_ITS_OWN}",
    )


def process_limits(arena_bytes: int, address_space: int, mapped: int, file_size: int) -> Finding:
    """Compare what this process may map, and how large it may make a file, with an arena.

    Args:
        arena_bytes: what one sender may have in shared memory.
        address_space: RLIMIT_AS in bytes, or RLIM_INFINITY.
        mapped: bytes that are mapped already.
        file_size: RLIMIT_FSIZE in bytes, or RLIM_INFINITY; a memfd is a file.
    """
    short = []
    if address_space != RLIM_INFINITY and address_space - mapped < arena_bytes:
        room = in_words(max(address_space - mapped, 0))
        short.append(f"an address space of {in_words(address_space)} with room for {room} (ulimit -v)")
    if file_size != RLIM_INFINITY and file_size < arena_bytes:
        short.append(f"files of at most {in_words(file_size)} (ulimit -f)")
    if not short:
        return Finding("process limits", Status.OK, "none that an arena would meet")
    return Finding(
        "process limits",
        Status.NOTE,
        f"{' and '.join(short)}, too little for an arena of {in_words(arena_bytes)}",
        "Raise the limit in the shell or unit that starts the process, or give senders a smaller arena_bytes",
    )


def open_files(soft: int, hard: int) -> Finding:
    """Check how many descriptors a process may have open; a connection needs a handful.

    Args:
        soft: the limit that holds, or RLIM_INFINITY.
        hard: how far a process may raise it by itself, or RLIM_INFINITY.
    """
    found = f"at most {_count(soft)}, and {_count(hard)} if raised"
    if soft == RLIM_INFINITY or soft >= _FEW_DESCRIPTORS:
        return Finding("open files", Status.OK, found)
    where = "LimitNOFILE= of systemd, docker run --ulimit nofile=1024"
    if hard == RLIM_INFINITY or hard >= _FEW_DESCRIPTORS:
        enough = 1024 if hard == RLIM_INFINITY else min(hard, 1024)
        advice = f"Raise it where the process is started: ulimit -n {enough} ({where})"
    else:
        advice = f"Have the hard limit raised ({where}, or /etc/security/limits.conf)"
    return Finding("open files", Status.NOTE, f"{found}: few, each connection needs a handful", advice)


def dev_shm(folder: Path = Path("/dev/shm")) -> Finding:  # noqa: S108 - nothing is written there
    """Say how large /dev/shm is, since everybody asks; it does not matter.

    Args:
        folder: where it is mounted.
    """
    try:
        figures = os.statvfs(folder)
    except OSError:
        size = "not there"
    else:
        size = in_words(figures.f_blocks * figures.f_frsize)
    return Finding("/dev/shm", Status.OK, f"{size}; does not matter, aiotensor keeps nothing there")  # noqa: S108


def huge_pages(root: Path = Path("/")) -> Finding:
    """Say whether the kernel may use huge pages for shared memory.

    Args:
        root: where `sys` is.
    """
    text = _read(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = re.search(r"\[(\w+)\]", text or "")
    setting = f'"{chosen[1]}"' if chosen else "not known to this kernel"
    return Finding("huge pages", Status.OK, f"for shared memory: {setting}; for your information only")


def mapped_bytes(root: Path = Path("/")) -> int:
    """Return how much of its address space this process uses; 0 if that cannot be read.

    Args:
        root: where `proc` is.
    """
    words = (_read(root / "proc/self/statm") or "0").split()
    return int(words[0]) * os.sysconf("SC_PAGE_SIZE")


def _count(limit: int) -> str:
    return "any number" if limit == RLIM_INFINITY else str(limit)


def _read(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None


def _cgroup_limits(root: Path) -> Iterator[tuple[int, str]]:
    """Find each limit that holds for this process, and the file that sets it.

    A cgroup is bound by the limits of all those above it, so all are read. In a container only a part
    of them can be seen; mountinfo says where that part begins.
    """
    groups = _cgroups_of_this_process(root)
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        ours, _, theirs = line.partition(" - ")
        fields, kind = ours.split(), theirs.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            controller, name = "", "memory.max"
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            controller, name = "memory", "memory.limit_in_bytes"
        else:
            continue
        mounted = PurePosixPath(_unescaped(fields[4]))
        inside = _inside(groups.get(controller, "/"), _unescaped(fields[3]))
        for folder in (mounted / inside, *(mounted / parent for parent in inside.parents)):
            text = (_read(root / str(folder / name).lstrip("/")) or "").strip()
            if text.isdigit() and int(text) < _UNLIMITED:
                yield int(text), str(folder / name)


def _cgroups_of_this_process(root: Path) -> dict[str, str]:
    """Return the path of each cgroup by its controller; that of v2 has an empty name."""
    groups = {}
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _inside(group: str, mount_root: str) -> PurePosixPath:
    """Return where a cgroup is below a mount; the mount itself if it cannot be seen from there."""
    path = PurePosixPath(group)
    if ".." in path.parts or not path.is_relative_to(mount_root):
        return PurePosixPath()
    return path.relative_to(mount_root)


def _unescaped(field: str) -> str:
    """Undo what mountinfo does to blanks in a path."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)
