"""Sequences of operations of users, peers and the kernel in any order, over all links, on both loops.

The suite runs the same sequences each time, and few of them; `make model` runs others for a given time.
"""

import threading
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import settings
from hypothesis.stateful import rule, run_state_machine_as_test

from aiotensor.runtime.worker import Worker
from verification.model.__main__ import main
from verification.model.broadcast_records import Limits
from verification.model.machines import BROADCASTS, MACHINES, PAIRS, SETTINGS, WholeProtocol
from verification.model.stepping import Steps

pytestmark = pytest.mark.timeout(900)  # hypothesis takes minutes to shrink a failure

_QUEUE = "queue, asyncio"  # the machine of round 0


@pytest.mark.parametrize("name", PAIRS)
def test_no_sequence_of_operations_breaks_the_protocol(name: str) -> None:
    some = settings(SETTINGS, max_examples=40, derandomize=True)
    run_state_machine_as_test(PAIRS[name], settings=some)


@pytest.mark.parametrize("name", BROADCASTS)
def test_no_sequence_of_operations_breaks_broadcast(name: str) -> None:
    some = settings(SETTINGS, max_examples=15, derandomize=True)
    run_state_machine_as_test(BROADCASTS[name], settings=some)


class _Choices:
    """Stands for the choices of hypothesis in a rule."""

    def __init__(self, choice: object) -> None:
        self._choice = choice

    def draw(self, strategy: object) -> Any:
        return self._choice


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_an_allocation_may_get_memory_that_a_closing_receiver_releases(name: str, is_killed: bool) -> None:
    machine = PAIRS[name]()
    try:
        machine.begin(has_receiver=True)
        machine.open_sender(limit=1, arena_bytes=64 << 10)
        sender: Any = _Choices(machine.senders[1])
        machine.allocate(data=sender, count=3000)
        machine.send_a_message(data=sender, several=[3, 3000])
        machine.allocate(data=sender, count=3000)  # waits for the memory of the message
        machine.end_the_receiver(is_killed=is_killed, is_quiet=True)
        assert not machine.of(machine.senders[1])
    finally:
        machine.teardown()


def test_a_subscriber_is_admitted_after_records_for_a_closed_publisher() -> None:
    machine = BROADCASTS["8 subscribers, queue, asyncio"]()
    limits: Any = _Choices(Limits("drop", 2, 0, None, None, None, 256 << 10))
    try:
        machine.begin(data=limits, subscribers=7)
        machine.settle_and_compare()
        machine.publish_a_burst(bursts=[[3], [3], [3], [3]], times=0)
        machine.close_publisher()
        machine.settle_and_compare()
        machine.open_subscriber()
        machine.open_publisher(data=limits)
        machine.settle_and_compare()
    finally:
        machine.teardown()


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_no_job_runs_during_an_iteration_of_the_loop(kind: str) -> None:
    ran = threading.Event()

    async def submit(worker: Worker) -> bool:
        worker.begin("work", ran.set)
        return ran.wait(0.2)

    async def make() -> Worker:
        return Worker("aiotensor-test")

    steps = Steps(kind)
    making = steps.start(make())
    steps.turn()
    worker = making.result()
    steps.watch(worker)
    submitting = steps.start(submit(worker))
    steps.turn()
    assert not submitting.result()
    steps.turn()
    assert ran.is_set()
    worker.close()
    steps.close()


class _WrongModel(WholeProtocol):
    """A model that denies the limit of the first sender."""

    @rule()
    def deny_a_limit(self) -> None:
        assert all(sender.limit != 2 for sender in self.senders), "a limit of 2"


class _Forgetful(WholeProtocol):
    """A machine that never awaits a coroutine, which no rule can notice."""

    @rule()
    def forget_to_await(self) -> None:
        draining = self.senders[0].sender.drain()
        del draining


def _run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    return done.exit_code, done.stdout


def test_a_round_without_a_difference_ends_with_status_0() -> None:
    status, text = _run("--seed", "7", "--round", "1")
    assert status == 0
    assert text.startswith("seed 7\nrounds of up to 20 sequences: 1, in ")


def test_a_difference_is_printed_with_its_sequence_and_a_command_to_repeat_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MACHINES, _QUEUE, _WrongModel)
    status, text = _run("--seed", "7")
    assert status == 1
    sequence = text[text.index("\nstate = ") :]
    assert sequence.splitlines()[-4:] == [
        "state.deny_a_limit()",
        "state.teardown()",
        "",
        "to repeat it: python -m verification.model --seed 7 --round 0",
    ]
    again = _run("--seed", "7", "--round", "0")[1]
    assert again[again.index("\nstate = ") :] == sequence


def test_a_run_over_one_link_is_repeated_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(_WrongModel):
        link = "tcp"

    monkeypatch.setitem(MACHINES, "tcp, asyncio", Wrong)
    status, text = _run("--seed", "7", "--link", "tcp")
    assert status == 1
    assert "Wrong()" in text
    assert text.endswith("--seed 7 --link tcp --round 0\n")


def test_a_warning_about_an_unawaited_coroutine_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MACHINES, _QUEUE, _Forgetful)
    status, text = _run("--seed", "7", "--round", "0")
    assert status == 1
    assert "RuntimeWarning: coroutine 'TensorSender.drain' was never awaited" in text
