"""Is there room for the shared memory of a sender, and for its descriptors?

Nothing here is needed to start, so nothing here is a problem: a machine that is short of memory is
found out when it is used up.
"""

import os
import re
from pathlib import Path
from resource import RLIM_INFINITY

from aiotensor.cli.doctor.finding import Finding, Status, in_words
from aiotensor.protocol.blocks import ADDRESSES_PER_BYTE
from aiotensor.runtime.cgroups import memory_limits

__all__ = [
    "available_memory",
    "cgroup_limit",
    "dev_shm",
    "huge_pages",
    "mapped_bytes",
    "open_files",
    "process_limits",
]

_BESIDE_ARENA = 512 << 20  # what two processes that imported torch use themselves
_FEW_DESCRIPTORS = 64
_EACH_HAS_ITS_OWN = "each sender has an arena of its own"


def cgroup_limit(arena_bytes: int, root: Path = Path("/")) -> Finding:
    """Compare the memory limit of this process's cgroup, v1 or v2, with an arena.

    Args:
        arena_bytes: what one sender may have in shared memory, all of which counts for the cgroup.
        root: where `proc` and `sys` are.
    """
    # Not with what is left of it: senders that run already, whose arenas these may be, are in what is used.
    limit = min(memory_limits(root), default=None)
    if limit is None:
        return Finding("memory cgroup", Status.OK, "no limit")
    found = f"a limit of {in_words(limit.nbytes)} ({limit.file})"
    if limit.nbytes >= arena_bytes + _BESIDE_ARENA:
        return Finding("memory cgroup", Status.OK, f"{found}, enough for an arena of {in_words(arena_bytes)}")
    return Finding(
        "memory cgroup",
        Status.NOTE,
        f"{found}, too little for an arena of {in_words(arena_bytes)} and the processes",
        "Raise it (docker run --memory, MemoryMax= of systemd), or give senders a smaller arena_bytes: "
        f"beyond it the kernel kills a process, and no call raises an OSError; {_EACH_HAS_ITS_OWN}",
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
    addresses = ADDRESSES_PER_BYTE * arena_bytes
    if address_space != RLIM_INFINITY and address_space - mapped < addresses:
        room = in_words(max(address_space - mapped, 0))
        short.append(
            f"an address space of {in_words(address_space)} with room for {room} (ulimit -v), where a "
            f"receiver needs {in_words(addresses)} for each sender"
        )
    if file_size != RLIM_INFINITY and file_size < arena_bytes:
        short.append(f"files of at most {in_words(file_size)} (ulimit -f)")
    if not short:
        return Finding("process limits", Status.OK, "none that an arena would meet")
    return Finding(
        "process limits",
        Status.NOTE,
        f"{'; '.join(short)}: too little for an arena of {in_words(arena_bytes)}",
        "Raise the limit in the shell or unit that starts the process, or give senders a smaller "
        "arena_bytes; a sender that has such a limit itself needs only as many addresses as its arena has "
        "bytes",
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
