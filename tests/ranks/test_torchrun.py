"""Pipes in gloo groups that torchrun starts."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.ranks.program import Findings
from verification.places import free_port

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 100.0
_MESSAGES = 6  # of each exchange, in each direction


@pytest.mark.extended
@pytest.mark.parametrize("size", [2, 8])
def test_every_rank_exchanges_messages_with_every_other_also_after_the_end_of_the_group(
    size: int, folder: Path
) -> None:
    address = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), *address]
    done = subprocess.run(
        [*command, "-m", "tests.ranks.program", str(folder)],
        cwd=_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=_LIMIT_S,
    )
    paths = sorted(folder.glob("*.json"))
    found = [msgspec.json.decode(path.read_bytes(), type=Findings) for path in paths]
    assert [one.rank for one in found] == list(range(size)), done.stderr
    # Two pipes to each other rank, one to each other rank of both dimensions of the mesh; before and after
    # the end of the group. One more to each other rank afterwards.
    pipes = 2 * (size - 1) + 1 + (size // 2 - 1)
    assert all(one.pipes == pipes for one in found), found
    assert all(one.messages == (2 * pipes + size - 1) * _MESSAGES for one in found), found
