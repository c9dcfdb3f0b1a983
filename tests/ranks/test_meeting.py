"""How the two ends find each other: late, cancelled, with other arguments, or not at all."""

import asyncio
import logging
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from aiotensor import (
    ClosedError,
    PeerLostError,
    ProtocolError,
    RefusedError,
    TensorQueue,
    TensorSender,
    UsageError,
    WouldBlockError,
)
from aiotensor.ranks import RankPipe
from aiotensor.runtime import outage
from tests.ranks.pipes import Routes, meeting_of, opened
from verification.patterns import pattern
from verification.promptly import promptly
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("route")

once = pytest.mark.parametrize("route", ["unix"], indirect=True)  # the route makes no difference

_SOME = 5_000


def _end(store: Any, rank: int, **options: Any) -> RankPipe:
    return RankPipe(store, 1 - rank, rank=rank, world_size=2, **{**Routes.current.options, **options})


async def _exchange(low: RankPipe, high: RankPipe) -> None:
    """See that two ends belong to each other, and close them."""
    for sender, receiver in ((low, high), (high, low)):
        await sender.send(pattern(sender.rank, _SOME))
        received = await receiver.receive()
        assert received is not None
        assert torch.equal(received, pattern(sender.rank, _SOME))
    await low.aclose()
    await high.aclose()


async def _cancel(opening: asyncio.Future[Any]) -> None:
    opening.cancel()
    await asyncio.wait([opening])
    assert opening.cancelled()


@pytest.mark.parametrize("first", [0, 1])
async def test_either_end_may_be_opened_first_and_leaves_nothing_in_the_folder(
    first: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    store = HashStore()
    early, late = _end(store, first), _end(store, 1 - first)
    opening = asyncio.ensure_future(early.__aenter__())
    await asyncio.sleep(0.05)
    assert not opening.done()
    await late.__aenter__()
    await opening
    assert os.listdir(folder) == []
    await _exchange(*sorted((early, late), key=lambda pipe: pipe.rank))


@once
async def test_each_pipe_is_connected_to_the_pipe_with_the_same_number() -> None:
    store = HashStore()
    lows = [_end(store, 0) for _ in range(3)]
    openings = []
    for taken, low in enumerate(lows, start=1):
        openings.append(asyncio.ensure_future(low.__aenter__()))
        await until(lambda taken=taken: store.add("aiotensor/ranks/0-1/0", 0) == taken)  # type: ignore[misc]
    highs = [_end(store, 1) for _ in range(3)]
    for high in highs:
        await high.__aenter__()
    await asyncio.gather(*openings)
    for low, high in zip(lows, highs, strict=True):
        await _exchange(low, high)


@pytest.mark.promise(40)
@once
async def test_opening_waits_for_the_other_rank_until_it_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outage, "_FIRST_LINE_S", 0.02)
    for rank in (0, 1):
        with caplog.at_level(logging.WARNING, "aiotensor.transports"):
            opening = asyncio.ensure_future(_end(HashStore(), rank).__aenter__())
            await until(lambda: bool(caplog.records))
            await asyncio.sleep(0.1)  # no second line comes
            with promptly():
                await _cancel(opening)
        [record] = caplog.records
        assert record.event == "peer_missing"  # type: ignore[attr-defined]
        assert f"rank {1 - rank} has not opened its end" in record.getMessage()
        caplog.clear()


@once
async def test_closing_a_pipe_ends_its_opening() -> None:
    pipe = _end(HashStore(), 0)
    opening = asyncio.ensure_future(pipe.__aenter__())
    await asyncio.sleep(0.02)
    with pytest.raises(ClosedError, match="still being opened"):
        await pipe.send(None)
    await pipe.aclose()
    with pytest.raises(ClosedError, match="was closed"):
        await opening


@once
async def test_max_wait_s_limits_the_wait_for_a_rank_that_is_absent_or_died_while_it_opened() -> None:
    for died in (False, True):
        store = HashStore()
        if died:
            store.add("aiotensor/ranks/0-1/1", 1)  # it took its number, and died
        pipe = _end(store, 0, max_wait_s=0.05)
        with pytest.raises(WouldBlockError, match="rank 1 has not opened its end within"):
            await pipe.__aenter__()
        with pytest.raises(ClosedError):
            await pipe.send(None)


@once
async def test_ranks_with_different_options_refuse_each_other() -> None:
    for own, other, texts in (
        ({"max_bytes": 1 << 20}, {"max_bytes": 1 << 21}, ("max_bytes=1048576", "max_bytes=2097152")),
        ({"encrypt": True}, {"encrypt": False}, ("encrypt=True", "encrypt=False")),
    ):
        store = HashStore()
        low, high = _end(store, 0, **own), _end(store, 1, **other)
        results = await asyncio.gather(low.__aenter__(), high.__aenter__(), return_exceptions=True)
        assert [type(error) for error in results] == [RefusedError] * 2
        for error in results:
            assert all(text in str(error) for text in (*texts, "pass the same value at both ranks"))


