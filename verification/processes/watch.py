"""What a process has: memory, descriptors, time. Of any process of this user, by its number."""

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


async def become_idle(pids: Sequence[int]) -> bool:
    """Return whether no thread of some processes wakes up or runs for two seconds.

    What was freed is yet to be released to the other side, which may take a while under load, so there are
    several attempts. What wakes up by itself does so in each of them.
    """
    for _ in range(_SPANS):
        before = [(switches(pid), seconds(pid)) for pid in pids]
        await asyncio.sleep(_SPAN_S)  # nothing is waited for: what is shown is that nothing happens
        if all(
            switches(pid) == slept and seconds(pid) - ran < _SPAN_S / 10  # one that spins never sleeps
            for pid, (slept, ran) in zip(pids, before, strict=True)
        ):
            return True
    return False
