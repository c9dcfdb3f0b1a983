"""The plan of a run: contenders, workloads and event loops, and the reasons for omissions. Without I/O."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bench.contenders.base import Contender
from bench.measure import format_size
from bench.records import Answer, Loop, Skip, Spec
from bench.workloads.base import Workload

__all__ = ["Chapter", "Entry", "Options", "Plan", "make_plan"]


class Options(NamedTuple):
    """The options of the command line.

    Attributes:
        quick: whether to use the efforts and the contenders of a quick run.
        sizes: the sizes of the tensors, for workloads that have none of their own.
        loops: the event loops to measure.
        answer: what the far side of a round trip answers with.
        rounds: the rounds of every workload; None for each workload's own number.
        deadline_s: the time limit for one batch; None for each workload's own limit.
        contenders: only these; empty for all.
        workloads: only these; empty for all.
    """

    quick: bool
    sizes: tuple[int, ...]
    loops: tuple[Loop, ...]
    answer: Answer = "own"
    rounds: int | None = None
    deadline_s: float | None = None
    contenders: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()


class Entry(NamedTuple):
    """One contender on one loop, in one group of processes; the loop is None for a contender without one."""

    contender: Contender
    loop: Loop | None
    spec: Spec


class Chapter(NamedTuple):
    """One workload with its contenders; without rounds and contenders if it cannot be measured here."""

    workload: Workload
    rounds: int
    deadline_s: float
    entries: list[Entry]


class Plan(NamedTuple):
    """The whole run, and its omissions.

    Attributes:
        contenders: the selected contenders, installed or not.
        chapters: the workloads, in order.
        skips: the omissions, with their reasons.
    """

    contenders: list[Contender]
    chapters: list[Chapter]
    skips: list[Skip]

    @property
    def batches(self) -> int:
        """Count the batches of all rounds."""
        return sum(
            chapter.rounds * len(entry.spec.batches) for chapter in self.chapters for entry in chapter.entries
        )


def make_plan(
    options: Options,
    contenders: Mapping[str, Contender],
    workloads: Mapping[str, Workload],
    why_not: Callable[[Contender], str | None],
    why_unavailable: Callable[[Workload], str | None],
) -> Plan:
    """Select the measurements, and record a reason for each omission.

    Args:
        options: the options of the command line.
        contenders: the table of contenders.
        workloads: the table of workloads.
        why_not: returns the reason why a contender cannot be measured here.
        why_unavailable: returns the reason why a workload cannot be measured here.
    """
    skips: list[Skip] = []
    asked = []
    present = []
    for contender in contenders.values():
        if options.contenders and contender.name not in options.contenders:
            continue
        if options.quick and not options.contenders and not contender.in_quick:
            skips.append(Skip(contender.name, "a quick run leaves it out"))
            continue
        asked.append(contender)
        if reason := why_not(contender):
            skips.append(Skip(contender.name, reason))
        else:
            present.append(contender)
    chapters = []
    for workload in workloads.values():
        is_usual = workload.in_quick or not options.quick
        if not (workload.name in options.workloads if options.workloads else is_usual):
            continue
        admitted = [one for one in present if workload.admits(one)]
        reason = why_unavailable(workload) if admitted else None
        if reason is not None:
            skips += [Skip(one.name, reason, workload.name) for one in admitted]
            chapters.append(Chapter(workload, 0, 0.0, []))
            continue
        entries = [entry for one in admitted for entry in _entries(one, workload, options, skips)]
        if entries:
            effort = workload.quick if options.quick else workload.full
            deadline_s = options.deadline_s or workload.deadline_s + effort.seconds
            chapters.append(Chapter(workload, options.rounds or effort.rounds, deadline_s, entries))
    return Plan(asked, chapters, skips)


def _entries(
    contender: Contender, workload: Workload, options: Options, skips: list[Skip]
) -> Iterator[Entry]:
    if workload.name in contender.lacks:
        skips.append(Skip(contender.name, contender.lacks[workload.name], workload.name))
        return
    effort = workload.quick if options.quick else workload.full
    sizes = effort.sizes or workload.sizes or options.sizes
    carried = _carried(sizes, contender)
    if len(carried) < len(sizes):
        reason = f"it carries no more than {format_size(contender.largest or 0)}"
        skips.append(Skip(contender.name, reason, workload.name))
    loops: Sequence[Loop | None] = options.loops if contender.uses_loop else (None,)
    groups = [(count,) for count in workload.peers] if workload.is_apart else [workload.peers]
    for loop in loops if carried else ():
        for peers in groups:
            spec = Spec(
                workload=workload.name,
                sizes=carried,
                effort=effort,
                peers=peers,
                depth=workload.depth,
                source=workload.source,
                answer=options.answer,
                reply=workload.reply,
                loop=loop or "asyncio",
            )
            yield Entry(contender, loop, spec)


def _carried(sizes: tuple[int, ...], contender: Contender) -> tuple[int, ...]:
    return tuple(size for size in sizes if contender.largest is None or size <= contender.largest)
