"""Fixtures for the tests of cancellation."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread_of_torch() -> Iterator[None]:
    """Make small tensors on this thread: for thousands of them, waking torch's team takes longer than all."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
