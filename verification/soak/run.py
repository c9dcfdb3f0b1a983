"""Run a soak: an engine and its senders for each link, sampled from outside until the time is over."""

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from verification.places import endpoint
from verification.processes.peers import Peer
from verification.soak import engine, pieces, source
from verification.soak.judge import judgements, leftovers
from verification.soak.numbers import of_kernel
from verification.soak.records import LINKS, Report, Sample

__all__ = ["soak"]

_ENGINE = "engine"
_SENDERS = ("sender 1", "sender 2")
_SAMPLES = 600  # of a long run
_LONGEST_PAUSE_S = 10.0
_SHORTEST_PAUSE_S = 0.05
_VISIT_S = (0.5, 5.0)
_SETTLING_S = 240.0  # a step that takes longer hangs, also on a busy machine

_Work = Callable[..., Coroutine[Any, Any, Any]]


class _Family:
    """The processes of one link.

    Args:
        link: the name of the link.
        seed: the seed of all random choices.
        seconds: the duration of the load.
    """

    def __init__(self, link: str, seed: int, seconds: float) -> None:
        self.link = link
        self.samples: list[Sample] = []
        self.rest: dict[str, dict[str, float]] = {}
        self.visitors = 0
        self._random = Random(seed)
        self._seconds = seconds
        self._peers: dict[str, Peer] = {}

    async def live(self) -> None:
        """Run all processes; raise an error of any of them."""
        with tempfile.TemporaryDirectory(prefix="aiotensor-") as folder, endpoint(self.link) as place:
            self._folder, self._place = Path(folder), place
            pieces.fill(self._folder / "store", self._seed())
            try:
                for name in (_ENGINE, *_SENDERS):
                    self._peers[name] = Peer(place)
                await self._load()
                await self._finish()
            finally:
                for peer in self._peers.values():
                    await peer.close()

    async def _load(self) -> None:
        loop = asyncio.get_running_loop()
        serving = self._start(_ENGINE, engine.run, self._folder, self._seed())
        await self._unless(serving, self._start(_ENGINE, engine.ready))
        began = loop.time()
        sending = [
            self._start(name, source.run, self._folder, self._seed(), self._seconds) for name in _SENDERS
        ]
        visiting = loop.create_task(self._visit(began + self._seconds - _VISIT_S[0]))
        ended = asyncio.gather(*sending, visiting)
        pause = max(_SHORTEST_PAUSE_S, min(self._seconds / _SAMPLES, _LONGEST_PAUSE_S))
        try:
            while not ended.done() and not serving.done():
                await self._sample(began)
                await asyncio.wait([ended, serving], timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            async with asyncio.timeout(_SETTLING_S):
                await self._unless(serving, ended)
                settling = [self._start(name, source.settle) for name in _SENDERS]
                self.rest[_ENGINE] = await self._start(_ENGINE, engine.settle)
                for name, settled in zip(_SENDERS, settling, strict=True):
                    self.rest[name] = await settled
                await serving
        finally:
            ended.cancel()
            await asyncio.gather(ended, visiting, return_exceptions=True)

    async def _finish(self) -> None:
        """End the processes, and check their exit statuses."""
        for name, peer in self._peers.items():
            self.rest[name] |= of_kernel(peer.pid)
            status = await peer.finish()
            if status != 0:
                raise RuntimeError(f"{name} ended with status {status}")

    async def _visit(self, until: float) -> None:
        """Start processes one after the other, each of which sends for a while and ends."""
        loop = asyncio.get_running_loop()
        while (left := until - loop.time()) > 0:
            visitor = Peer(self._place)
            try:
                seconds = min(self._random.uniform(*_VISIT_S), left)
                await visitor.call(source.visit, self._folder, self._seed(), seconds)
                status = await visitor.finish()
            finally:
                await visitor.close()
            if status != 0:
                raise RuntimeError(f"a visitor ended with status {status}")
            self.visitors += 1

    async def _sample(self, began: float) -> None:
        at = asyncio.get_running_loop().time() - began
        reports = {name: self._peers[name].start(source.report) for name in _SENDERS}
        reports[_ENGINE] = self._peers[_ENGINE].start(engine.report)
        found = {name: of_kernel(self._peers[name].pid) | await report for name, report in reports.items()}
        warm = {name: found[name].get("warm bytes", 0) for name in _SENDERS}
        warm[_ENGINE] = sum(warm.values())  # it maps the segments of both senders
        for name, numbers in found.items():
            numbers["other shared memory"] = numbers["shared memory"] - warm[name]
            self.samples.append(Sample(at, self.link, name, numbers))

    def _start(self, name: str, work: _Work, *arguments: object) -> "asyncio.Future[Any]":
        return self._peers[name].start(work, *arguments)

    @staticmethod
    async def _unless(serving: "asyncio.Future[None]", awaited: "asyncio.Future[Any]") -> None:
        """Wait for a result, or raise an error of the engine if it fails first."""
        await asyncio.wait([awaited, serving], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        await awaited

    def _seed(self) -> int:
        return self._random.getrandbits(32)


async def soak(seconds: float, seed: int) -> Report:
    """Run a soak over both links concurrently; the report includes all errors."""
    random = Random(seed)
    families = [_Family(link, random.getrandbits(32), seconds) for link in LINKS]
    ends = await asyncio.gather(*(family.live() for family in families), return_exceptions=True)
    failures = []
    for family, error in zip(families, ends, strict=True):
        if error is not None:
            failures.append(f"{family.link}: {_describe(error)}")
    rest = {family.link: family.rest for family in families}
    report = Report(
        seconds=seconds,
        seed=seed,
        processes=[_ENGINE, *_SENDERS],
        samples=[sample for family in families for sample in family.samples],
        rest=rest,
        visitors={family.link: family.visitors for family in families},
        failures=failures + leftovers(rest),
    )
    return msgspec.structs.replace(report, judgements=judgements(report))


def _describe(error: BaseException) -> str:
    """Describe an error, or all errors of an exception group."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_describe(one) for one in error.exceptions)
    return f"{type(error).__name__}: {error}"
