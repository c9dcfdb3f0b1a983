"""Whether the goals of the design were reached."""

import pytest

from bench.contenders import CONTENDERS
from bench.goals import GOALS, Goal, Reading, judge
from bench.records import Result, Verdict
from bench.workloads import WORKLOADS
from tests.bench.reports import CHANNEL, KIB, OURS, PUBLISHER, RANKS, result, trips
from tests.sending.test_memory import MIB


def verdict_of(results: list[Result], place: int = 0) -> Verdict:
    return judge(results)[place]


def verdicts_on(work: str, results: list[Result]) -> list[Verdict]:
    return [verdict for verdict in judge(results) if verdict.work == work]


def test_a_goal_is_judged_by_the_median_ratio_of_all_rounds() -> None:
    ours = trips(OURS, 4 * KIB, 0.001, 0.002, 0.001, loop="uvloop")
    theirs = trips("torch-queue", 4 * KIB, 0.007, 0.006, 0.1)
    verdict = verdict_of([ours, theirs])
    assert (verdict.work, verdict.against) == ("4 KiB round trip, `unix://`", "torch.multiprocessing.Queue")
    assert (verdict.measured, verdict.lowest, verdict.highest) == pytest.approx((7.0, 3.0, 100.0))
    assert verdict.met is True


@pytest.mark.parametrize(("median", "met"), [(0.0016, True), (0.0018, False)])
def test_a_goal_may_limit_the_ratio_to_the_time_of_another_contender(median: float, met: bool) -> None:
    ours, raw = trips(OURS, 4 * KIB, median, loop="uvloop"), trips("raw-socket", 4 * KIB, 0.001)
    verdict = verdict_of([ours, raw], 1)
    assert verdict.measured == pytest.approx(median / 0.001)
    assert verdict.met is met


def test_results_of_another_event_loop_do_not_count_for_a_goal() -> None:
    other_loop = trips(OURS, 4 * KIB, 0.001, loop="asyncio")
    theirs = trips("torch-queue", 4 * KIB, 0.1)
    assert verdict_of([other_loop, theirs]).met is None


def test_a_goal_that_was_not_measured_is_neither_met_nor_missed() -> None:
    verdicts = judge([])
    assert len(verdicts) == len(GOALS)
    assert {verdict.met for verdict in verdicts} == {None}
    assert {verdict.measured for verdict in verdicts} == {None}


@pytest.mark.parametrize(("percent", "met"), [(0.0, True), (0.049, True), (0.06, False)])
def test_a_goal_may_limit_an_absolute_number(percent: float, met: bool) -> None:
    idle = result("idle", OURS, 4 * KIB, [{"cpu_percent": percent}], loop="uvloop")
    (verdict,) = verdicts_on("idle pair", [idle])
    assert (verdict.measured, verdict.met) == (percent, met)


def test_small_requests_are_compared_with_each_zmq_echo_contender() -> None:
    ours = trips(CHANNEL, 4 * KIB, 0.0016, workload="request-echo", loop="uvloop")
    blocking = trips("zmq-echo", 4 * KIB, 0.001, workload="request-echo")
    on_the_loop = trips("zmq-echo-loop", 4 * KIB, 0.002, workload="request-echo", loop="uvloop")
    awaited = trips("zmq-echo-asyncio", 4 * KIB, 0.0032, workload="request-echo", loop="uvloop")
    verdicts = verdicts_on("4 KiB request and reply, `ipc://`", [ours, blocking, on_the_loop, awaited])
    assert [verdict.measured for verdict in verdicts] == pytest.approx([1.6, 0.8, 0.5])
    assert [verdict.met for verdict in verdicts] == [False, True, True]


