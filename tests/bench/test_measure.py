"""The units and the arithmetic of the benchmark."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.measure import (
    format_count,
    format_rate,
    format_seconds,
    format_size,
    parse_size,
    percentile,
    share,
    summarize,
)
from bench.records import Effort, Spec


@pytest.mark.parametrize(
    ("text", "size"),
    [("4KiB", 4096), ("1 MiB", 1 << 20), ("1.5kib", 1536), ("150MiB", 150 << 20), ("7", 7), ("12 B", 12)],
)
def test_a_size_is_read_with_and_without_a_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-4KiB", "4KB", "four", "0.3 B", "4 KiB 2", "1e3"])
def test_parsing_an_invalid_size_raises_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(1, "1 B"), (1023, "1023 B"), (4096, "4 KiB"), (1536, "1.5 KiB"), (150 << 20, "150 MiB")],
)
def test_a_size_is_written_in_its_largest_unit(size: int, text: str) -> None:
    assert format_size(size) == text
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.234e-6, "1.23 us"),
        (999.4e-6, "999 us"),
        (999.6e-6, "1.00 ms"),
        (9.996e-3, "10.0 ms"),
        (0.1234, "123 ms"),
        (2.5, "2.50 s"),
    ],
)
def test_a_duration_is_written_with_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"), [(0.5, "0.50"), (12.345, "12.3"), (999.4, "999"), (1234, "1,230"), (219_871, "220,000")]
)
def test_a_rate_is_written_with_three_digits_and_thousands_apart(rate: float, text: str) -> None:
    assert format_rate(rate) == text


def test_a_number_without_a_unit_has_three_digits() -> None:
    assert [format_count(value) for value in (0.123, 1.5, 25.0, 250.0)] == ["0.12", "1.50", "25.0", "250"]


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, 99) == 99
    assert percentile(values, 50) == 50
    assert percentile(values, 0) == 1
    assert percentile(values, 100) == 100
    assert percentile([3.0, 1.0, 2.0], 99) == 3


@given(st.lists(st.integers(0, 1000), min_size=1), st.floats(0, 100))
def test_a_percentile_is_the_smallest_value_that_enough_values_do_not_exceed(
    values: list[int], percent: float
) -> None:
    found = percentile(values, percent)
    needed = percent * len(values) / 100
    assert sum(value <= found for value in values) >= needed
    below = [value for value in values if value < found]
    assert not below or len(below) < needed


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_an_invalid_percentile_is_rejected(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, percent)


def test_a_summary_is_in_seconds_and_its_rate_is_that_of_the_median() -> None:
    summary = summarize([2_000_000, 1_000_000, 9_000_000], bytes_per_trip=4_000_000)
    assert summary == {
        "median_s": 0.002,
        "p99_s": 0.009,
        "min_s": 0.001,
        "gigabytes_per_s": pytest.approx(2.0),
    }


def test_large_tensors_make_fewer_trips() -> None:
    effort = Effort(bytes=1 << 20, most=100, fewest=3)
    assert [effort.trips(size) for size in (1, 1 << 16, 1 << 20)] == [100, 16, 3]


def test_shares_are_even_and_add_up() -> None:
    assert [share(140, 3, number) for number in range(3)] == [47, 47, 46]
    assert [share(2, 3, number) for number in range(3)] == [1, 1, 0]


def test_batches_combine_each_size_with_each_number_of_peers() -> None:
    spec = Spec("fan-in", (4, 8), Effort(), peers=(1, 16))
    assert spec.batches == [(4, 1), (4, 16), (8, 1), (8, 16)]
