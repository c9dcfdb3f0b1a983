"""What the rooms of the benchmark hand to each other, and what the JSON file holds."""

from typing import Literal

import msgspec

__all__ = ["Answer", "Batch", "Effort", "Failure", "Machine", "Report", "Result", "Spec", "Summary"]

Answer = Literal["own", "same"]


class Effort(msgspec.Struct, frozen=True):
    """How long to measure at each size.

    Attributes:
        bytes: tensors made for one batch, in all; so large tensors make fewer trips.
        most: trips of one batch at most, whatever the size.
        fewest: trips of one batch at least, whatever the size.
    """

    bytes: int
    most: int
    fewest: int

    def trips(self, size: int) -> int:
        """Give the timed trips of one batch of tensors of `size` bytes."""
        return max(self.fewest, min(self.most, self.bytes // size))


class Spec(msgspec.Struct, frozen=True):
    """What a pair of processes is to measure.

    Attributes:
        workload: its name in the table of workloads.
        sizes: bytes of the tensors, one batch each.
        effort: how many trips make a batch.
        answer: whether the far side answers with a tensor of its own or with the one it received.
        loop: the event loop of both processes, ``"asyncio"`` or ``"uvloop"``.
    """

    workload: str
    sizes: tuple[int, ...]
    effort: Effort
    answer: Answer
    loop: str


class Batch(msgspec.Struct, frozen=True):
    """The trips that a pair of processes has timed at one size."""

    size_bytes: int
    latencies_ns: list[int]


class Summary(msgspec.Struct, frozen=True):
    """Latencies in seconds, and the rate of the median trip in 10**9 bytes per second, both ways counted."""

    trips: int
    median_s: float
    p99_s: float
    min_s: float
    gigabytes_per_second: float


class Result(msgspec.Struct, frozen=True):
    """What one contender did at one size, over all rounds.

    Attributes:
        contender: its name.
        size_bytes: bytes of the tensor.
        summary: of the trips of all rounds together.
        round_medians_s: the median of each round.
        round_ratios: the baseline's median over this one in each round, so 2.0 is twice as fast;
            how far they lie apart shows the noise.
        ratio: the median of those; None without a baseline.
    """

    contender: str
    size_bytes: int
    summary: Summary
    round_medians_s: list[float]
    ratio: float | None
    round_ratios: list[float]


class Failure(msgspec.Struct, frozen=True):
    """A contender that did not finish.

    Attributes:
        contender: its name.
        round: the round it failed in, from 0; it takes part in no later one.
        size_bytes: the size it was at.
        reason: one sentence.
        output: the end of what its processes wrote to standard error.
    """

    contender: str
    round: int
    size_bytes: int
    reason: str
    output: str


class Machine(msgspec.Struct, frozen=True):
    """Where the numbers come from; load is the one-minute average of the system."""

    cores: int
    cpu: str
    memory_bytes: int
    kernel: str
    python: str
    versions: dict[str, str]
    load_before: float
    load_after: float


class Report(msgspec.Struct, frozen=True):
    """A whole run, as the JSON file holds it."""

    workload: str
    contenders: list[str]
    sizes_bytes: tuple[int, ...]
    answer: Answer
    loop: str
    rounds: int
    baseline: str
    machine: Machine
    results: list[Result]
    failures: list[Failure]
    schema: int = 1
