"""The charges of containers for shared memory, and their memory limits."""

from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest

from tests.deployment.containers import container, party
from tests.deployment.groups import MemoryGroup, NoMemoryGroupsError, memory_group
from verification.places import free_port

MIB = 1 << 20

pytestmark = [
    pytest.mark.usefixtures("needs_containers"),
    pytest.mark.asyncio(loop_factories=["asyncio"]),  # of the test; the programs have their own
]


@pytest.fixture
def groups() -> Iterator[tuple[MemoryGroup, MemoryGroup]]:
    """Create the control groups of two containers."""
    with ExitStack() as stack:
        try:
            yield stack.enter_context(memory_group()), stack.enter_context(memory_group())
        except NoMemoryGroupsError as error:
            pytest.skip(str(error))


async def test_the_container_of_the_sender_is_charged_for_shared_memory(
    sockets: Path, groups: tuple[MemoryGroup, MemoryGroup]
) -> None:
    ours, theirs = groups
    async with (
        container(party("receive", sockets, group=theirs)) as receiver,
        container(party("keep", sockets, 128, group=ours)) as sender,
    ):
        await sender.says("filled")
        await receiver.says("received")
        assert ours.shared_bytes >= 128 * MIB
        assert theirs.shared_bytes < 8 * MIB


async def test_the_container_of_the_receiver_is_charged_for_tensors_from_another_machine(
    groups: tuple[MemoryGroup, MemoryGroup],
) -> None:
    ours, theirs = groups
    address = f"tcp://127.0.0.1:{free_port()}"
    async with (
        container(party("hold", address, group=theirs)) as receiver,
        container(party("keep", address, 128, group=ours)) as sender,
    ):
        await sender.says("filled")
        await receiver.says("holds")
        assert theirs.shared_bytes >= 128 * MIB
        assert ours.shared_bytes >= 128 * MIB  # allocated there, and then moved


async def test_at_its_limit_the_sender_is_killed_and_the_receiver_serves_the_next_one(
    sockets: Path, groups: tuple[MemoryGroup, MemoryGroup]
) -> None:
    ours, theirs = groups
    ours.limit(600 * MIB)  # an interpreter with torch needs about 300
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(container(party("receive", sockets, group=theirs)))
        await receiver.says("listens")
        large = await stack.enter_async_context(container(party("keep", sockets, 700, group=ours)))
        assert await large.ends() != 0
        assert ours.kills == 1
        assert theirs.kills == 0
        await receiver.says("lost a peer")
        small = await stack.enter_async_context(container(party("send", sockets, 64, 2, group=ours)))
        assert await small.ends() == 0
        assert small.output == ["taken 0\n", "taken 1\n"]
        await receiver.says("received 64 True")


async def test_at_its_limit_the_receiver_of_copies_is_killed_and_the_sender_finds_the_next_one(
    sockets: Path, groups: tuple[MemoryGroup, MemoryGroup]
) -> None:
    ours, theirs = groups
    theirs.limit(600 * MIB)
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(container(party("hoard", sockets, group=theirs)))
        await receiver.says("listens")
        sender = await stack.enter_async_context(container(party("send", sockets, 64, 1000, group=ours)))
        assert await receiver.ends() != 0
        assert theirs.kills == 1
        await sender.says("lost a peer")
        other = await stack.enter_async_context(container(party("receive", sockets)))
        await other.says("received 64 True")
        await sender.says("taken")
        assert ours.kills == 0
