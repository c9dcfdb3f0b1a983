"""Checks of the resources for a sender or a publisher: memory, limits of the process, descriptors.

None of these checks reports a problem, because no sender or publisher needs these resources at startup.
"""

import os
import re
from pathlib import Path
from resource import RLIM_INFINITY

from aiotensor.cli.doctor.finding import Finding, Status, read
from aiotensor.cli.words import in_words
from aiotensor.protocol.blocks import ADDRESSES_PER_BYTE
from aiotensor.runtime.cgroups import memory_limits

__all__ = [
    "available_memory",
    "cgroup_limit",
    "commit_limit",
    "dev_shm",
    "huge_pages",
    "mapped_bytes",
    "open_files",
    "process_limits",
    "subscribers",
]

_BESIDE_ARENA = 512 << 20  # the memory of two processes that have imported torch
_FEW_DESCRIPTORS = 64
_EACH_HAS_ITS_OWN = "each sender and each publisher has its own arena"
_NEVER_OVERCOMMIT = "2"  # in vm.overcommit_memory


def cgroup_limit(arena_bytes: int, root: Path = Path("/")) -> Finding:
    """Compare the memory limit of this process's cgroup, v1 or v2, with an arena.

    The memory in use is not subtracted, because it may belong to the senders for which the check is made.
    """
    limit = min(memory_limits(root), default=None)
    if limit is None:
        return Finding(Status.OK, "no limit")
    found = f"a limit of {in_words(limit.nbytes)} ({limit.file})"
    if limit.nbytes >= arena_bytes + _BESIDE_ARENA:
        return Finding(Status.OK, f"{found}, enough for an arena of {in_words(arena_bytes)}")
    return Finding(
        Status.NOTE,
        f"{found}, too little for an arena of {in_words(arena_bytes)} and the processes",
        "Raise it (docker run --memory, MemoryMax= of systemd), or use a smaller arena_bytes: at the limit, "
        f"the kernel kills a process, and no call raises an OSError; {_EACH_HAS_ITS_OWN}",
    )


def available_memory(arena_bytes: int, root: Path = Path("/")) -> Finding:
    """Compare the available memory of the machine with an arena."""
    text = read(root / "proc/meminfo")
    line = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    if line is None:
        return Finding(Status.NOTE, "/proc/meminfo does not report the available memory", "Mount /proc")
    available = int(line[1]) * 1024
    found = f"{in_words(available)} available"
    if available >= arena_bytes:
        return Finding(Status.OK, f"{found}, enough for an arena of {in_words(arena_bytes)}")
    return Finding(
        Status.NOTE,
        f"{found}, too little for an arena of {in_words(arena_bytes)}",
        f"Stop other processes that use memory, or use a smaller arena_bytes; {_EACH_HAS_ITS_OWN}",
    )


def process_limits(arena_bytes: int, address_space: int, mapped: int, file_size: int) -> Finding:
    """Compare the limits on mappings and files with an arena, whose memfds count as files.

    Args:
        arena_bytes: the maximum shared memory of one sender or publisher, in bytes.
        address_space: RLIMIT_AS in bytes, or RLIM_INFINITY.
        mapped: the bytes that this process has mapped.
        file_size: RLIMIT_FSIZE in bytes, or RLIM_INFINITY.
    """
    short = []
    addresses = ADDRESSES_PER_BYTE * arena_bytes
    if address_space != RLIM_INFINITY and address_space - mapped < addresses:
        room = in_words(max(address_space - mapped, 0))
        short.append(
            f"an address space of {in_words(address_space)} with {room} left (ulimit -v), but a receiver "
            f"needs {in_words(addresses)} for each sender, and a subscriber for its publisher"
        )
    if file_size != RLIM_INFINITY and file_size < arena_bytes:
        short.append(f"files of at most {in_words(file_size)} (ulimit -f)")
    if not short:
        return Finding(Status.OK, "none that affects an arena")
    return Finding(
        Status.NOTE,
        f"{'; '.join(short)}: too little for an arena of {in_words(arena_bytes)}",
        "Raise the limit in the shell or unit that starts the process, or use a smaller arena_bytes; the "
        "arena of a sender or publisher that has such a limit itself needs only arena_bytes of addresses",
    )


