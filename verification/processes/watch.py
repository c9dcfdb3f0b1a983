"""Measurements of any process of this user: memory, descriptors and processor time."""

import asyncio
import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

_SPAN_S = 2.0
_SPANS = 5
_TICKS = os.sysconf("SC_CLK_TCK")


def memfds(pid: int) -> int:
    """Count the mappings of the library's shared memory."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:aiotensor")


def links(pid: int) -> dict[str, str]:
    """Return the targets of the open descriptors, by their paths."""
    folder, found = f"/proc/{pid}/fd", {}
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing, or one just closed
            found[f"{folder}/{name}"] = os.readlink(f"{folder}/{name}")
    return found


def memfd_bytes(pid: int) -> int:
    """Count the bytes of memory in the library's shared memory, of which the process has a descriptor."""
    found = {}
    for path, target in links(pid).items():
        with contextlib.suppress(FileNotFoundError):  # a descriptor just closed
            if target.startswith("/memfd:aiotensor"):
                file = os.stat(path)
                found[file.st_ino] = file.st_blocks * 512
    return sum(found.values())


def mappings(pid: int) -> int:
    """Count the memory mappings of all kinds."""
    return Path(f"/proc/{pid}/maps").read_text().count("\n")


def descriptors(pid: int) -> int:
    """Count the open descriptors."""
    own = pid == os.getpid()
    return len(os.listdir(f"/proc/{pid}/fd")) - own  # without that of this listing


def targets(pid: int) -> list[str]:
    """Return the targets of the open descriptors, without the numbers of sockets and pipes.

    A process opens its list of pages once, when it first needs it, and keeps the descriptor.
    """
    found = [re.sub(r":\[\d+\]$", "", target) for target in links(pid).values()]
    return sorted(target for target in found if not target.endswith("/pagemap"))


def status(pid: int | str, *names: str) -> int:
    """Return the sum of some numbers in the status of a process or thread."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = [re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE) for name in names]
    return sum(int(match.group(1)) for match in found if match is not None)


def resident_kib(pid: int) -> int:
    """Return the resident memory of a process: its private memory and its mapped shared memory."""
    return status(pid, "RssAnon", "RssShmem")


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process."""
    return _stat(pid)[0] == "T"


def seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _stat(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` after the name, beginning with the state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def switches(pid: int) -> int:
    """Count how often the threads of a process have slept."""
    tasks = os.listdir(f"/proc/{pid}/task")
    return sum(status(f"{pid}/task/{task}", "voluntary_ctxt_switches") for task in tasks)


async def become_idle(pids: Sequence[int]) -> bool:
    """Return whether no thread of some processes wakes up or runs for two seconds.

    There are several attempts, since under load it takes a while until all freed memory is released to the
    other side. A thread that wakes up periodically does so in each of them.
    """
    for _ in range(_SPANS):
        before = [(switches(pid), seconds(pid)) for pid in pids]
        await asyncio.sleep(_SPAN_S)  # the period of the measurement
        if all(
            switches(pid) == slept and seconds(pid) - ran < _SPAN_S / 10  # a thread that spins never sleeps
            for pid, (slept, ran) in zip(pids, before, strict=True)
        ):
            return True
    return False
