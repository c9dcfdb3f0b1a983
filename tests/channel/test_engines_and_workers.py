"""Two workers of an application share two engine processes, one of which is killed."""

import asyncio
import zlib
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
import torch

from aiotensor import PeerLostError
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.types import ClientStatistics
from tests.channel.parties import place
from verification.processes import watch
from verification.processes.peers import State, peers
from verification.waiting import until

UPLOADS = 50
SHAPE = (32, 128, 256)  # of the frames of an upload: 1 MiB
PERMITS, FIT = 8, 6  # the permits of a worker, and the uploads for which its arena has room
ANSWERED, IN_HAND = 5, 3  # the uploads that an engine answers before it pauses, and those that it has then


class Upload(msgspec.Struct):
    """A request."""

    number: int
    frames: torch.Tensor


class Checksum(msgspec.Struct):
    """The answer, with the number of the engine that has computed it."""

    engine: int
    value: int


def decode(number: int, frames: torch.Tensor) -> torch.Tensor:
    """Fill memory with the frames of an upload, which differ from those of each other one."""
    return frames.random_(0, 256, generator=torch.Generator().manual_seed(number))


def checksum(frames: torch.Tensor) -> int:
    return zlib.crc32(frames.numpy().data)


async def open_engine(state: State, number: int, address: str) -> None:
    """Answer some uploads, take some more, and pause until `go_on`."""
    server = await state.stack.enter_async_context(MessageServer(address, Upload))
    in_hand: list[int] = []
    is_full, may_go_on = asyncio.Event(), asyncio.Event()
    begun = 0

    async def handle(upload: Upload) -> Checksum:
        nonlocal begun
        begun += 1
        if begun > ANSWERED:
            in_hand.append(upload.number)
            if len(in_hand) == IN_HAND:
                is_full.set()
            await may_go_on.wait()
        return Checksum(number, checksum(upload.frames))

    serving = asyncio.create_task(server.serve(handle, max_concurrent=IN_HAND))
    state.others |= {"server": server, "in_hand": in_hand, "serving": serving}
    state.others |= {"is_full": is_full, "may_go_on": may_go_on}


async def paused(state: State) -> list[int]:
    """Wait until the engine has taken as many uploads as it can, and return the numbers of those in hand."""
    await state.others["is_full"].wait()
    return list(state.others["in_hand"])


async def untaken(state: State) -> int:
    """Return the number of uploads that the engine has not taken."""
    server: MessageServer[Upload] = state.others["server"]
    return server.statistics().waiting


async def go_on(state: State) -> None:
    """Answer all uploads from now on."""
    state.others["may_go_on"].set()


async def upload_all(
    state: State, addresses: Sequence[str], numbers: Sequence[int]
) -> list[Checksum | PeerLostError]:
    """Decode uploads in place, and ask for their checksums, all at once."""
    client = MessageClient(addresses, Checksum, PERMITS, FIT << 20)
    state.others["client"] = await state.stack.enter_async_context(client)

    async def upload(number: int) -> Checksum | PeerLostError:
        try:
            async with client.permit() as permit:
                frames = decode(number, await permit.allocate(SHAPE, torch.uint8))
                return await client.request(Upload(number, frames), inside=permit)
        except PeerLostError as error:
            return error

    return await asyncio.gather(*map(upload, numbers))


async def at_rest(state: State) -> ClientStatistics:
    """Wait until a worker holds neither permits nor memory, and return its statistics."""
    client: MessageClient[Checksum] = state.others["client"]
    await until(lambda: client.statistics().in_flight == client.statistics().bytes_in_use == 0)
    return client.statistics()


@pytest.mark.promise(10, 14)
async def test_a_killed_engine_loses_only_what_it_has_taken_and_workers_stay_within_their_arenas() -> None:
    with place() as here, place() as there:
        async with peers(here, 2) as engines, peers(here, 2) as workers:
            for number, address in enumerate((here, there)):
                await engines[number].call(open_engine, number, address)
            numbers = [range(first, UPLOADS, len(workers)) for first in range(len(workers))]
            asking = [
                worker.start(upload_all, (here, there), mine)
                for worker, mine in zip(workers, numbers, strict=True)
            ]
            in_hand = [await engine.call(paused) for engine in engines]
            left = [0, 0]
            while sum(left) < FIT * len(workers) - IN_HAND * len(engines):
                left = [await engine.call(untaken) for engine in engines]
            killed = left.index(max(left))
            engines[killed].kill()
            await engines[1 - killed].call(go_on)

            outcomes: dict[int, Checksum | PeerLostError] = {}
            for mine, answering in zip(numbers, asking, strict=True):
                outcomes |= zip(mine, await answering, strict=True)
            lost, answered = [], Counter[int]()
            for number, outcome in outcomes.items():
                if isinstance(outcome, PeerLostError):
                    assert outcome.pid == engines[killed].pid
                    lost.append(number)
                else:
                    frames = decode(number, torch.empty(SHAPE, dtype=torch.uint8))
                    assert outcome.value == checksum(frames)
                    answered[outcome.engine] += 1
            assert sorted(lost) == sorted(in_hand[killed])
            assert answered == {killed: ANSWERED, 1 - killed: UPLOADS - ANSWERED - IN_HAND}

            for worker in workers:
                seen = await worker.call(at_rest)
                assert (seen.peak_in_flight, seen.tensors_copied) == (PERMITS, 0)
                assert seen.peak_bytes_in_use == seen.arena_bytes == FIT << 20
                # The worker keeps idle memory for a while, so this is the most that it has ever used.
                assert 0 < watch.memfd_bytes(worker.pid) <= FIT << 20
