"""API servers send the videos of many requests to one engine, as in the benchmark of vLLM's tensor IPC.

A request waits for a permit, decodes a clip in the only decoding thread of its server, sends the frames to
the engine, and waits for the answer. Each server keeps its share of the requests in flight; there is no HTTP.
The engine takes one request after the other, reads all bytes of the frames in a thread, and answers with a
checksum, which the server compares with the expected one. The first eight bytes of the frames are a mark, so
that the frames of another request have another checksum.

Decoded: the server decodes into the memory of the permit. Copied: the frames already lie in ordinary memory,
in as many arrays as there are permits, which the requests use in turn. Each request wraps one in a new
tensor, so that no contender is handed a tensor that it has shared before.

The event loops of the servers also run a ticker of 1 ms. Memory is the anonymous memory of all processes and
the shared memory of the machine, minus the same before the first request; so frames that were decoded before
do not count. CPU time excludes that of sampling the memory.
"""

import asyncio
import gc
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from time import perf_counter, perf_counter_ns
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from bench.clips import Clip, clips
from bench.contenders.base import EnginePort, UploadPort
from bench.measure import percentile, share
from bench.records import Batch
from bench.usage import PeakWatch, cpu_seconds, family, private_bytes, shared_bytes
from bench.workloads.base import Stage
from bench.workloads.loop_lag import PERCENTILES, tick

_IN_FLIGHT = 400  # requests, in all servers together
_WARM_UP = 24  # requests before the measured ones, in all servers together
_SAMPLE_S = 0.01
_WORD = np.dtype(np.uint64)
_SUMS = 1 << 64  # a sum of words wraps around there


class ServerReport(msgspec.Struct):
    """The measurements of one API server."""

    latencies_ns: list[int]
    late_s: dict[str, float]


async def near(stage: Stage[EnginePort]) -> AsyncIterator[Batch]:
    """Answer as the engine, and measure all processes, one batch for each size."""
    torch.set_num_threads(1)
    requests = stage.spec.effort.most
    for size, servers in stage.spec.batches:
        _collect_garbage()
        await stage.barrier.meet()
        processes = family(stage.processes)
        before = _private(processes)
        await _answer(stage.port, _WARM_UP)
        await stage.barrier.meet()
        with PeakWatch(partial(_memory, processes), _SAMPLE_S) as watch:
            began, spent_before = perf_counter(), cpu_seconds(processes)
            await stage.barrier.meet()
            await _answer(stage.port, requests)
            reports = await stage.barrier.collect(ServerReport)
            took, spent = perf_counter() - began, cpu_seconds(processes) - spent_before
        latencies = [latency / 1e9 for report in reports for latency in report.latencies_ns]
        numbers = {
            "requests_per_s": requests / took,
            "median_s": percentile(latencies, 50),
            "p99_s": percentile(latencies, 99),
            "cpu_s_per_request": (spent - watch.cpu_s) / requests,
            "peak_bytes": float(watch.peak_bytes - before - stage.shared_before),
        }
        numbers |= {f"late_{name}_s": max(each.late_s[name] for each in reports) for name in PERCENTILES}
        await stage.barrier.meet()
        yield Batch(size, servers, numbers=numbers)


async def far(stage: Stage[UploadPort]) -> None:
    """Serve as one of the API servers."""
    torch.set_num_threads(1)
    spec = stage.spec
    for size, servers in spec.batches:
        uploads = [_Upload.of(clip) for clip in clips(size)]
        permits = share(spec.depth, servers, stage.number)
        server = _Server(stage, uploads, _frames(uploads, permits) if spec.source == "copied" else [])
        _collect_garbage()
        await stage.barrier.meet()
        await server.run(share(_WARM_UP, servers, stage.number))
        await stage.barrier.meet()
        await stage.barrier.meet()
        running = asyncio.create_task(server.run(share(spec.effort.most, servers, stage.number)))
        late = await tick(math.inf, running.done)
        report = ServerReport(
            await running, {name: percentile(late, percent) for name, percent in PERCENTILES.items()}
        )
        await stage.barrier.report(report)
        await stage.barrier.meet()


