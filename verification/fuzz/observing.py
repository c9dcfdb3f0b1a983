"""Observations of a process: its resources, its errors, and the tensors in its memory."""

import asyncio
import ctypes
import logging
import os
import re
import threading
import traceback
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import torch

from aiotensor.runtime.worker import Worker, in_thread
from verification.fuzz.things import GUARD, IMAGE, LOOSE_NAME, MEMORY_NAME
from verification.processes import watch
from verification.processes.allocator import forget_free_memory

_LATEST = 20  # warnings
_NAMES = f"{MEMORY_NAME}|{LOOSE_NAME}|aiotensor"  # the last one is that of memory in which moved bytes arrive
_MAPPING = re.compile(rf"^([0-9a-f]+)-([0-9a-f]+) .* /memfd:({_NAMES}) ", re.MULTILINE)


class Figures(NamedTuple):
    """The resources of a process."""

    resident_kib: int
    descriptors: int
    mappings: int
    threads: int
    tasks: int

    def grown(self, since: "Figures", slack_kib: int) -> list[str]:
        """Return descriptions of the figures that have grown."""
        # The tokens of a rogue's last segments may be open for a moment; a leak grows with each rogue.
        figures = zip(self._fields, since, self, (slack_kib, 4, 0, 0, 0), strict=True)
        return [f"{name}: {before} -> {now}" for name, before, now, slack in figures if now > before + slack]


async def threads_started(*workers: Worker) -> None:
    """Start the threads of workers, which otherwise start with the first job, at any later time."""
    await in_thread(int)
    for worker in workers:
        worker.begin("nothing", int)
        await worker.submit(int)


def figures() -> Figures:
    """Measure this process."""
    forget_free_memory()
    pid, mappings = os.getpid(), Path("/proc/self/maps").read_text().count("/memfd:")
    threads, tasks = threading.active_count(), len(asyncio.all_tasks())
    return Figures(watch.resident_kib(pid), watch.descriptors(pid), mappings, threads, tasks)


class Troubles(logging.Handler):
    """Collect errors that no peer may cause: exceptions in the loop, and log records with an exception.

    Attributes:
        found: these errors.
        latest: the last warnings, most of them about rogues.
        violations: the number of warnings of violations.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []
        self.latest: deque[str] = deque(maxlen=_LATEST)
        self.violations = 0
        logger = logging.getLogger("aiotensor")
        logger.addHandler(self)
        logger.propagate = False
        asyncio.get_running_loop().set_exception_handler(self._in_loop)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.latest.append(text)
        self.violations += "broke the protocol" in text
        if record.exc_info is not None and record.exc_info[0] is not None:
            self.found.append(logging.Formatter().format(record))

    def _in_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        text = traceback.format_exception(context["exception"]) if "exception" in context else []
        self.found.append("".join([f"{context['message']}\n", *text]))


def in_memory(tensor: torch.Tensor, troubles: Troubles) -> bool:
    """Check that a tensor has separate memory, or lies within one segment; return whether it lies in one."""
    start, nbytes = tensor.data_ptr(), tensor.nbytes
    for first, last, name in _MAPPING.findall(Path("/proc/self/maps").read_text()) if nbytes else ():
        low, high = int(first, 16), int(last, 16)
        if low <= start < high:
            if name == LOOSE_NAME:
                troubles.found.append("memory was mapped that its owner can take back")
            elif start + nbytes > high:
                troubles.found.append(f"{nbytes} bytes at {start - low} of a segment of {high - low}")
            elif not _are_right(ctypes.string_at(start, nbytes), start - low):
                troubles.found.append(f"bytes at {start - low} are not those of the rogue")
            return True
    return False


def _are_right(data: bytes, offset: int) -> bool:
    """Return whether bytes are those of an image, or zero.

    Bytes that never came from another machine are zero, and so are pages that were returned to the system,
    because their owner, who forwarded them, held no lock on them.
    """
    for image in (GUARD, IMAGE):
        expected = image[offset : offset + len(data)].ljust(len(data), b"\0")
        pairs = zip(data, expected, strict=True)
        if data == expected or all(not byte or byte == sent for byte, sent in pairs):
            return True
    return False
