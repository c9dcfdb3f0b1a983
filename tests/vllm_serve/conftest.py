"""Run the tests of this folder where a vLLM that serves is installed: `make test-vllm-serve`."""

import os

import pytest


def pytest_ignore_collect() -> bool | None:
    """Skip the folder if vLLM is not installed."""
    return None if "VLLM_SERVE_FOLDER" in os.environ else True


def pytest_itemcollected(item: pytest.Item) -> None:
    """Allow for the time of starting servers."""
    item.add_marker(pytest.mark.timeout(600))
