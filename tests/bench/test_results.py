"""From the batches of all rounds to results."""

import pytest

from bench.plan import Chapter, Entry, Plan
from bench.records import Batch, Effort, Loop, Result, Spec
from bench.results import Samples, gather, key_of
from tests.bench.reports import contender, workload


def gathered(
    samples: dict[str, list[Batch]], *, more_is_better: bool = False, baseline: str | None = None
) -> dict[str, Result]:
    score = "tensors_per_s" if more_is_better else "median_s"
    work = workload(score=score, more_is_better=more_is_better, baseline=baseline)
    entries = [Entry(contender(name), None, Spec("round-trip", (1000,), Effort())) for name in samples]
    plan = Plan([], [Chapter(work, 3, 60.0, entries)], [])
    keyed: Samples = {}
    for entry in entries:
        for batch in samples[entry.contender.name]:
            keyed.setdefault(key_of(entry, batch), []).append(batch)
    return {result.contender: result for result in gather(plan, keyed, "base")}


def trip(*microseconds: int) -> Batch:
    return Batch(1000, latencies_ns=[1000 * each for each in microseconds])


def test_each_round_is_compared_with_the_same_round_of_the_baseline() -> None:
    found = gathered({"base": [trip(100), trip(200), trip(300)], "ours": [trip(50), trip(50), trip(50)]})
    assert found["ours"].round_ratios == pytest.approx([2.0, 4.0, 6.0])
    assert found["ours"].ratio == pytest.approx(4.0)
    assert found["base"].ratio == 1.0


def test_a_workload_may_be_compared_with_another_baseline_than_the_run() -> None:
    found = gathered({"other": [trip(100)], "ours": [trip(50)]}, baseline="other")
    assert (found["ours"].ratio, found["other"].ratio) == pytest.approx((2.0, 1.0))


def test_a_baseline_with_an_event_loop_is_compared_on_the_same_loop() -> None:
    loops: tuple[Loop, ...] = ("asyncio", "uvloop")
    entries = [
        Entry(contender(name), loop, Spec("round-trip", (1000,), Effort()))
        for name in ("base", "ours")
        for loop in loops
    ]
    samples: Samples = {
        key_of(entry, trip(0)): [trip(microseconds)]
        for entry, microseconds in zip(entries, (100, 300, 50, 100), strict=True)
    }
    found = gather(Plan([], [Chapter(workload(), 1, 60.0, entries)], []), samples, "base")
    assert {(one.contender, one.loop): one.ratio for one in found} == {
        ("base", "asyncio"): 1.0,
        ("base", "uvloop"): 1.0,
        ("ours", "asyncio"): pytest.approx(2.0),
        ("ours", "uvloop"): pytest.approx(3.0),
    }


@pytest.mark.parametrize(("given", "both_ways"), [(None, 2000), (1004, 1004)])
def test_a_rate_counts_the_bytes_that_went_both_ways(given: int | None, both_ways: int) -> None:
    batch = Batch(1000, latencies_ns=[1000], bytes_per_trip=given)
    (ours,) = gathered({"ours": [batch]}).values()
    for numbers in (ours.numbers, *ours.rounds):
        assert numbers["gigabytes_per_s"] == pytest.approx(both_ways / 1000)


def test_the_trips_of_all_rounds_make_one_summary() -> None:
    (ours,) = gathered({"ours": [trip(1, 2), trip(3, 4), trip(100)]}).values()
    assert ours.trips == 5
    assert ours.numbers["median_s"] == pytest.approx(3e-6)
    assert ours.numbers["p99_s"] == pytest.approx(100e-6)
    assert [numbers["median_s"] for numbers in ours.rounds] == pytest.approx([1.5e-6, 3.5e-6, 100e-6])
    assert ours.ratio is None  # there is no baseline


def test_a_rate_is_summarized_by_its_median_and_higher_is_better() -> None:
    found = gathered(
        {
            "base": [Batch(1000, numbers={"tensors_per_s": 10.0})] * 3,
            "ours": [Batch(1000, numbers={"tensors_per_s": rate}) for rate in (20.0, 50.0, 30.0)],
        },
        more_is_better=True,
    )
    assert found["ours"].round_ratios == [2.0, 5.0, 3.0]
    assert found["ours"].numbers == {"tensors_per_s": 30.0}
    assert found["ours"].trips == 0


def test_a_failed_contender_keeps_the_results_of_earlier_rounds() -> None:
    found = gathered({"base": [trip(100), trip(100)], "ours": [trip(50)], "broken": []})
    assert found["ours"].round_ratios == [2.0]
    assert "broken" not in found


def test_a_measurement_of_zero_has_no_ratio() -> None:
    found = gathered({"base": [trip(100)], "ours": [Batch(1000, numbers={"median_s": 0.0})]})
    assert found["ours"].ratio is None
