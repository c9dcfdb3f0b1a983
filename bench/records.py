"""What the rooms of the benchmark hand to each other, and what the JSON file holds. SI units everywhere."""

from typing import Literal

import msgspec

__all__ = [
    "Answer",
    "Batch",
    "Cargo",
    "Effort",
    "Failure",
    "Loop",
    "Machine",
    "Participant",
    "Reply",
    "Report",
    "Result",
    "Skip",
    "Source",
    "Spec",
    "Verdict",
]

Answer = Literal["own", "same"]
Cargo = Literal["tensors", "messages"]
Loop = Literal["asyncio", "uvloop"]
Reply = Literal["echo", "answer"]
Source = Literal["copied", "allocated"]


class Effort(msgspec.Struct, frozen=True):
    """How much to measure; a workload uses those that mean something to it.

    Attributes:
        rounds: how often each contender is started anew.
        bytes: tensors made for one batch, in all; so large tensors make fewer trips.
        most: trips of one batch at most, whatever the size.
        fewest: trips of one batch at least, whatever the size.
        seconds: how long a batch should last, for workloads that watch a clock.
    """

    rounds: int = 1
    bytes: int = 1 << 20
    most: int = 100
    fewest: int = 1
    seconds: float = 1.0

    def trips(self, size: int) -> int:
        """Give the timed trips of one batch of tensors of `size` bytes."""
        return max(self.fewest, min(self.most, self.bytes // size))


class Spec(msgspec.Struct, frozen=True):
    """What one group of processes is to measure.

    Attributes:
        workload: its name in the table of workloads.
        sizes: bytes of the tensors.
        effort: how much of it.
        senders: how many processes send at once, one batch for each; the largest number is started.
        depth: how many tensors may be on their way at once.
        source: whether tensors come from ordinary memory or from the contender's own.
        answer: whether the far side answers with a tensor of its own or with the one it received.
        reply: whether a request is answered with a tensor of its size or with a small one.
        loop: the event loop of all processes.
    """

    workload: str
    sizes: tuple[int, ...]
    effort: Effort
    senders: tuple[int, ...] = (1,)
    depth: int = 8
    source: Source = "copied"
    answer: Answer = "own"
    reply: Reply = "echo"
    loop: Loop = "uvloop"

    @property
    def batches(self) -> list[tuple[int, int]]:
        """The size and the number of senders of each batch, in order."""
        return [(size, senders) for size in self.sizes for senders in self.senders]


class Batch(msgspec.Struct, frozen=True):
    """What a group of processes found at one size with one number of senders: trips, or named numbers.

    Attributes:
        size_bytes: bytes of the tensors.
        senders: processes that sent at once.
        latencies_ns: of each trip.
        numbers: by their names.
        bytes_per_trip: there and back together; None for the size twice.
    """

    size_bytes: int
    senders: int = 1
    latencies_ns: list[int] = []
    numbers: dict[str, float] = {}
    bytes_per_trip: int | None = None


class Result(msgspec.Struct, frozen=True):
    """What one contender did at one size, over all rounds.

    Attributes:
        workload: its name.
        contender: its name.
        loop: the event loop; None for a contender that uses none.
        size_bytes: bytes of the tensor.
        senders: processes that sent at once.
        trips: timed trips of all rounds together; 0 where the workload times no trips.
        numbers: for trips, of all rounds together; else the median of the rounds.
        rounds: the numbers of each round.
        ratio: how many times better than the baseline, by the number that the workload is judged by: the
            median of `round_ratios`; None without a baseline.
        round_ratios: each round against the same round of the baseline; how far they lie apart shows the
            noise.
    """

    workload: str
    contender: str
    loop: Loop | None
    size_bytes: int
    senders: int
    trips: int
    numbers: dict[str, float]
    rounds: list[dict[str, float]]
    ratio: float | None = None
    round_ratios: list[float] = []


class Failure(msgspec.Struct, frozen=True):
    """A contender that did not finish a workload, and takes part in no later round of it.

    Attributes:
        workload: its name.
        contender: its name.
        loop: the event loop; None for a contender that uses none.
        round: the round it failed in, from 0.
        size_bytes: the size it was at.
        reason: what it did, to be read after "it".
        output: the end of what its processes wrote to standard error.
    """

    workload: str
    contender: str
    loop: Loop | None
    round: int
    size_bytes: int
    reason: str
    output: str


class Skip(msgspec.Struct, frozen=True):
    """Something that was not measured, and why. Without a workload it was the whole contender."""

    contender: str
    reason: str
    workload: str | None = None


class Verdict(msgspec.Struct, frozen=True):
    """One goal of the design beside what was measured; no number if this run did not measure it.

    Attributes:
        work: what is measured.
        against: what it is compared with; empty if the number stands alone.
        goal: the goal, in words; empty for a number that is only shown beside one.
        measured: the median of the rounds.
        lowest: of the rounds.
        highest: of the rounds.
        unit: of the three numbers: ``"x"``, ``"s"`` or ``"%"``.
        met: whether the goal was reached; None if there is no number, or no goal for it.
    """

    work: str
    against: str
    goal: str
    unit: str
    measured: float | None = None
    lowest: float | None = None
    highest: float | None = None
    met: bool | None = None


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


class Participant(msgspec.Struct, frozen=True):
    """Somebody whom a run was to measure: a contender, or a limit that only shows what the machine can do.

    Attributes:
        name: its name.
        what: it, in a few words.
        is_limit: whether it is a limit.
        carries: what; it has no place in workloads that carry something else.
    """

    name: str
    what: str
    is_limit: bool = False
    carries: Cargo = "tensors"


class Report(msgspec.Struct, frozen=True):
    """A whole run, as the JSON file holds it."""

    quick: bool
    answer: Answer
    baseline: str
    contenders: list[Participant]
    workloads: list[str]
    seconds: float
    machine: Machine
    results: list[Result]
    goals: list[Verdict]
    failures: list[Failure]
    skips: list[Skip]
    schema: int = 2
