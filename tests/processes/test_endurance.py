"""Many messages within narrow limits: nothing grows, and an idle pair does nothing."""

import ctypes
import os
import resource
import subprocess

import pytest
import torch

from tests.selection import COMPLETE
from verification.patterns import pattern
from verification.processes import peers, watch
from verification.processes.allocator import forget_free_memory

_SENDS = 100_000 if COMPLETE else 20_000
_CLONE_NEWNS = 0x20000
_GROWTH_KIB = 512  # for each of 100,000 sends 5 bytes


def _small_shm() -> str:
    """Give this process a /dev/shm of 64 MB; say why not, if it may not."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    for command in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{' '.join(command)}: {done.stderr.strip()}"
    return ""


async def _live_narrowly(state: peers.State) -> str:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    problem = _small_shm()
    if not problem:
        filesystem = os.statvfs("/dev/shm")
        assert filesystem.f_frsize * filesystem.f_blocks == 64 << 20
    return problem


def _tensor(number: int) -> torch.Tensor:
    return pattern(number, 8192 if number % 10 == 9 else 512)  # 64 KiB and 4 KiB


async def _send(state: peers.State, count: int) -> None:
    for number in range(count):
        await state.sender.send(_tensor(number))
    await state.sender.drain()


async def _receive(state: peers.State, count: int) -> bool:
    good = True
    for number in range(count):
        delivery = await anext(state.receiver)
        good &= bool(delivery.tensor[-1] == (delivery.tensor.numel() - 1) * 31 + number)
    return good


async def _tidy(state: peers.State) -> None:
    forget_free_memory()


@pytest.mark.promise(3, 5, 6)
async def test_many_sends_within_128_descriptors_and_a_small_shm_leave_memory_flat(address: str) -> None:
    async with peers.peers(address, 2) as [engine, api]:
        for child in (engine, api):
            problem = await child.call(_live_narrowly)
            if problem:
                pytest.skip(f"this needs a mount namespace of its own: {problem}")
        await engine.call(peers.open_receiver)
        await api.call(peers.open_sender, 64, 64 << 20)

        async def many(count: int) -> tuple[list[int], list[int]]:
            receiving = engine.start(_receive, count)
            await api.call(_send, count)
            assert await receiving
            for child in (engine, api):
                await child.call(_tidy)
            pids = (engine.pid, api.pid)
            return [watch.resident_kib(pid) for pid in pids], [watch.descriptors(pid) for pid in pids]

        memory, descriptors = await many(_SENDS // 10)
        memory_after, descriptors_after = await many(_SENDS)
        assert descriptors_after == descriptors
        for before, after in zip(memory, memory_after, strict=True):
            assert after - before < _GROWTH_KIB, (memory, memory_after)
