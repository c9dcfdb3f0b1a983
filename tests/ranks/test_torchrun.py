"""Pipes in gloo groups that torchrun starts, on one host and on two."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from tests.ranks.program import TIMEOUT_S, Findings
from verification.networks import Host, Hosts
from verification.places import free_port

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 100.0
_MESSAGES = 6  # of each exchange, in each direction


def _start(
    scenarios: Sequence[str], folder: Path, *arguments: str, host: Host | None = None
) -> subprocess.Popen[str]:
    inside = [] if host is None else ["ip", "netns", "exec", host.namespace]
    command = [*inside, sys.executable, "-m", "torch.distributed.run", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    if host is not None:
        environment["GLOO_SOCKET_IFNAME"] = "veth0"
    return subprocess.Popen(
        [*command, "-m", "tests.ranks.program", str(folder), *scenarios],
        cwd=_ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


class _Group(NamedTuple):
    """A group that has ended."""

    folder: Path
    output: str

    def found(self, scenario: str) -> list[Findings]:
        """Return the findings of the ranks in a scenario."""
        return [
            msgspec.json.decode(path.read_bytes(), type=Findings)
            for path in sorted(self.folder.glob(f"{scenario}-*.json"))
        ]


def _finish(processes: Sequence["subprocess.Popen[str]"], folder: Path) -> _Group:
    """Wait for the end of the ranks."""
    try:
        output = "".join(process.communicate(timeout=_LIMIT_S)[0] for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return _Group(folder, output)


def _run(size: int, folder: Path, *scenarios: str) -> _Group:
    arguments = (
        "--nproc-per-node",
        str(size),
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
    )
    return _finish([_start(scenarios, folder, *arguments)], folder)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> _Group:
    """A group of two ranks that has been through several scenarios; the last one destroys the group."""
    return _run(2, tmp_path_factory.mktemp("ranks"), "missing", "stopped", "failing", "destroyed")


def _check_everything(group: _Group, size: int) -> None:
    found = group.found("everything")
    assert [one.rank for one in found] == list(range(size)), group.output
    # Two pipes to each other rank, one to each other rank of both dimensions of the mesh; before and after.
    pipes = 2 * (size - 1) + 1 + (size // 2 - 1)
    assert all(one.pipes == pipes for one in found), found
    assert all(one.messages == 2 * pipes * _MESSAGES for one in found), found


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_rank_exchanges_messages_with_every_other(size: int, folder: Path) -> None:
    _check_everything(_run(size, folder, "everything"), size)


def test_a_killed_rank_is_lost_to_all_others_within_a_second(folder: Path) -> None:
    group = _run(4, folder, "killed")
    found = group.found("killed")
    assert [one.rank for one in found] == [0, 1, 2], group.output
    assert all(one.messages == _MESSAGES for one in found)
    assert all(one.lost_after_s is not None and one.lost_after_s < 1 for one in found), found


def test_a_rank_that_never_opens_its_end_hangs_no_other(two_ranks: _Group) -> None:
    found = two_ranks.found("missing")
    assert [one.not_opened for one in found] == [[1], []], two_ranks.output


def test_a_stopped_rank_on_this_host_delays_messages_and_loses_none(two_ranks: _Group) -> None:
    found = two_ranks.found("stopped")
    assert [one.messages for one in found] == [_MESSAGES, _MESSAGES], two_ranks.output
    assert found[0].notes == ["waits"]


def test_a_pipe_works_after_a_thousand_sends_that_failed(two_ranks: _Group) -> None:
    found = two_ranks.found("failing")
    assert [one.messages for one in found] == [_MESSAGES, _MESSAGES], two_ranks.output
    assert found[0].failed == {
        "UnsupportedTensorError": 250,
        "WouldBlockError": 500,
    }  # and 250 were cancelled
    assert found[0].notes == ["only the first message counts", "all bytes were returned"]
    assert found[1].notes == ["all bytes were returned"]


def test_pipes_work_after_the_group_was_destroyed_while_messages_travelled(two_ranks: _Group) -> None:
    found = two_ranks.found("destroyed")
    assert [one.messages for one in found] == [1 + 2 * _MESSAGES] * 2, two_ranks.output
    for one in found:
        [note] = one.notes
        assert note.startswith("group must be a torch.distributed.ProcessGroup"), note


def _run_on_two_hosts(scenario: str, size: int, hosts: Hosts, folder: Path) -> _Group:
    address = ("--master-addr", hosts.a.address, "--master-port", str(free_port()))
    nodes = [
        _start(
            [scenario],
            folder,
            *("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", str(size // 2)),
            *address,
            host=host,
        )
        for number, host in enumerate((hosts.a, hosts.b))
    ]
    return _finish(nodes, folder)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_rank_exchanges_messages_with_every_other_on_two_hosts(
    size: int, hosts: Hosts, folder: Path
) -> None:
    _check_everything(_run_on_two_hosts("everything", size, hosts, folder), size)


def test_a_stopped_rank_on_another_host_is_lost_after_the_timeout(hosts: Hosts, folder: Path) -> None:
    group = _run_on_two_hosts("silent", 2, hosts, folder)
    found = group.found("silent")
    assert [one.messages for one in found] == [_MESSAGES, _MESSAGES], group.output
    assert found[0].lost_after_s is not None
    assert found[0].lost_after_s < TIMEOUT_S + 1
    assert found[0].notes == ["lost"] * 3
    assert found[1].notes == ["lost"]
