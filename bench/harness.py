"""Run the contenders in rounds, each in fresh processes, and gather what they measured."""

import asyncio
import os
import signal
import statistics
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import IO

import msgspec

from bench.contenders.base import Contender
from bench.machine import describe
from bench.measure import format_size, summarize
from bench.records import Batch, Failure, Report, Result, Spec

__all__ = ["measure"]

_LONGEST_LINE = 1 << 26
_OUTPUT_TAIL = 4000
_BOTH_WAYS = 2

# For each contender and size, the latencies in nanoseconds of each round.
_Samples = dict[tuple[str, int], list[list[int]]]


class _FailedError(Exception):
    """A contender did not finish; carries the reason in one sentence and the size it was at."""

    def __init__(self, reason: str, size: int) -> None:
        super().__init__(reason)
        self.size = size


async def measure(
    contenders: Sequence[Contender],
    spec: Spec,
    *,
    baseline: str,
    rounds: int,
    deadline_s: float,
    on_batch: Callable[[str, int, int], None] = lambda contender, round_number, size: None,
) -> Report:
    """Measure every contender in every round and report.

    The contenders take turns, and each round begins with another one, so that a machine whose speed
    drifts treats all of them alike. One that fails is reported and takes part in no later round.

    Args:
        contenders: whom to measure.
        spec: what to measure, the same for all.
        baseline: the name of the contender that the ratios refer to.
        rounds: how often each contender is started anew.
        deadline_s: seconds that a contender may take for each size; for the first, starting included.
        on_batch: called with contender, round and size after each batch.
    """
    load_before = os.getloadavg()[0]
    names = [contender.name for contender in contenders]
    samples: _Samples = defaultdict(list)
    failures: dict[str, Failure] = {}

    def file(name: str, number: int, batch: Batch) -> None:
        samples[name, batch.size_bytes].append(batch.latencies_ns)
        on_batch(name, number, batch.size_bytes)

    for number in range(rounds):
        first = number % len(contenders)
        for name, module, _ in (*contenders[first:], *contenders[:first]):
            if name in failures:
                continue
            with tempfile.TemporaryFile() as errors:
                try:
                    await _run_pair(module, spec, errors, deadline_s, partial(file, name, number))
                except _FailedError as error:
                    failures[name] = Failure(name, number, error.size, str(error), _tail(errors))
    return Report(
        workload=spec.workload,
        contenders=names,
        sizes_bytes=spec.sizes,
        answer=spec.answer,
        loop=spec.loop,
        rounds=rounds,
        baseline=baseline,
        machine=describe(load_before),
        results=[
            _result(name, size, samples[name, size], samples.get((baseline, size), []))
            for size in spec.sizes
            for name in names
            if (name, size) in samples
        ],
        failures=list(failures.values()),
    )


async def _run_pair(
    module: str, spec: Spec, errors: IO[bytes], deadline_s: float, file: Callable[[Batch], None]
) -> None:
    command = [sys.executable, "-m", "bench.worker", module, msgspec.json.encode(spec).decode()]
    # A session of its own, so that the pair and whatever it starts can be ended together.
    process = await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, stdout=PIPE, stderr=errors, start_new_session=True, limit=_LONGEST_LINE
    )
    if process.stdout is None:
        raise RuntimeError("the worker was started without a pipe for its results")
    size = spec.sizes[0]
    try:
        for size in spec.sizes:
            async with asyncio.timeout(deadline_s):
                line = await process.stdout.readline()
                if not line.endswith(b"\n"):
                    status = await process.wait()
                    reason = f"ended with exit status {status} before it finished {format_size(size)}"
                    raise _FailedError(reason, size)
            file(msgspec.json.decode(line, type=Batch))
        async with asyncio.timeout(deadline_s):
            if status := await process.wait():
                raise _FailedError(f"finished every size and then ended with exit status {status}", size)
    except TimeoutError:
        reason = f"did not finish {format_size(size)} and go on within {deadline_s:g} s, and was killed"
        raise _FailedError(reason, size) from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _result(name: str, size: int, rounds: Sequence[list[int]], baseline: Sequence[list[int]]) -> Result:
    # Each round is compared with the baseline's in the same round, so that slow drift cancels out.
    # A contender that failed has fewer rounds.
    round_ratios = [
        statistics.median(theirs) / statistics.median(ours)
        for theirs, ours in zip(baseline, rounds, strict=False)
    ]
    return Result(
        contender=name,
        size_bytes=size,
        summary=summarize([latency for batch in rounds for latency in batch], _BOTH_WAYS * size),
        round_medians_s=[statistics.median(batch) / 1e9 for batch in rounds],
        ratio=statistics.median(round_ratios) if round_ratios else None,
        round_ratios=round_ratios,
    )


def _tail(errors: IO[bytes]) -> str:
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - _OUTPUT_TAIL))
    return errors.read().decode(errors="replace").strip()
