"""A short run of chaos; `make chaos` makes long ones."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from verification.chaos.plan import (
    ELDERS,
    ENGINES,
    FAMILIES,
    MAX_SUBSCRIBERS,
    PEER_TIMEOUT_S,
    SLOTS,
    FaultKind,
)
from verification.chaos.planning import plan_round

ROOT = Path(__file__).parent.parent.parent
_SECONDS = 20  # of rounds; with the beginning and the end of the processes it takes a few more
_SECONDS_OF_ENGINES = 8
_SECONDS_OF_A_FAMILY = 5

BROADCASTS = [name for name, kind in FAMILIES.items() if kind.work == "broadcast"]
OVER_TCP = [name for name, kind in FAMILIES.items() if kind.lands]
REMOTE = [name for name, kind in FAMILIES.items() if kind.has_timeout]
ONLY_OF_NETWORKS = (FaultKind.ATTACK, FaultKind.PARTITION)
GROWING = (FaultKind.NO_SPACE, FaultKind.FILE_SIZE)  # faults of memory that a process makes


@pytest.mark.timeout(300)
def test_no_tensor_is_lost_or_duplicated_and_no_call_hangs_when_processes_fail() -> None:
    _run(_SECONDS)


@pytest.mark.timeout(300)
def test_no_request_reaches_two_engines_when_processes_and_the_network_fail() -> None:
    _run(_SECONDS_OF_ENGINES, "--family", "engines")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", BROADCASTS)
def test_subscribers_detect_every_missed_publication_when_processes_fail(family: str) -> None:
    _run(_SECONDS_OF_A_FAMILY, "--family", family)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", [name for name in OVER_TCP if name not in BROADCASTS])
def test_no_tensor_is_lost_without_an_error_over_tcp_when_processes_and_the_network_fail(family: str) -> None:
    _run(_SECONDS_OF_A_FAMILY, "--family", family)


def _run(seconds: int, *words: str) -> None:
    seed = int(os.environ.get("AIOTENSOR_SEED", "0")) or random.SystemRandom().getrandbits(32)
    print(f"AIOTENSOR_SEED={seed}")  # noqa: T201 - pytest shows it with a failure
    program = ["-m", "verification.chaos", "--seed", str(seed), *words]
    command = [sys.executable, *program, "--seconds", str(seconds)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    again = f"AIOTENSOR_SEED={seed} or: python {' '.join(program)}"
    assert run.returncode == 0, f"{again}\n{run.stdout}\n{run.stderr}"
    assert run.stderr == "", again


def test_a_round_is_planned_from_its_seed_and_number_alone() -> None:
    assert [plan_round(5, number) for number in range(50)] == [plan_round(5, number) for number in range(50)]
    assert plan_round(5, 7) != plan_round(6, 7) != plan_round(6, 8)


def test_every_fault_is_planned_for_senders_and_for_the_receiver() -> None:
    rounds = [plan for n in range(2000) if (plan := plan_round(1, n)).kind.work in ("tensors", "questions")]
    rounds = [plan for plan in rounds if not plan.kind.lands]
    planned = {(fault.kind, fault.target is None) for plan in rounds for fault in plan.faults}
    only_senders_grow_arenas = {(kind, True) for kind in GROWING}
    kinds = [kind for kind in FaultKind if kind not in ONLY_OF_NETWORKS]
    assert planned | only_senders_grow_arenas == {(kind, who) for kind in kinds for who in (True, False)}


def test_every_client_and_engine_is_killed_stopped_and_closed_and_every_engine_attacked() -> None:
    planned = {
        (fault.kind, fault.target) for n in range(1000) for fault in plan_round(1, n, "engines").faults
    }
    ends = (FaultKind.KILL, FaultKind.STOP, FaultKind.CLOSE)
    assert planned >= {(kind, target) for kind in ends for target in range(SLOTS + ENGINES)}
    assert planned >= {(FaultKind.ATTACK, SLOTS + number) for number in range(ENGINES)}
    assert (FaultKind.PARTITION, None) in planned


def test_every_option_and_fault_of_a_broadcast_is_planned() -> None:
    rounds = [plan_round(1, n, "subscriber") for n in range(1000)]
    planned = {(fault.kind, fault.target == 0) for plan in rounds for fault in plan.faults}
    kinds = [kind for kind in FaultKind if kind not in ONLY_OF_NETWORKS]
    only_publishers_grow_arenas = {(kind, False) for kind in GROWING}
    assert planned | only_publishers_grow_arenas == {(kind, who) for kind in kinds for who in (True, False)}
    options = [plan.publisher for plan in rounds if plan.publisher is not None]
    assert {one.slow for one in options} == {"wait", "drop", "disconnect"}
    assert {one.history > 0 for one in options} == {True, False}
    assert {one.max_held_bytes is None for one in options} == {True, False}
    assert {len(plan.takers) for plan in rounds} == {1, 2, 4, MAX_SUBSCRIBERS}


@pytest.mark.parametrize("family", OVER_TCP)
def test_receivers_and_subscribers_over_tcp_run_out_of_memory_and_files_too(family: str) -> None:
    faults = [fault for n in range(1000) for fault in plan_round(1, n, family).faults]
    receivers = {fault.kind for fault in faults if fault.target is None or fault.target >= SLOTS}
    assert receivers >= {*GROWING, FaultKind.NO_ADDRESSES, FaultKind.NO_DESCRIPTORS}


@pytest.mark.parametrize("family", FAMILIES)
def test_only_families_with_a_timeout_have_silences_on_both_sides_of_it(family: str) -> None:
    faults = [fault for n in range(1000) for fault in plan_round(1, n, family).faults]
    stops = [fault.for_ms / 1000 for fault in faults if fault.kind is FaultKind.STOP]
    cuts = [fault.for_ms / 1000 for fault in faults if fault.kind is FaultKind.PARTITION]
    if family in REMOTE:
        for silences in (stops, cuts):
            assert any(0.1 < one < PEER_TIMEOUT_S for one in silences)
            assert any(one > PEER_TIMEOUT_S + 0.5 for one in silences)
    elif family != "engines":
        assert max(stops) < 0.1
        assert not cuts


@pytest.mark.parametrize("family", ELDERS)
def test_the_process_whose_memory_is_measured_is_never_killed(family: str) -> None:
    kills = (FaultKind.KILL, FaultKind.KILL_WITH_FORK)
    assert not any(plan_round(1, n, family).has(ELDERS[family], kills) for n in range(500))


def test_a_round_of_one_family_is_the_same_when_only_that_family_is_played() -> None:
    for number in range(50):
        plan = plan_round(5, number)
        assert plan_round(5, number, plan.family) == plan


def test_no_message_of_any_round_has_the_pattern_of_another() -> None:
    orders = [
        order
        for number in range(200)
        for sender in plan_round(3, number).senders
        for part in sender.parts
        for order in part
    ]
    tokens = [order.key + index for order in orders for index in range(len(order.counts))]
    assert len(set(tokens)) == len(tokens)
