"""Combine the batches of all rounds into a result for each contender, size and number of peers."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bench.measure import summarize
from bench.plan import Chapter, Entry, Plan
from bench.records import Batch, Result
from bench.workloads.base import Workload


class Key(NamedTuple):
    """The identity of a measurement that is repeated in each round."""

    workload: str
    contender: str
    size_bytes: int
    peers: int


Samples = dict[Key, list[Batch]]


def key_of(entry: Entry, batch: Batch) -> Key:
    """Return the measurement that a batch is a sample of."""
    return Key(entry.spec.workload, entry.contender.name, batch.size_bytes, batch.peers)


def gather(plan: Plan, samples: Mapping[Key, Sequence[Batch]]) -> list[Result]:
    """Return the results in the order of the plan, without missing measurements."""
    return [result for chapter in plan.chapters for result in _chapter(chapter, samples)]


def _chapter(chapter: Chapter, samples: Mapping[Key, Sequence[Batch]]) -> Iterator[Result]:
    for entry in chapter.entries:
        for size, peers in entry.spec.batches:
            key = Key(chapter.workload.name, entry.contender.name, size, peers)
            if batches := samples.get(key):
                theirs = samples.get(key._replace(contender=chapter.workload.baseline), [])
                yield _result(chapter.workload, key, batches, theirs)


def _result(workload: Workload, key: Key, batches: Sequence[Batch], theirs: Sequence[Batch]) -> Result:
    score = workload.score
    rounds = [_numbers(batch) for batch in batches]
    # Each round is compared with the baseline's in the same round, so that slow drift cancels out.
    # A contender that failed has fewer rounds; a number of 0 has no ratio.
    ratios = [
        ours[score] / other[score] if workload.more_is_better else other[score] / ours[score]
        for ours, other in zip(rounds, map(_numbers, theirs), strict=False)
        if ours[score] > 0 and other[score] > 0
    ]
    numbers = {name: statistics.median(numbers[name] for numbers in rounds) for name in rounds[0]}
    if latencies := [latency for batch in batches for latency in batch.latencies_ns]:
        numbers |= summarize(latencies)
    return Result(*key, numbers=numbers, rounds=rounds, ratios=ratios)


def _numbers(batch: Batch) -> dict[str, float]:
    return batch.numbers | (summarize(batch.latencies_ns) if batch.latencies_ns else {})
