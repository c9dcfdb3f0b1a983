"""The plan of a run: contenders and workloads, and the reasons for omissions."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import NamedTuple

from msgspec.structs import replace

from bench.contenders.base import Contender
from bench.records import Loop, Skip, Spec
from bench.workloads import why_unavailable
from bench.workloads.base import Workload


class Options(NamedTuple):
    """The options of the command line.

    Attributes:
        quick: whether to use the efforts and the contenders of a quick run.
        sizes: the sizes of the tensors, for workloads that have none of their own.
        loop: the event loop of all processes.
        rounds: the rounds of every workload; None for each workload's own number.
        deadline_s: the time limit for one batch; None for each workload's own limit.
        contenders: only these; empty for all.
        workloads: only these; empty for all.
    """

    quick: bool
    sizes: tuple[int, ...]
    loop: Loop
    rounds: int | None
    deadline_s: float | None
    contenders: tuple[str, ...]
    workloads: tuple[str, ...]


class Entry(NamedTuple):
    """One contender in one group of processes."""

    contender: Contender
    spec: Spec


class Chapter(NamedTuple):
    """One workload with its contenders."""

    workload: Workload
    rounds: int
    deadline_s: float
    entries: list[Entry]


class Plan(NamedTuple):
    """The whole run, and its omissions.

    Attributes:
        contenders: the contenders that can be measured.
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
    options: Options, contenders: Mapping[str, Contender], workloads: Mapping[str, Workload]
) -> Plan:
    """Select the measurements, and record a reason for each omission.

    Args:
        options: the options of the command line.
        contenders: the table of contenders.
        workloads: the table of workloads.
    """
    plan = Plan([], [], [])
    for one in contenders.values():
        if not (one.name in options.contenders or (not options.contenders and _is_usual(one, options))):
            continue
        if one.needs is not None and find_spec(one.needs) is None:
            plan.skips.append(Skip(one.name, "it is not installed; `make bench-peers` installs it"))
        else:
            plan.contenders.append(one)
    for workload in workloads.values():
        if not (
            workload.name in options.workloads or (not options.workloads and _is_usual(workload, options))
        ):
            continue
        present = [one for one in plan.contenders if one.name in workload.contenders]
        if present and (reason := why_unavailable(workload)) is not None:
            plan.skips.append(Skip(workload.name, reason))
            continue
        effort = workload.quick if options.quick else workload.full
        entries = [entry for one in present for entry in _entries(one, workload, options)]
        if entries:
            deadline_s = options.deadline_s or workload.deadline_s + effort.seconds
            plan.chapters.append(Chapter(workload, options.rounds or effort.rounds, deadline_s, entries))
    return plan


def _is_usual(one: Contender | Workload, options: Options) -> bool:
    return one.in_quick or not options.quick


def _entries(contender: Contender, workload: Workload, options: Options) -> list[Entry]:
    largest = contender.largest
    sizes = workload.sizes or options.sizes
    spec = Spec(
        workload=workload.name,
        sizes=tuple(size for size in sizes if largest is None or size <= largest),
        effort=workload.quick if options.quick else workload.full,
        loop=options.loop,
        peers=workload.peers,
        depth=workload.depth,
        source=workload.source,
        answer_bytes=workload.answer_bytes,
    )
    groups = [(count,) for count in workload.peers] if workload.is_apart else [workload.peers]
    return [Entry(contender, replace(spec, peers=peers)) for peers in groups if spec.sizes]