@once
async def test_an_entry_of_another_form_is_refused() -> None:
    store = HashStore()
    store.set("aiotensor/ranks/0-1/1/1", "nonsense")
    with pytest.raises(ProtocolError, match="the entry of rank 1 cannot be used"):
        await _end(store, 0).__aenter__()


@once
async def test_a_store_that_is_gone_is_an_error() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    opening = asyncio.ensure_future(_end(client, 0).__aenter__())
    await asyncio.sleep(0.05)
    del server
    with promptly(5), pytest.raises(PeerLostError, match="the store of the group cannot be reached"):
        await opening


async def test_a_store_without_a_server_needs_host_between_machines() -> None:
    store = HashStore()
    if Routes.current.is_local:
        low, high = _end(store, 0), _end(store, 1)
        await opened(low, high)
        await _exchange(low, high)
        return
    opening = asyncio.ensure_future(_end(store, 1, host=None).__aenter__())
    with pytest.raises(UsageError, match="pass the address of that interface as host="):
        await _end(store, 0, host=None).__aenter__()
    await _cancel(opening)


async def _listening(store: HashStore) -> str:
    """Return the address where the lower rank of a store listens, once it does."""
    key = "aiotensor/ranks/0-1/1/0"
    await until(lambda: store.check([key]) and b'"address":""' not in store.get(key))
    address: str = msgspec.json.decode(store.get(key))["address"]
    return address


async def test_other_processes_that_connect_are_ignored() -> None:
    store = HashStore()
    low = _end(store, 0)
    opening = asyncio.ensure_future(low.__aenter__())
    await meeting_of(store, 1).exchange()  # so that rank 0 begins to listen
    address = await _listening(store)
    if "://" not in address:
        queue = TensorQueue(address)
        silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        silent.connect(queue.socket_name)
        rude = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        rude.connect(queue.socket_name)
        rude.send(b"nonsense")
        async with TensorSender(queue, max_wait_s=0.1) as sender:
            with pytest.raises(RefusedError, match="a RankPipe listens at this address"):
                await sender.ready()
    else:
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        silent, rude = (socket.create_connection((host, int(port))) for _ in range(2))
        rude.send(b"GET / HTTP/1.0\r\n\r\n")
        if not Routes.current.options.get("encrypt"):
            async with TensorSender(address, max_wait_s=0.3) as sender:  # without the token
                with pytest.raises(WouldBlockError):
                    await sender.ready()
    assert not opening.done()
    silent.close()
    rude.close()
    opening.cancel()
    await asyncio.wait([opening])
    low, high = _end(store, 0), _end(store, 1)
    await opened(low, high)
    await _exchange(low, high)


_WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"peer": 0}, ValueError, "rank 0 is this rank"),
    ({"peer": 2}, ValueError, "there is no rank 2 in a group of 2"),
    ({"peer": -1}, ValueError, "there is no rank -1"),
    ({"rank": 2}, ValueError, "there is no rank 2"),
    ({"rank": None}, TypeError, "pass rank and world_size as well"),
    ({"max_bytes": 4095}, ValueError, "max_bytes must be at least 4096, got 4095"),
    ({"max_bytes": 1.5}, TypeError, "max_bytes must be an integer"),
    ({"max_wait_s": 0}, ValueError, "max_wait_s must be positive"),
    ({"peer_timeout_s": -1}, ValueError, "peer_timeout_s must be positive"),
    ({"host": "localhost"}, ValueError, "does not appear to be an IPv4 or IPv6 address"),
    ({"group": "nccl"}, TypeError, "group must be a torch.distributed.ProcessGroup"),
    ({"group": None}, TypeError, "group must be a torch.distributed.ProcessGroup"),
]


@once
async def test_wrong_arguments_are_refused() -> None:
    for arguments, error, text in _WRONG:
        right: dict[str, Any] = {"group": HashStore(), "peer": 1, "rank": 0, "world_size": 2}
        if not isinstance(arguments.get("group", right["group"]), dist.Store):  # type: ignore[attr-defined]
            right |= {"rank": None, "world_size": None}
        with pytest.raises(error, match=text):
            RankPipe(**{**right, **arguments})


@once
async def test_a_group_of_one_process_has_no_other_rank() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        with pytest.raises(ValueError, match="there is no rank 1 in a group of 1"):
            RankPipe(group, 1)
        with pytest.raises(TypeError, match="a group defines its own"):
            RankPipe(group, 1, rank=0)
    finally:
        dist.destroy_process_group()