def commit_limit(arena_bytes: int, root: Path = Path("/")) -> Finding:
    """Compare the memory that processes may still map privately with the mapping of a subscriber."""
    mode = read(root / "proc/sys/vm/overcommit_memory").strip()
    if mode != _NEVER_OVERCOMMIT:
        return Finding(Status.OK, "none for the private mappings of subscribers")
    text = read(root / "proc/meminfo")
    limit, used = (
        int(line[1]) * 1024 if (line := re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)) else 0
        for name in ("CommitLimit", "Committed_AS")
    )
    free, needed = max(limit - used, 0), ADDRESSES_PER_BYTE * arena_bytes
    found = f"{in_words(free)} left of the commit limit (vm.overcommit_memory=2)"
    if free >= needed:
        return Finding(Status.OK, f"{found}, enough for a subscriber, which maps {in_words(needed)}")
    return Finding(
        Status.NOTE,
        f"{found}, but each subscriber maps {in_words(needed)} privately",
        "Allow overcommitting (sysctl vm.overcommit_memory=0), raise vm.overcommit_ratio, or give "
        "publishers a smaller arena_bytes",
    )


def subscribers(soft: int, count: int) -> Finding:
    """Compare the limit on open descriptors (RLIMIT_NOFILE) with the subscribers of a publisher.

    Each subscriber needs one descriptor while it is connected, and briefly another one when it ends.
    """
    needed = _FEW_DESCRIPTORS + 2 * count
    if soft == RLIM_INFINITY or soft >= needed:
        return Finding(Status.OK, f"enough descriptors for {count} of one publisher")
    fitting = max(soft - _FEW_DESCRIPTORS, 0) // 2
    return Finding(
        Status.NOTE,
        f"descriptors for about {fitting} of one publisher at once, but {count} need {needed}",
        f"Raise the limit where the publisher is started: ulimit -n {max(needed, 1024)}, or lower "
        "max_subscribers",
    )


def open_files(soft: int, hard: int) -> Finding:
    """Check the limits on open descriptors (RLIMIT_NOFILE), of which each connection needs a few."""
    found = f"at most {_count(soft)}, and {_count(hard)} if raised"
    if soft == RLIM_INFINITY or soft >= _FEW_DESCRIPTORS:
        return Finding(Status.OK, found)
    where = "LimitNOFILE= of systemd, docker run --ulimit nofile=1024"
    if hard == RLIM_INFINITY or hard >= _FEW_DESCRIPTORS:
        enough = 1024 if hard == RLIM_INFINITY else min(hard, 1024)
        advice = f"Raise it where the process is started: ulimit -n {enough} ({where})"
    else:
        advice = f"Ask an administrator to raise the hard limit ({where}, or /etc/security/limits.conf)"
    return Finding(Status.NOTE, f"{found}: too low, since each connection needs a few", advice)


def dev_shm(folder: Path = Path("/dev/shm")) -> Finding:  # noqa: S108 - nothing is written there
    """Report the size of /dev/shm, which other libraries need, but not aiotensor."""
    try:
        figures = os.statvfs(folder)
    except OSError:
        size = "missing"
    else:
        size = in_words(figures.f_blocks * figures.f_frsize)
    return Finding(Status.OK, f"{size}; irrelevant, since aiotensor does not use it")


def huge_pages(root: Path = Path("/")) -> Finding:
    """Report whether the kernel may use huge pages for shared memory."""
    text = read(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = re.search(r"\[(\w+)\]", text)
    setting = f'"{chosen[1]}"' if chosen else "not supported by this kernel"
    return Finding(Status.OK, f"for shared memory: {setting}; for your information only")


def mapped_bytes(root: Path = Path("/")) -> int:
    """Return the number of bytes that this process has mapped; 0 if it is unknown."""
    words = (read(root / "proc/self/statm") or "0").split()
    return int(words[0]) * os.sysconf("SC_PAGE_SIZE")


def _count(limit: int) -> str:
    return "any number" if limit == RLIM_INFINITY else str(limit)
