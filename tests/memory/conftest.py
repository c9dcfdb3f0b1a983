"""Check that no test of a placement leaves a descriptor open."""

import gc
from collections.abc import Iterator

import pytest

from tests.memory.segments import open_files


@pytest.fixture(autouse=True)
def no_descriptor_is_left_open() -> Iterator[None]:
    before = open_files()
    yield
    if open_files() != before:
        gc.collect()  # slow, and seldom needed
    # The garbage collector may have closed descriptors of earlier tests.
    assert not open_files() - before
