"""The results of a run: counted during the run, printed at its end."""

import shlex
import statistics
from collections import Counter, defaultdict

import msgspec
from rich.console import Console
from rich.table import Table

from verification.chaos.audit import Tally
from verification.chaos.plan import FAMILIES, FaultKind, Hold, Round
from verification.chaos.rounds import Times

__all__ = ["Run"]

_FEWEST_SAMPLES = 80
_GROWTH_KIB = 4096  # of an allocator that has not served every size during warm-up


class Run:
    """One run of a seed."""

    def __init__(self, seed: int, only: str | None = None) -> None:
        self.seed = seed
        self.only = only  # the family, if there is one
        self.notes: list[str] = []  # features that could not be tested on this machine
        self.seconds = 0.0
        self.times = Times()
        self.tally = Tally()
        self.problems: list[str] = []
        self.failed: Round | None = None
        self.memory: dict[str, list[int]] = defaultdict(list)  # of processes that outlive all rounds, in KiB
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

    def note_abort(self, plan: Round) -> None:
        """Count a round in which ZeroMQ ended a process."""
        self._faults[f"given up, since ZeroMQ ended a process: rounds of {plan.family!r}"] += 1

    def memory_problems(self, family: str) -> list[str]:
        """Return a problem if the process that lived for the whole run has grown since its warm-up."""
        samples = self.memory[family]
        if len(samples) < _FEWEST_SAMPLES:
            return []
        quarter = len(samples) // 4
        before, after = (
            statistics.median(samples[quarter : 2 * quarter]),
            statistics.median(samples[-quarter:]),
        )
        if after - before <= _GROWTH_KIB:
            return []
        return [
            f"the elder of {family} grew from {before} KiB to {after} KiB: {samples[:: len(samples) // 40]}"
        ]

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
        for family, samples in self.memory.items():
            course = ", ".join(str(sample >> 10) for sample in samples[:: len(samples) // 8 or 1])
            if samples:
                table.add_row(f"memory of the elder of {family!r}", f"{course} MiB")
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
            only = "" if self.only is None else f" --family {shlex.quote(self.only)}"
            again = f"python -m verification.chaos --seed {self.seed} --rounds {number} --repeat 20{only}"
            console.print(f"\nto play it again: {again}", markup=False)
