"""The measurements of a run, and the reasons for omitted ones."""

from collections.abc import Sequence

import pytest

from bench.contenders import BASELINE, CONTENDERS, missing, why_not
from bench.contenders.base import Contender
from bench.plan import Options, Plan, make_plan
from bench.records import Effort, Skip
from bench.workloads import WORKLOADS, why_unavailable
from bench.workloads.base import Workload
from tests.bench.reports import KIB, contender, workload
from tests.sending.test_memory import MIB

SIZES = (4 * KIB, MIB)


def plan_of(
    contenders: Sequence[Contender],
    workloads: Sequence[Workload] = (workload(),),
    options: Options | None = None,
    absent: Sequence[str] = (),
    unavailable: Sequence[str] = (),
) -> Plan:
    return make_plan(
        options or Options(quick=False, sizes=SIZES, loops=("uvloop", "asyncio")),
        {one.name: one for one in contenders},
        {one.name: one for one in workloads},
        lambda one: "not installed" if one.name in absent else None,
        lambda one: "forbidden" if one.name in unavailable else None,
    )


def test_only_contenders_that_use_a_loop_run_on_several_loops() -> None:
    (chapter,) = plan_of([contender("ours", uses_loop=True), contender("other")]).chapters
    assert [(entry.contender.name, entry.loop) for entry in chapter.entries] == [
        ("ours", "uvloop"),
        ("ours", "asyncio"),
        ("other", None),
    ]


def test_a_contender_that_is_not_installed_is_listed_as_skipped() -> None:
    plan = plan_of([contender("here"), contender("absent")], absent=["absent"])
    assert [one.name for one in plan.contenders] == ["here", "absent"]
    assert plan.skips == [Skip("absent", "not installed")]
    assert [entry.contender.name for entry in plan.chapters[0].entries] == ["here"]


def test_a_missing_module_is_reported_with_what_installs_it() -> None:
    reason = why_not(contender("absent", needs={"no_such_module": "no-such-package", "json": "json"}))
    assert reason == "no-such-package is not installed; `pip install --group bench-peers` installs it"
    assert missing({"json": "json"}) == []
    assert why_not(contender("plain")) is None


def test_an_unsupported_workload_is_skipped_with_a_reason() -> None:
    plan = plan_of([contender("other", lacks={"round-trip": "it cannot"})])
    assert plan.chapters == []
    assert plan.skips == [Skip("other", "it cannot", "round-trip")]


def test_a_workload_includes_only_contenders_of_its_kind() -> None:
    them = [contender("ours"), contender("asking", carries="messages")]
    works = [workload(), workload("request-answer", carries="messages", reply="answer")]
    plan = plan_of(them, works)
    assert [[entry.contender.name for entry in chapter.entries] for chapter in plan.chapters] == [
        ["ours"],
        ["asking"],
    ]
    assert plan.chapters[1].entries[0].spec.reply == "answer"
    assert plan.skips == []


def test_a_workload_between_hosts_includes_only_contenders_that_span_hosts() -> None:
    them = [contender("local"), contender("both", spans_hosts=True)]
    plan = plan_of(them, [workload(), workload("two-hosts", between_hosts=True)])
    assert [[entry.contender.name for entry in chapter.entries] for chapter in plan.chapters] == [
        ["local", "both"],
        ["both"],
    ]
    assert plan.skips == []


def test_an_unavailable_workload_is_skipped_with_a_reason() -> None:
    them = [contender("local"), contender("both", spans_hosts=True)]
    works = [workload(), workload("two-hosts", between_hosts=True)]
    plan = plan_of(them, works, unavailable=["two-hosts"])
    assert [(chapter.workload.name, len(chapter.entries)) for chapter in plan.chapters] == [
        ("round-trip", 2),
        ("two-hosts", 0),
    ]
    assert plan.chapters[1].rounds == 0
    assert plan.skips == [Skip("both", "forbidden", "two-hosts")]
    # Nothing is checked, and nothing skipped, if no selected contender takes part.
    assert plan_of(them[:1], works[1:], unavailable=["two-hosts"]) == Plan(them[:1], [], [])


