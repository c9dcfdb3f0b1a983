"""What a process has: memory, descriptors, time. Of any process of this user, by its number."""

import contextlib
import os
import re
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def memfds(pid: int) -> int:
    """Count the mappings of shared memory of the library."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:aiotensor")


def mappings(pid: int) -> int:
    """Count the stretches of memory that are mapped, of whatever kind."""
    return Path(f"/proc/{pid}/maps").read_text().count("\n")


def descriptors(pid: int) -> int:
    """Count the descriptors that are open."""
    own = pid == os.getpid()
    return len(os.listdir(f"/proc/{pid}/fd")) - own  # the one that lists them


def targets(pid: int) -> list[str]:
    """Name what the open descriptors are, without what tells two of a kind apart."""
    folder, found = f"/proc/{pid}/fd", []
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them, or one just closed
            found.append(re.sub(r":\[\d+\]$", "", os.readlink(f"{folder}/{name}")))
    return sorted(found)


def status(pid: int, *names: str) -> int:
    """Sum numbers of the process's status."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = [re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE) for name in names]
    return sum(int(match.group(1)) for match in found if match is not None)


def resident_kib(pid: int) -> int:
    """Count the memory that is the process's alone, and the shared memory that it has mapped."""
    return status(pid, "RssAnon", "RssShmem")


def is_stopped(pid: int) -> bool:
    """Say whether a signal has stopped a process."""
    return _stat(pid)[0] == "T"


def seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _stat(pid: int) -> list[str]:
    """Return what the kernel tells of a process behind its name, the state first."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def switches(pid: int) -> int:
    """Count how often the threads of a process have slept."""
    tasks = os.listdir(f"/proc/{pid}/task")
    texts = [Path(f"/proc/{pid}/task/{task}/status").read_text() for task in tasks]
    found = [re.search(r"^voluntary_ctxt_switches:\s+(\d+)", text, re.MULTILINE) for text in texts]
    return sum(int(match.group(1)) for match in found if match is not None)
