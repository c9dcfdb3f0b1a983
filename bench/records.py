"""The records that the modules of the benchmark exchange, and those of the JSON file. SI units everywhere."""

from typing import Literal

import msgspec

Loop = Literal["uvloop", "asyncio"]
Source = Literal["copied", "allocated", "decoded", "computed"]


class Effort(msgspec.Struct, frozen=True):
    """How much to measure; each workload uses some of these limits.

    Attributes:
        rounds: how often each contender is started.
        bytes: the total size of the tensors of one batch; so large tensors make fewer trips.
        most: the maximum number of trips of one batch.
        fewest: the minimum number of trips of one batch.
        seconds: the intended duration of a batch, for workloads that are limited by time.
    """

    rounds: int = 1
    bytes: int = 1 << 20
    most: int = 100
    fewest: int = 1
    seconds: float = 1.0

    def trips(self, size: int) -> int:
        """Return the number of timed trips of one batch of tensors of `size` bytes."""
        return max(self.fewest, min(self.most, self.bytes // size))


class Spec(msgspec.Struct, frozen=True):
    """The task of one group of processes.

    Attributes:
        workload: its name in the table of workloads.
        sizes: bytes of the tensors.
        effort: how much of it.
        loop: the event loop of all processes.
        peers: how many processes of the side that has several take part, one batch for each; the largest
            number is started.
        depth: how many tensors may be in flight at once, for each peer; of videos, in total.
        source: whether tensors come from ordinary memory, from memory of the contender, or from a decoder.
        answer_bytes: the size of the tensor in an answer to a request; None for that of the request.
    """

    workload: str
    sizes: tuple[int, ...]
    effort: Effort
    loop: Loop
    peers: tuple[int, ...]
    depth: int
    source: Source
    answer_bytes: int | None

    @property
    def batches(self) -> list[tuple[int, int]]:
        """The size and the number of peers of each batch, in order."""
        return [(size, peers) for size in self.sizes for peers in self.peers]


class Batch(msgspec.Struct, frozen=True):
    """The measurements of a group of processes at one size and number of peers: trips, or named numbers.

    Attributes:
        size_bytes: the size of the tensors.
        peers: the processes of the side that has several.
        latencies_ns: the latency of each trip.
        numbers: the measured numbers by their names.
    """

    size_bytes: int
    peers: int = 1
    latencies_ns: list[int] = []
    numbers: dict[str, float] = {}


class Result(msgspec.Struct, frozen=True):
    """The result of one contender at one size, over all rounds.

    Attributes:
        workload: the name of the workload.
        contender: the name of the contender.
        size_bytes: the size of the tensor.
        peers: the processes of the side that has several.
        numbers: the numbers of all rounds together for trips, and otherwise the median of the rounds.
        rounds: the numbers of each round.
        ratios: how many times better than the baseline each round is, by the number that the workload is
            judged by, in the same round of the baseline; their spread shows the noise.
    """

    workload: str
    contender: str
    size_bytes: int
    peers: int
    numbers: dict[str, float]
    rounds: list[dict[str, float]]
    ratios: list[float]


class Failure(msgspec.Struct, frozen=True):
    """A contender that crashed or hung in one workload.

    Attributes:
        workload: the name of the workload.
        contender: the name of the contender.
        round: the round in which it failed, from 0.
        reason: the failure, as a predicate of the subject "it".
        output: the last output of its processes on standard error.
    """

    workload: str
    contender: str
    round: int
    reason: str
    output: str


class Skip(msgspec.Struct, frozen=True):
    """A contender or a workload that was not measured, and the reason."""

    name: str
    reason: str


class Verdict(msgspec.Struct, frozen=True):
    """One goal of the design with the measured number; None if this run did not measure it.

    Attributes:
        work: what is measured.
        against: the reference of the comparison; empty if there is none.
        goal: the goal, in words; empty for a number that is only shown beside one.
        unit: the unit of the three numbers: ``"x"``, ``"s"``, ``"%"`` or ``"calls"``.
        measured: the median of the rounds.
        lowest: the lowest number of the rounds.
        highest: the highest number of the rounds.
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
    """The machine of a run; the load is the one-minute average of the system."""

    cores: int
    cpu: str
    memory_bytes: int
    kernel: str
    python: str
    versions: dict[str, str]
    load_before: float
    load_after: float


class Participant(msgspec.Struct, frozen=True):
    """A contender of a run, or a limit, which only shows the speed of the machine."""

    name: str
    what: str
    is_limit: bool


class Report(msgspec.Struct, frozen=True):
    """A whole run, as stored in the JSON file."""

    quick: bool
    loop: Loop
    contenders: list[Participant]
    workloads: list[str]
    seconds: float
    machine: Machine
    results: list[Result]
    goals: list[Verdict]
    failures: list[Failure]
    skips: list[Skip]
    schema: int = 4
