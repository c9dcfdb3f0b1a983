"""The results of a run: counted during the run, printed at its end."""

import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from verification.chaos.audit import Tally
from verification.chaos.growth import ALLOWED, Sample, grows, trend
from verification.chaos.plan import FAMILIES, FaultKind, Hold, Round
from verification.chaos.rounds import Times

__all__ = ["Run"]


class Run:
    """One run of a seed."""

    def __init__(self, seed: int, only: Sequence[str] = ()) -> None:
        self.seed = seed
        self.only = only  # the families, if not all
        self.notes: list[str] = []  # features that could not be tested on this machine
        self.seconds = 0.0
        self.times = Times()
        self.tally = Tally()
        self.problems: list[str] = []
        self.failed: Round | None = None
        self.samples: dict[str, list[Sample]] = defaultdict(list)  # of processes that outlive all rounds
        self._rounds = Counter[str]()
        self._faults = Counter[str]()

    def note(self, plan: Round, problems: list[str]) -> None:
        """Count a finished round."""
        self._rounds[plan.family] += 1
        for fault in plan.faults:
            if fault.kind is FaultKind.PARTITION and self.notes:
                continue  # the network cannot be cut on this machine
            self._faults[f"{fault.kind.value} ({plan.who(fault)})"] += 1
        for taker in plan.takers:
            self._faults["the receiver takes nothing for a while"] += taker.stuck_ms > 0
            self._faults["the receiver is slow"] += taker.slow_ms > 0
            holds = taker.hold is not Hold.DROP and taker.hold_ms > 0
            self._faults["the receiver holds what it took"] += holds
        self._faults["a full socket"] += plan.publisher is None and any(
            len(sender.parts[0]) > 12 for sender in plan.senders
        )
        if problems:
            self.failed = plan
            self.problems += problems

    def add(self, family: str, at: float, numbers: Mapping[str, float]) -> None:
        """Add a sample of the process of a family that lives for the whole run."""
        self.samples[family].append(Sample(at, numbers))

    def growth_problems(self, family: str) -> list[str]:
        """Return a problem for each quantity of the process that has grown since its warm-up."""
        problems = []
        for name, allowance in ALLOWED.items():
            found = trend(self.samples[family], name)
            if found is not None and grows(found, allowance):
                problems.append(f"{name} of the elder of {family!r} grow: {found}")
        return problems

    def print(self) -> None:
        """Print the results."""
        console = Console(soft_wrap=True, width=100)
        rounds = sum(self._rounds.values())
        console.print(f"seed {self.seed}: {rounds} rounds in {self.seconds:.0f} s")
        table = Table("what happened", "times", box=None)
        for family in FAMILIES:
            table.add_row(f"rounds of the family {family!r}", str(self._rounds[family]))
        for fault, count in sorted(self._faults.items()):
            table.add_row(fault, str(count))
        for name in ("taken", "discarded", "lost", "unsent", "unknown"):
            table.add_row(f"tensors {name}", str(getattr(self.tally, name)))
        for end, count in sorted(self.tally.questions.items()):
            table.add_row(f"questions {end}", str(count))
        for end, count in sorted(self.tally.publications.items()):
            table.add_row(f"publications {end}", str(count))
        for error, count in sorted(self.tally.errors.items()):
            table.add_row(f"of sends: {error}", str(count))
        for name, seconds in msgspec.structs.asdict(self.times).items():
            table.add_row(f"longest time: {name.replace('_', ' ')}", f"{seconds * 1000:.0f} ms")
        for family, samples in self.samples.items():
            course = [sample.numbers["private memory, MiB"] for sample in samples]
            text = ", ".join(f"{memory:.0f}" for memory in course[:: len(course) // 8 or 1])
            table.add_row(f"memory of the elder of {family!r}", f"{text} MiB")
        console.print(table)
        for text in self.notes:
            console.print(text, markup=False)
        if self.problems:
            console.print("\nWRONG:", style="bold red")
            for problem in self.problems:
                console.print(problem, markup=False)
        if self.failed is not None:
            number = self.failed.number
            plan = msgspec.json.format(msgspec.json.encode(self.failed), indent=1).decode()
            console.print(f"\nround {number}: {plan}", markup=False)
            only = f" --family {shlex.quote(self.only[0])}" if self.only else ""
            again = f"python -m verification.chaos --seed {self.seed} --rounds {number} --repeat 20{only}"
            console.print(f"\nto play it again: {again}", markup=False)