def _collect_garbage() -> None:
    # The first full collection in a forked process copies the pages of all objects, which takes up to half a
    # second, and would otherwise happen at some time during the measurement.
    gc.collect()


async def _answer(port: EnginePort, requests: int) -> None:
    for _ in range(requests):
        request = await anext(port)
        await request.answer(await asyncio.to_thread(_checksum, request.frames))
        del request  # and the frames with it, before the next one is awaited


def _checksum(frames: torch.Tensor) -> int:
    return _sum(frames.numpy())


def _sum(frames: NDArray[np.uint8]) -> int:
    total: np.uint64 = _words(frames).sum(dtype=_WORD)
    return int(total)


def _words(frames: NDArray[np.uint8]) -> NDArray[np.uint64]:
    return frames.reshape(-1).view(_WORD)


class _Upload(NamedTuple):
    """A clip, and the checksum of its frames without the mark."""

    clip: Clip
    checksum: int

    @classmethod
    def of(cls, clip: Clip) -> "_Upload":
        frames = np.empty(clip.shape, np.uint8)
        clip.decode(frames)
        return cls(clip, _sum(frames) - int(_words(frames)[0]))

    def decode(self, mark: int, into: torch.Tensor) -> None:
        frames = into.numpy()
        self.clip.decode(frames)
        _words(frames)[0] = mark

    def expected(self, mark: int) -> int:
        return (self.checksum + mark) % _SUMS


class _Decoded(NamedTuple):
    """Frames in ordinary memory."""

    frames: NDArray[np.uint8]
    expected: int


def _frames(uploads: Sequence[_Upload], count: int) -> list[_Decoded]:
    decoded = []
    for number in range(count):
        upload = uploads[number % len(uploads)]
        frames = np.empty(upload.clip.shape, np.uint8)
        upload.decode(number, torch.from_numpy(frames))
        decoded.append(_Decoded(frames, upload.expected(number)))
    return decoded


class _Server:
    """One API server."""

    def __init__(
        self, stage: Stage[UploadPort], uploads: Sequence[_Upload], decoded: Sequence[_Decoded]
    ) -> None:
        self._port = stage.port
        self._width = share(_IN_FLIGHT, max(stage.spec.peers), stage.number)
        self._first_mark = stage.number << 32
        self._uploads = uploads
        self._decoded = decoded
        self._decoder = asyncio.Semaphore(1)

    async def run(self, requests: int) -> list[int]:
        """Make requests, and return their latencies in nanoseconds."""
        numbers = iter(range(requests))
        latencies: list[int] = []
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._width, requests)):
                group.create_task(self._requests(numbers, latencies))
        return latencies

    async def _requests(self, numbers: Iterator[int], latencies: list[int]) -> None:
        for number in numbers:
            began = perf_counter_ns()
            answer, expected = await (self._transfer(number) if self._decoded else self._upload(number))
            latencies.append(perf_counter_ns() - began)
            if answer != expected:
                raise RuntimeError(f"request {number} was answered for other frames")

    async def _transfer(self, number: int) -> tuple[int, int]:
        decoded = self._decoded[number % len(self._decoded)]
        async with self._port.slot() as slot:
            return await slot.request(torch.from_numpy(decoded.frames)), decoded.expected

    async def _upload(self, number: int) -> tuple[int, int]:
        upload, mark = self._uploads[number % len(self._uploads)], self._first_mark + number
        async with self._port.slot() as slot:
            async with self._decoder:
                frames = [await slot.allocate(upload.clip.shape)]
                await asyncio.to_thread(upload.decode, mark, frames[0])
            # From the list, so that only the contender keeps the frames.
            return await slot.request(frames.pop()), upload.expected(mark)


def _private(processes: Sequence[int]) -> int:
    return sum(map(private_bytes, processes))


def _memory(processes: Sequence[int]) -> int:
    return _private(processes) + shared_bytes()
