"""Pipes in gloo groups that torchrun starts, on one host and on two."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from tests.ranks.program import Findings
from verification.networks import Host, Hosts
from verification.places import free_port

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 100.0
_MESSAGES = 6  # of each exchange, in each direction


def _start(folder: Path, *arguments: str, host: Host | None = None) -> "subprocess.Popen[str]":
    inside = [] if host is None else ["ip", "netns", "exec", host.namespace]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    if host is not None:
        environment["GLOO_SOCKET_IFNAME"] = "veth0"
    command = [*inside, sys.executable, "-m", "torch.distributed.run", *arguments]
    return subprocess.Popen(
        [*command, "-m", "tests.ranks.program", str(folder)],
        cwd=_ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _findings(processes: Sequence["subprocess.Popen[str]"], folder: Path, ranks: int) -> list[Findings]:
    """Wait for the end of the ranks, and return what the first ones found."""
    try:
        output = "".join(process.communicate(timeout=_LIMIT_S)[0] for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    paths = sorted(folder.glob("*.json"))
    found = [msgspec.json.decode(path.read_bytes(), type=Findings) for path in paths]
    assert [one.rank for one in found] == list(range(ranks)), output
    return found


def _run(size: int, folder: Path) -> list[Findings]:
    arguments = (
        "--nproc-per-node",
        str(size),
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
    )
    return _findings([_start(folder, *arguments)], folder, size)


def _check_everything(found: list[Findings], size: int) -> None:
    # Two pipes to each other rank, one to each other rank of both dimensions of the mesh; before and after
    # the end of the group. One more to each other rank afterwards.
    pipes = 2 * (size - 1) + 1 + (size // 2 - 1)
    assert all(one.pipes == pipes for one in found), found
    assert all(one.messages == (2 * pipes + size - 1) * _MESSAGES for one in found), found


@pytest.mark.parametrize("size", [2, pytest.param(8, marks=pytest.mark.extended)])
def test_every_rank_exchanges_messages_with_every_other_also_after_the_end_of_the_group(
    size: int, folder: Path
) -> None:
    _check_everything(_run(size, folder), size)


@pytest.mark.extended
def test_every_rank_exchanges_messages_with_every_other_on_two_hosts(hosts: Hosts, folder: Path) -> None:
    address = ("--master-addr", hosts.a.address, "--master-port", str(free_port()))
    size = 4
    nodes = [
        _start(
            folder,
            *("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", str(size // 2)),
            *address,
            host=host,
        )
        for number, host in enumerate((hosts.a, hosts.b))
    ]
    _check_everything(_findings(nodes, folder, size), size)
