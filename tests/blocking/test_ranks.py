"""Pipes between ranks in threads."""

from collections.abc import Iterator

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from aiotensor import ClosedError, PeerLostError, WouldBlockError
from aiotensor.blocking import KVPipe, RankPipe
from tests.blocking.waiting import in_thread
from verification.patterns import BIG, pattern

_MAX = 2 * BIG  # elements


def _ends() -> list[RankPipe]:
    store = HashStore()
    return [RankPipe(store, 1 - rank, rank=rank, world_size=2, max_bytes=_MAX * 8) for rank in range(2)]


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


@pytest.fixture
def ends() -> Iterator[list[RankPipe]]:
    """Return both ends of an open pipe."""
    pipes = _ends()
    opened = [in_thread(pipe.__enter__) for pipe in pipes]
    for opening in opened:
        opening.result()
    yield pipes
    for pipe in pipes:
        pipe.close()


def test_threads_exchange_messages_in_order(ends: list[RankPipe]) -> None:
    low, high = ends
    assert [(pipe.rank, pipe.peer) for pipe in ends] == [(0, 1), (1, 0)]
    received = in_thread(lambda: [high.receive() for _ in range(3)])
    low.send(pattern(0, BIG))
    low.send(None)
    low.send_nowait(pattern(1, 3))
    low.drain(timeout=10)
    first, second, third = received.result()
    assert _equal(first, pattern(0, BIG))
    assert second is None
    assert _equal(third, pattern(1, 3))
    high.send(first)
    assert _equal(first, low.receive(copy=True, timeout=10))
    assert [(pipe.statistics().messages_sent, pipe.statistics().messages_received) for pipe in ends] == [
        (3, 1),
        (1, 3),
    ]


def test_a_timeout_loses_nothing(ends: list[RankPipe]) -> None:
    low, high = ends
    with pytest.raises(TimeoutError):
        high.receive(timeout=0.01)
    low.send(pattern(0, _MAX))
    with pytest.raises(TimeoutError):
        low.send(pattern(1, _MAX), timeout=0.01)
    with pytest.raises(WouldBlockError):
        low.send_nowait(pattern(1, _MAX))
    with pytest.raises(TimeoutError):
        low.drain(timeout=0.01)
    assert _equal(high.receive(copy=True, timeout=10), pattern(0, _MAX))
    low.send(pattern(2, 3), timeout=10)
    assert _equal(high.receive(timeout=10), pattern(2, 3))


def test_a_closed_pipe_delivers_its_messages_and_then_raises(ends: list[RankPipe]) -> None:
    low, high = ends
    low.send(pattern(0, 3))
    low.close()
    assert _equal(high.receive(timeout=10), pattern(0, 3))
    with pytest.raises(PeerLostError):
        high.receive(timeout=10)
    with pytest.raises(ClosedError):
        low.receive(timeout=10)


def test_a_kv_pipe_has_the_methods_of_vllms_pipes(ends: list[RankPipe]) -> None:
    low, high = map(KVPipe, ends)
    received = in_thread(lambda: [high.recv_tensor() for _ in range(2)])
    keys = pattern(0, BIG)
    low.send_tensor(keys)
    keys.zero_()
    low.send_tensor(None)
    first, second = received.result()
    assert _equal(first, pattern(0, BIG))
    assert second is None
    assert ends[1].statistics().leases == 0  # the received tensor is a copy
    low.close()
    with high, pytest.raises(PeerLostError):
        high.recv_tensor()
    assert all(repr(pipe).split()[1].startswith("closed") for pipe in ends)
