"""Live targets, each in a separate process, whose memory and descriptors can be measured."""

import asyncio
import contextlib
import random
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from aiotensor.transports.endpoints import Endpoint
from verification.fuzz.choosers import FromBytes
from verification.fuzz.engine import Figures
from verification.fuzz.grammar import (
    TO_INSPECTOR,
    TO_PUBLISHER,
    TO_RANK,
    TO_RECEIVER,
    TO_SENDER,
    TO_SUBSCRIBER,
    conversation,
)
from verification.fuzz.headers import TO_CLIENT, TO_SERVER
from verification.fuzz.live_client import live_client
from verification.fuzz.live_inspector import live_inspector
from verification.fuzz.live_publisher import live_publisher
from verification.fuzz.live_rank import live_rank
from verification.fuzz.live_receiver import live_receiver
from verification.fuzz.live_sender import live_sender
from verification.fuzz.live_server import live_server
from verification.fuzz.live_subscriber import live_subscriber
from verification.fuzz.living import Live
from verification.fuzz.steps import Conversation, cases
from verification.fuzz.targets import link_of, listener_of
from verification.places import endpoint

__all__ = ["LiveReport", "harass"]

_WARM_UP_SHARE = 0.3  # of the time: until the allocator has seen all sizes, and bounded tables are full
_GROWTH_KIB = 16_384  # the names of 4096 former senders, which a receiver stores, take 14 MiB
_BYTES = 1000


class _Living(Protocol):
    """Start a target in a separate process."""

    def __call__(self, endpoint: Endpoint, /, *, uvloop: bool) -> AbstractAsyncContextManager[Live]: ...


_LIVING: dict[str, _Living] = {
    TO_RECEIVER: live_receiver,
    TO_SENDER: live_sender,
    TO_INSPECTOR: live_inspector,
    TO_SERVER: live_server,
    TO_CLIENT: live_client,
    TO_PUBLISHER: live_publisher,
    TO_RANK: live_rank,
    TO_SUBSCRIBER: live_subscriber,
}


class LiveReport(msgspec.Struct):
    """The result of one target: its work, and its resources after the warm-up and at the end."""

    executions: int = 0
    summary: str = ""
    before: Figures | None = None
    after: Figures | None = None
    grown: list[str] = []
    last: Conversation | None = None  # the conversation during which it failed
    error: str = ""


def harass(target: str, seconds: float, seed: int, corpus: Sequence[bytes]) -> LiveReport:
    """Send conversations to a live process for some time."""
    report = LiveReport()
    try:
        _harass(target, seconds, seed, corpus, report)
    except AssertionError as error:
        report.error = report.error or repr(
            error
        )  # an assertion about leftovers may follow from an earlier error
    return report


def _harass(target: str, seconds: float, seed: int, corpus: Sequence[bytes], report: LiveReport) -> None:
    source = random.Random(seed)
    to = listener_of(target)
    with asyncio.Runner() as runner, endpoint(link_of(target)) as place:
        living = _LIVING[to](place, uvloop=bool(seed % 2))
        one = runner.run(living.__aenter__())
        try:
            _talk(one, runner, to, report, _inputs(to, source, corpus), seconds)
        except Exception as error:  # noqa: BLE001 - any is a finding
            report.error = "\n".join([*traceback.format_exception(error)])
            with contextlib.suppress(type(error)):
                runner.run(living.__aexit__(type(error), error, error.__traceback__))
        else:
            runner.run(living.__aexit__(None, None, None))
        report.summary = one.summary


def _talk(
    one: Live,
    runner: asyncio.Runner,
    to: str,
    report: LiveReport,
    inputs: Iterator[Conversation],
    seconds: float,
) -> None:
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        if report.before is None and passed > _WARM_UP_SHARE * seconds:
            report.before = runner.run(one.look())
        report.last = next(inputs)
        runner.run(one.hear(report.last))
        report.executions += 1
    report.last = None
    report.after = runner.run(one.look())
    report.grown = report.after.grown(report.before or report.after, _GROWTH_KIB)


def _inputs(to: str, source: random.Random, corpus: Sequence[bytes]) -> Iterator[Conversation]:
    """Yield the recorded cases, the inputs of a corpus, then random inputs and mutations of the corpus."""
    yield from cases(to).values()
    for data in corpus:
        yield conversation(FromBytes(data), to)
    while True:
        data = source.randbytes(_BYTES)
        if corpus and source.random() < 0.5:
            data = _changed(source, source.choice(corpus))
        yield conversation(FromBytes(data), to)


def _changed(source: random.Random, data: bytes) -> bytes:
    changed = bytearray(data.ljust(_BYTES, b"\0"))
    for _ in range(source.randint(1, 8)):
        changed[source.randrange(len(changed))] = source.randrange(256)
    return bytes(changed)
