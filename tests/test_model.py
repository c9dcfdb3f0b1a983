"""Operations of users, peers and the kernel in any order have the results that a model predicts.

The suite runs few sequences; `make model` runs others for a given time.
"""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.selection import COMPLETE
from verification.model.machines import MACHINES, SETTINGS

_QUICK = ["unix, asyncio", "unix, uvloop", "4 subscribers, unix, asyncio", "2 subscribers, queue, uvloop"]


@pytest.mark.timeout(900)  # hypothesis takes minutes to shrink a failure
@pytest.mark.parametrize("name", MACHINES if COMPLETE else _QUICK)
def test_no_sequence_of_operations_differs_from_the_model(name: str) -> None:
    some = settings(SETTINGS, max_examples=30 if COMPLETE else 8, derandomize=not COMPLETE)
    run_state_machine_as_test(MACHINES[name], settings=some)
