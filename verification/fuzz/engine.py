"""An engine behind a receiver with rogue senders: it takes, checks and frees every tensor."""

import asyncio
import ctypes
import logging
import os
import re
import threading
from collections import Counter, deque
from pathlib import Path
from typing import Any, NamedTuple

import torch

from aiotensor import Delivery, TensorReceiver
from aiotensor.runtime.worker import Worker, in_thread
from verification.fuzz.things import GUARD, IMAGE, LOOSE_NAME, MEMORY_NAME
from verification.internals import connections_at, senders_of
from verification.patterns import pattern
from verification.processes import watch
from verification.processes.allocator import forget_free_memory
from verification.waiting import until

__all__ = ["Engine", "Figures", "Troubles", "figures", "in_memory", "listed", "threads_started"]

_LATEST = 20  # warnings
_KEPT = 3  # so that some tensors outlive their senders


class Figures(NamedTuple):
    """The resources of a process."""

    resident_kib: int
    descriptors: int
    mappings: int
    threads: int
    tasks: int

    def grown(self, since: "Figures", slack_kib: int) -> list[str]:
        """Return descriptions of the figures that have grown."""
        grown = [
            f"{name}: {before} -> {now}"
            for name, before, now in zip(self._fields[1:], since[1:], self[1:], strict=True)
            if now > before
        ]
        if self.resident_kib - since.resident_kib > slack_kib:
            grown.append(f"resident KiB: {since.resident_kib} -> {self.resident_kib}")
        return grown


def listed(outcomes: Counter[str]) -> str:
    """List the outcomes of calls and their numbers."""
    return ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))


async def threads_started(*workers: Worker) -> None:
    """Start the threads of workers, which otherwise start with the first job, at any later time."""
    await in_thread(int)
    for worker in workers:
        worker.begin("nothing", int)
        await worker.submit(int)


def figures() -> Figures:
    """Measure this process."""
    forget_free_memory()
    pid = os.getpid()
    mappings = Path("/proc/self/maps").read_text().count("/memfd:")
    return Figures(
        watch.resident_kib(pid),
        watch.descriptors(pid),
        mappings,
        threading.active_count(),
        len(asyncio.all_tasks()),
    )


