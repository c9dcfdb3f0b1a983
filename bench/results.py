"""Combine the batches of all rounds into a result for each contender, size and number of peers."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bench.measure import summarize
from bench.plan import Chapter, Entry, Plan
from bench.records import Batch, Loop, Result

__all__ = ["Key", "Samples", "gather", "key_of"]

_BOTH_WAYS = 2


class Key(NamedTuple):
    """The identity of a measurement that is repeated in each round."""

    workload: str
    contender: str
    loop: Loop | None
    size_bytes: int
    peers: int


Samples = dict[Key, list[Batch]]


def key_of(entry: Entry, batch: Batch) -> Key:
    """Return the measurement that a batch is a sample of."""
    return Key(entry.spec.workload, entry.contender.name, entry.loop, batch.size_bytes, batch.peers)


def gather(plan: Plan, samples: Mapping[Key, Sequence[Batch]], baseline: str) -> list[Result]:
    """Return the results in the order of the plan, without missing measurements."""
    return [result for chapter in plan.chapters for result in _chapter(chapter, samples, baseline)]


def _chapter(chapter: Chapter, samples: Mapping[Key, Sequence[Batch]], baseline: str) -> Iterator[Result]:
    for entry in chapter.entries:
        for size, peers in entry.spec.batches:
            key = Key(chapter.workload.name, entry.contender.name, entry.loop, size, peers)
            if batches := samples.get(key):
                other = chapter.workload.baseline or baseline
                theirs = samples.get(key._replace(contender=other, loop=None), [])
                # A baseline that uses an event loop is compared with on the same one.
                theirs = theirs or samples.get(key._replace(contender=other), [])
                yield _result(chapter, key, batches, theirs)


def _result(chapter: Chapter, key: Key, batches: Sequence[Batch], theirs: Sequence[Batch]) -> Result:
    score = chapter.workload.score
    rounds = [_numbers(batch) for batch in batches]
    # Each round is compared with the baseline's in the same round, so that slow drift cancels out.
    # A contender that failed has fewer rounds; a number of 0 has no ratio.
    ratios = [
        ours[score] / other[score] if chapter.workload.more_is_better else other[score] / ours[score]
        for ours, other in zip(rounds, map(_numbers, theirs), strict=False)
        if ours[score] > 0 and other[score] > 0
    ]
    return Result(
        workload=key.workload,
        contender=key.contender,
        loop=key.loop,
        size_bytes=key.size_bytes,
        peers=key.peers,
        trips=sum(len(batch.latencies_ns) for batch in batches),
        numbers=_together(batches, rounds),
        rounds=rounds,
        ratio=statistics.median(ratios) if ratios else None,
        round_ratios=ratios,
    )


def _together(batches: Sequence[Batch], rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    numbers = {name: statistics.median(numbers[name] for numbers in rounds) for name in rounds[0]}
    latencies = [latency for batch in batches for latency in batch.latencies_ns]
    if latencies:
        numbers |= summarize(latencies, _bytes_per_trip(batches[0]))
    return numbers


def _numbers(batch: Batch) -> dict[str, float]:
    if not batch.latencies_ns:
        return batch.numbers
    return batch.numbers | summarize(batch.latencies_ns, _bytes_per_trip(batch))


def _bytes_per_trip(batch: Batch) -> int:
    return _BOTH_WAYS * batch.size_bytes if batch.bytes_per_trip is None else batch.bytes_per_trip