@pytest.mark.parametrize(
    ("workload", "answer"), [("request-echo", "echo"), ("request-answer", "small answer")]
)
def test_large_requests_are_compared_with_both_pyzmq_contenders(workload: str, answer: str) -> None:
    ours = trips(CHANNEL, 150 * MIB, 0.01, workload=workload, loop="uvloop")
    plain = trips("zmq-request", 150 * MIB, 0.06, workload=workload)
    pickled = trips("zmq-pickle", 150 * MIB, 0.04, workload=workload)
    verdicts = verdicts_on(f"150 MiB request and reply, {answer}", [ours, plain, pickled])
    assert [verdict.measured for verdict in verdicts] == pytest.approx([6.0, 4.0])
    assert [verdict.met for verdict in verdicts] == [True, False]


def test_ranks_are_compared_on_one_host_and_between_two() -> None:
    results = [
        *(
            trips(RANKS, 4 * KIB, 2.0, workload=workload, loop="uvloop")
            for workload in ("round-trip", "two-hosts")
        ),
        trips("gloo", 4 * KIB, 3.0),
        trips("gloo", 4 * KIB, 1.0, workload="two-hosts"),
    ]
    for hosts, measured, met in (("one host", 1.5, True), ("two hosts", 0.5, False)):
        (verdict,) = verdicts_on(f"4 KiB round trip between ranks, {hosts}", results)
        assert (verdict.measured, verdict.met) == (measured, met)


@pytest.mark.parametrize(("median", "met"), [(1.05, True), (1.06, False)])
def test_large_tensors_between_hosts_may_be_a_little_slower_than_those_of_gloo(
    median: float, met: bool
) -> None:
    ours = trips(RANKS, 150 * MIB, median, workload="two-hosts", loop="uvloop")
    gloo = trips("gloo", 150 * MIB, 1.0, workload="two-hosts")
    (verdict,) = verdicts_on("150 MiB round trip between ranks, two hosts", [ours, gloo])
    assert verdict.met is met


def test_broadcast_goals_compare_contenders_and_numbers_of_readers() -> None:
    readings = [
        trips(PUBLISHER, 150 * MIB, median, workload="broadcast", loop="uvloop", peers=readers)
        for readers, median in ((1, 0.010), (4, 0.012), (8, 0.016))
    ]
    one_to_one = trips("aiotensor-senders", 150 * MIB, 0.008, workload="broadcast", loop="uvloop")
    others = [
        trips("zmq-xpub", 150 * MIB, median, workload="broadcast", peers=readers)
        for readers, median in ((1, 1.0), (4, 0.3))
    ]
    results = [*readings, one_to_one, *others]
    four, against_one = verdicts_on("150 MiB to 4 readers", results)
    assert [four.measured, against_one.measured] == pytest.approx([25.0, 1.5])
    assert [four.met, against_one.met] == [True, False]
    (eight,) = verdicts_on("150 MiB to 8 readers", results)
    assert eight.measured == pytest.approx(1.6)
    assert eight.met is False


def test_a_number_without_a_goal_is_shown_and_not_judged() -> None:
    ours = trips(OURS, 150 * MIB, 0.002, loop="uvloop")
    (verdict,) = [one for one in judge([ours, trips("memcpy-1", 150 * MIB, 0.001)]) if one.measured]
    assert verdict.measured == pytest.approx(2.0)
    assert (verdict.goal, verdict.met) == ("", None)


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: f"{goal.work}, {goal.against}")
def test_every_goal_refers_to_measurements_of_a_run(goal: Goal) -> None:
    readings: list[Reading] = [goal.ours, *([goal.theirs] if goal.theirs else [])]
    for reading in readings:
        workload, contender = WORKLOADS[reading.workload], CONTENDERS[reading.contender]
        assert workload.admits(contender)
        assert reading.workload not in contender.lacks
        assert workload.sizes is None or reading.size_bytes in workload.sizes
        assert workload.quick.sizes is None or reading.size_bytes in workload.quick.sizes
        assert reading.peers in workload.peers
        assert contender.largest is None or reading.size_bytes <= contender.largest