class Troubles(logging.Handler):
    """Collect errors that no peer may cause: exceptions in the loop, and log records with an exception.

    Attributes:
        found: these errors.
        latest: the last warnings, most of them about rogues.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []
        self.latest: deque[str] = deque(maxlen=_LATEST)
        self.cut_off = self.refused = 0

    def watch(self) -> None:
        """Start collecting, in the running loop."""
        logger = logging.getLogger("aiotensor")
        logger.addHandler(self)
        logger.propagate = False
        asyncio.get_running_loop().set_exception_handler(self._in_loop)

    def leave(self) -> None:
        """Stop collecting."""
        logger = logging.getLogger("aiotensor")
        logger.removeHandler(self)
        logger.propagate = True
        asyncio.get_running_loop().set_exception_handler(None)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.latest.append(text)
        self.cut_off += "broke the protocol" in text
        self.refused += "was refused" in text
        if record.exc_info is not None and record.exc_info[0] is not None:
            self.found.append(logging.Formatter().format(record))

    def _in_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        message = str(context["message"])
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, message, None, None)
        error = context.get("exception")
        if isinstance(error, BaseException):
            record.exc_info = (type(error), error, error.__traceback__)
        self.found.append(logging.Formatter().format(record))


class Engine:
    """A receiver that takes every tensor."""

    def __init__(self, receiver: TensorReceiver) -> None:
        self.receiver = receiver
        self.troubles = Troubles()
        self.honest: set[str] = set()
        self.taken = self.taken_in_memory = self.taken_honest = 0
        self._kept: deque[torch.Tensor] = deque(maxlen=_KEPT)

    def start(self) -> None:
        """Start taking tensors."""
        self.troubles.watch()
        self._taking = asyncio.get_running_loop().create_task(self._take(), name="fuzz-taking")

    async def stop(self) -> None:
        """Stop taking tensors; the receiver stays open."""
        self._taking.cancel()
        await asyncio.wait([self._taking])
        self._kept.clear()
        self.troubles.leave()

    async def settle(self) -> None:
        """Free all tensors, and wait until every rogue has disconnected and its memory is unmapped."""
        await until(lambda: self._taking.done() or self._is_settled())
        await senders_of(self.receiver).mappings.settle()
        if self._taking.done() and not self._taking.cancelled():
            self.troubles.found.append(f"taking ended: {self._taking.exception()!r}")

    def _is_settled(self) -> bool:
        self._kept.clear()  # also tensors that arrived since the last check
        statistics = self.receiver.statistics()
        return (
            connections_at(self.receiver) == len(self.honest)
            and not statistics.leases
            and not statistics.unclaimed_tensors
            and not senders_of(self.receiver).mappings.lingering_bytes
        )

    async def _take(self) -> None:
        async for delivery in self.receiver:
            self._look_at(delivery)
            self._kept.append(delivery.tensor)
            del delivery  # it would keep the tensor until the next delivery

    def _look_at(self, delivery: Delivery) -> None:
        handle, tensor = delivery.handle, delivery.tensor.detach()
        self.taken += 1
        if handle.sender in self.honest:
            self.taken_honest += 1
            if not torch.equal(tensor, pattern(handle.message, tensor.numel())):
                self.troubles.found.append(f"an honest tensor is not what was sent: {handle}")
            return
        if tuple(tensor.shape) != handle.shape:
            self.troubles.found.append(f"a tensor of shape {tuple(tensor.shape)} came for {handle}")
        self.taken_in_memory += in_memory(tensor, self.troubles)


_IMAGES = GUARD, IMAGE  # the bytes of segments


def in_memory(tensor: torch.Tensor, troubles: Troubles) -> bool:
    """Check that a tensor has separate memory, or lies within one segment; return whether it lies in one."""
    start, nbytes = tensor.data_ptr(), tensor.nbytes
    found = _mapping_at(start) if nbytes else None
    if found is None:
        return False
    low, high, name = found
    offset = start - low
    if name == LOOSE_NAME:
        troubles.found.append("memory was mapped that its owner can take back")
    elif start + nbytes > high:
        troubles.found.append(f"{nbytes} bytes at {offset} of a segment of {high - low}")
    elif name == _LANDING_NAME:
        _check_landed(ctypes.string_at(start, nbytes), offset, troubles)
    elif ctypes.string_at(start, nbytes) not in [image[offset : offset + nbytes] for image in _IMAGES]:
        troubles.found.append(f"bytes at {offset} are not those of the segment")
    return True


def _check_landed(data: bytes, offset: int, troubles: Troubles) -> None:
    """Check bytes of a landing segment: a rogue moves the bytes of an image, or none."""
    for image in _IMAGES:
        expected = image[offset : offset + len(data)].ljust(len(data), b"\0")
        if all(not byte or byte == moved for byte, moved in zip(data, expected, strict=True)):
            break
    else:
        troubles.found.append(f"bytes at {offset} are not those that were moved there")


_LANDING_NAME = "aiotensor"  # of the memory in which moved bytes arrive

_NAMES = f"{MEMORY_NAME}|{LOOSE_NAME}|{_LANDING_NAME}"
_MAPPING = re.compile(rf"^([0-9a-f]+)-([0-9a-f]+) .* /memfd:({_NAMES}) ", re.MULTILINE)


def _mapping_at(address: int) -> tuple[int, int, str] | None:
    """Find the mapping of a rogue's memory that contains an address."""
    for low, high, name in _MAPPING.findall(Path("/proc/self/maps").read_text()):
        if int(low, 16) <= address < int(high, 16):
            return int(low, 16), int(high, 16), name
    return None
