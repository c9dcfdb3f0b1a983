"""The rule that decides whether a quantity grows."""

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verification.soak.verdict import WARM_UP, grows, trend

ALLOWANCE = 10.0
seeds = st.integers(0, 2**32)
counts = st.integers(60, 600)


# The same examples each time: with a confidence of 99 %, some noise is taken for growth now and then.
same_each_time = settings(derandomize=True)


def times(count: int, seconds: float = 600.0) -> list[float]:
    return [seconds * (index + 1) / count for index in range(count)]


def judged(values: list[float], at: list[float] | None = None) -> bool:
    found = trend(at or times(len(values)), values)
    assert found is not None
    assert found.least <= found.growth <= found.most
    return grows(found, ALLOWANCE)


@same_each_time
@given(seeds, counts, st.floats(0, 8), st.floats(-1e6, 1e6))
def test_flat_noise_is_flat(seed: int, count: int, size: float, level: float) -> None:
    random = Random(seed)
    assert not judged([level + random.gauss(0, size) for _ in range(count)])


@same_each_time
@given(seeds, counts)
def test_noise_of_rare_large_outliers_is_flat(seed: int, count: int) -> None:
    random = Random(seed)
    assert not judged([1000.0 if random.random() < 0.05 else random.random() for _ in range(count)])


@same_each_time
@given(seeds, counts, st.floats(0, 8), st.floats(2, 100))
def test_a_slow_leak_is_found_under_noise(seed: int, count: int, size: float, times_allowed: float) -> None:
    random = Random(seed)
    leak = times_allowed * ALLOWANCE / (1 - WARM_UP)  # of the whole run
    steps = [leak * index / count for index in range(count)]
    assert judged([step + random.uniform(-size, size) for step in steps])


@same_each_time
@given(seeds, counts, st.integers(4, 40))
def test_a_leak_in_steps_is_found(seed: int, count: int, steps: int) -> None:
    random = Random(seed)
    height = 5 * ALLOWANCE
    assert judged([height * (index * steps // count) / steps + random.random() for index in range(count)])


@same_each_time
@given(counts, st.floats(4, 7), st.floats(0, 1), st.floats(0, 1e6), st.booleans())
def test_the_slow_sawtooth_of_a_pool_is_flat(
    count: int, teeth: float, phase: float, height: float, falls: bool
) -> None:
    # Four teeth after the warm-up at least, and not so many that their beat is that of the blocks of time.
    rate = teeth / (count * (1 - WARM_UP))
    values = [height * math.modf(index * rate + phase)[0] for index in range(count)]
    assert not judged([height - value for value in values] if falls else values)


@same_each_time
@given(seeds, counts, st.integers(4, 10), st.booleans())
def test_the_fast_sawtooth_of_a_pool_is_flat(seed: int, count: int, longest: int, falls: bool) -> None:
    random, values = Random(seed), list[float]()
    while len(values) < count:
        samples = random.randint(3, longest)
        values += [2 * ALLOWANCE * index / samples for index in range(samples)]
    assert not judged([-value for value in values[:count]] if falls else values[:count])


@same_each_time
@given(seeds, counts)
def test_a_quantity_that_grows_only_during_the_warm_up_is_flat(seed: int, count: int) -> None:
    random = Random(seed)
    filled = [min(index / count / WARM_UP, 1.0) for index in range(count)]
    assert not judged([1000 * share + random.random() for share in filled])


@same_each_time
@given(seeds, counts)
def test_a_decreasing_quantity_is_flat(seed: int, count: int) -> None:
    random = Random(seed)
    assert not judged([-100.0 * index / count + random.random() for index in range(count)])


@same_each_time
@given(seeds, st.integers(100, 600))
def test_uneven_sampling_does_not_affect_the_verdict(seed: int, count: int) -> None:
    random = Random(seed)
    at = sorted(random.uniform(0, 600) for _ in range(count))
    assert not judged([random.random() for _ in at], at)
    assert judged([4 * ALLOWANCE * time / 600 + random.random() for time in at], at)


@pytest.mark.parametrize("count", [0, 1, 2, 8])
def test_too_few_samples_are_not_judged(count: int) -> None:
    assert trend(times(count), [float(index) for index in range(count)]) is None


def test_growth_is_measured_after_the_warm_up() -> None:
    found = trend(times(400), [float(index) for index in range(400)])
    assert found is not None
    assert found.growth == pytest.approx(300, rel=0.01)
    assert [found.least, found.most] == pytest.approx([300, 300], rel=0.01)