def test_a_workload_between_hosts_needs_network_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert why_unavailable(WORKLOADS["two-hosts"]) == "the command `ip` of iproute2 is not installed"
    assert why_unavailable(WORKLOADS["round-trip"]) is None


def test_sizes_beyond_the_limit_of_a_contender_are_skipped() -> None:
    plan = plan_of([contender("small", largest=64 * KIB)])
    assert plan.chapters[0].entries[0].spec.sizes == (4 * KIB,)
    assert plan.skips == [Skip("small", "it carries no more than 64 KiB", "round-trip")]


def test_a_quick_run_has_fewer_rounds_contenders_and_workloads() -> None:
    them = [contender("ours"), contender("slow", in_quick=False)]
    options = Options(quick=True, sizes=SIZES, loops=("uvloop",))
    quick, slow = workload(in_quick=True), workload(name="slow")
    plan = plan_of(them, [quick, slow], options)
    assert [(chapter.workload.name, chapter.rounds) for chapter in plan.chapters] == [("round-trip", 2)]
    assert plan.skips == [Skip("slow", "a quick run leaves it out")]
    asked = plan_of(them, [quick, slow], options._replace(contenders=("slow",), workloads=("slow",)))
    assert [chapter.workload.name for chapter in asked.chapters] == ["slow"]
    assert [entry.contender.name for entry in asked.chapters[0].entries] == ["slow"]


def test_a_workload_may_have_sizes_of_its_own() -> None:
    plan = plan_of([contender("ours")], [workload(sizes=(7,), peers=(1, 4), depth=3)])
    (entry,) = plan.chapters[0].entries
    assert (entry.spec.batches, entry.spec.depth) == ([(7, 1), (7, 4)], 3)


def test_each_number_of_peers_may_have_processes_of_its_own() -> None:
    work = workload(sizes=(7,), peers=(1, 4), is_apart=True)
    (chapter,) = plan_of([contender("ours")], [work]).chapters
    assert [entry.spec.batches for entry in chapter.entries] == [[(7, 1)], [(7, 4)]]


def test_a_quick_run_may_have_fewer_sizes() -> None:
    work = workload(quick=Effort(sizes=(KIB,)), in_quick=True)
    for quick, sizes in ((True, (KIB,)), (False, SIZES)):
        options = Options(quick=quick, sizes=SIZES, loops=("uvloop",))
        (entry,) = plan_of([contender("ours")], [work], options).chapters[0].entries
        assert entry.spec.sizes == sizes


def test_the_command_line_overrules_rounds_and_deadlines() -> None:
    work = workload(deadline_s=10.0, full=Effort(rounds=3, seconds=2.0))
    (chapter,) = plan_of([contender("ours")], [work]).chapters
    assert (chapter.rounds, chapter.deadline_s) == (3, 12.0)
    options = Options(quick=False, sizes=SIZES, loops=("uvloop",), rounds=1, deadline_s=5.0)
    (chapter,) = plan_of([contender("ours")], [work], options).chapters
    assert (chapter.rounds, chapter.deadline_s) == (1, 5.0)


def test_the_batches_of_all_rounds_are_counted() -> None:
    plan = plan_of([contender("ours", uses_loop=True), contender("other")])
    assert plan.batches == 3 * 3 * len(SIZES)


def test_the_tables_of_contenders_and_workloads_are_consistent() -> None:
    assert BASELINE in CONTENDERS
    for one in CONTENDERS.values():
        assert one.lacks.keys() <= WORKLOADS.keys(), one.name
    ours = [name for name, one in CONTENDERS.items() if name.startswith("aiotensor") and not one.lacks]
    assert ours == [
        *("aiotensor-unix", "aiotensor-queue", "aiotensor-stock", "aiotensor-channel", "aiotensor-publisher"),
        "aiotensor-copying",
    ]
    for work in WORKLOADS.values():
        baseline = CONTENDERS[work.baseline or BASELINE]
        assert work.admits(baseline), work.name
        assert work.baseline is None or work.name not in baseline.lacks
