"""What processes use, as the kernel counts it: CPU time, resident memory, shared memory."""

import time
from collections.abc import Iterable
from pathlib import Path
from threading import Event, Thread
from types import TracebackType

__all__ = ["SharedMemoryWatch", "cpu_seconds", "family", "private_bytes", "shared_bytes"]

_PROC = Path("/proc")
_EVERY_S = 0.002


def cpu_seconds(processes: Iterable[int]) -> float:
    """Give the CPU time of all threads of these processes, user and system, to the nanosecond."""
    # Linux makes the number of another process's CPU clock of its pid; clock_getcpuclockid(3) does the same.
    return sum(time.clock_gettime(~process << 3 | 2) for process in processes)


def family(processes: Iterable[int]) -> list[int]:
    """Give these processes and all that they have started and that still run, and so on."""
    parents = {}
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            try:
                # The name, in brackets, may hold anything; the state and the parent follow it.
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended meanwhile
    found = list(processes)
    for process in found:  # which grows on the way
        found.extend(child for child, parent in parents.items() if parent == process and child not in found)
    return found


def private_bytes(process: int) -> int:
    """Give the resident anonymous memory of a process: without files and shared memory."""
    return _kib(_PROC / str(process) / "status", "RssAnon") << 10


def shared_bytes() -> int:
    """Give the shared memory of the whole machine.

    This is the only number that holds every page once: mapped or only written, by a process or on its way
    between two in the buffer of a socket, with a name or without. What other programs do meanwhile counts
    too.
    """
    return _kib(_PROC / "meminfo", "Shmem") << 10


def _kib(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    raise LookupError(f"{path} has no {name}")


class SharedMemoryWatch:
    """Look at the shared memory of the machine every two milliseconds, in a thread.

    Attributes:
        peak_bytes: the most that was seen.
        cpu_s: what looking has cost.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.cpu_s = 0.0
        self._over = Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "SharedMemoryWatch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        # Once more after the end, however short the time was.
        over = False
        while not over:
            over = self._over.wait(_EVERY_S)
            self.peak_bytes = max(self.peak_bytes, shared_bytes())
        self.cpu_s = time.thread_time()
