from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from aiotensor.protocol.numbers import NumberSet

SMALL = st.integers(0, 40)  # few enough that ranges meet


def filled(numbers: list[int]) -> NumberSet:
    number_set = NumberSet()
    for number in numbers:
        number_set.add(number)
    return number_set


@given(numbers=st.lists(SMALL, max_size=60))
def test_a_number_set_contains_exactly_the_added_numbers(numbers: list[int]) -> None:
    number_set = filled(numbers)

    assert [number for number in range(-2, 43) if number in number_set] == sorted(set(numbers))


@given(numbers=st.lists(SMALL, max_size=60))
def test_ranges_are_sorted_and_neither_overlap_nor_touch(numbers: list[int]) -> None:
    ranges = filled(numbers).ranges()

    assert all(first < stop for first, stop in ranges)
    assert all(stop < first for (_, stop), (first, _) in pairwise(ranges))
    assert {number for first, stop in ranges for number in range(first, stop)} == set(numbers)


@given(order=st.permutations(range(12)))
def test_the_order_of_adding_does_not_affect_the_ranges(order: list[int]) -> None:
    assert filled(order).ranges() == [(0, 12)]


def test_a_million_consecutive_numbers_are_one_range() -> None:
    number_set = filled([])
    for number in range(1_000_000):
        number_set.add(number)

    assert number_set.ranges() == [(0, 1_000_000)]


def test_an_empty_set_holds_nothing() -> None:
    number_set = NumberSet()

    assert number_set.ranges() == []
    assert 0 not in number_set


def test_the_largest_number_of_the_protocol_fits() -> None:
    number_set = filled([2**63 - 1, 0])

    assert number_set.ranges() == [(0, 1), (2**63 - 1, 2**63)]
    assert 2**63 - 1 in number_set
    assert 2**63 - 2 not in number_set


def test_the_last_ranges_are_kept_and_the_others_forgotten() -> None:
    number_set = filled([0, 2, 4, 5, 9])

    number_set.keep_last(3)
    assert number_set.ranges() == [(2, 3), (4, 6), (9, 10)]
    number_set.keep_last(3)
    assert number_set.ranges() == [(2, 3), (4, 6), (9, 10)]
    number_set.add(3)
    assert number_set.ranges() == [(2, 6), (9, 10)]
    number_set.keep_last(0)
    assert number_set.ranges() == []


def test_the_first_ranges_are_kept_and_the_others_forgotten() -> None:
    number_set = filled([0, 2, 4, 5, 9])

    number_set.keep_first(4)
    assert number_set.ranges() == [(0, 1), (2, 3), (4, 6), (9, 10)]
    number_set.keep_first(2)
    assert number_set.ranges() == [(0, 1), (2, 3)]
    number_set.add(3)
    assert number_set.ranges() == [(0, 1), (2, 4)]
