"""The resources of processes, as counted by the kernel: CPU time, resident memory, shared memory."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Event, Thread
from types import TracebackType

_PROC = Path("/proc")


def cpu_seconds(processes: Iterable[int]) -> float:
    """Return the CPU time of all threads of these processes, user and system, to the nanosecond."""
    # Linux makes the number of another process's CPU clock of its pid; clock_getcpuclockid(3) does the same.
    return sum(time.clock_gettime(~process << 3 | 2) for process in processes)


def family(processes: Iterable[int]) -> list[int]:
    """Return these processes and all their living descendants."""
    parents = {}
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            try:
                # The name, in brackets, may hold anything; the state and the parent follow it.
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
    found = list(processes)
    for process in found:  # the list grows during the iteration
        found.extend(child for child, parent in parents.items() if parent == process and child not in found)
    return found


def private_bytes(process: int) -> int:
    """Return the resident anonymous memory of a process: without files and shared memory."""
    return _kib(_PROC / str(process) / "status", "RssAnon") << 10


def shared_bytes() -> int:
    """Return the shared memory of the whole machine in bytes.

    Only this number counts every page once: mapped or only written, in a process or in the buffer of a
    socket, with a name or without. It includes the memory of other programs.
    """
    return _kib(_PROC / "meminfo", "Shmem") << 10


def _kib(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    raise LookupError(f"{path} has no {name}")


class PeakWatch:
    """Sample an amount of memory repeatedly, in a thread.

    Args:
        sample: returns the amount, in bytes.
        every_s: the seconds between two samples.

    Attributes:
        peak_bytes: the highest sample.
        cpu_s: the CPU time of the sampling.
    """

    def __init__(self, sample: Callable[[], int], every_s: float) -> None:
        self._sample = sample
        self._every_s = every_s
        self.peak_bytes = 0
        self.cpu_s = 0.0
        self._over = Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "PeakWatch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        # One more sample after the end, so that there is at least one.
        over = False
        while not over:
            over = self._over.wait(self._every_s)
            self.peak_bytes = max(self.peak_bytes, self._sample())
        self.cpu_s = time.thread_time()
