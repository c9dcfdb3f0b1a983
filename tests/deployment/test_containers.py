"""Both sides in containers of their own, with Docker's default limits and restrictions, and a common folder.

They have different PID, IPC, UTS and mount namespaces, no capabilities, a read-only root and the default
seccomp profile.
"""

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.deployment.containers import USER, container, party

OTHER_USERS = 200_000  # the first of the users that a user namespace gets

pytestmark = [
    pytest.mark.usefixtures("needs_containers"),
    pytest.mark.asyncio(loop_factories=["asyncio"]),  # of the test; the programs have their own
]


async def test_tensors_larger_than_dev_shm_move_between_containers(sockets: Path) -> None:
    async with (
        container(party("receive", sockets)) as receiver,
        container(party("send", sockets, 150, 2)) as sender,
    ):
        await receiver.says("listens as 1")
        assert await sender.ends() == 0, sender.printed
        assert sender.output == ["taken 0\n", "taken 1\n"]
        for _ in range(2):
            assert await receiver.says("received") == "received 150 True\n"


async def test_each_side_is_notified_when_the_container_of_the_other_is_killed(sockets: Path) -> None:
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(container(party("receive", sockets)))
        await receiver.says("listens")
        keeper = await stack.enter_async_context(container(party("keep", sockets, 16)))
        await keeper.says("filled")
        await keeper.kill()
        await receiver.says("lost a peer")

        sender = await stack.enter_async_context(container(party("send", sockets, 16, 1000)))
        await sender.says("taken 3")
        await receiver.kill()
        await sender.says("lost a peer")
        other = await stack.enter_async_context(container(party("receive", sockets)))
        await other.says("received 16")
        await sender.says("taken")


async def test_a_killed_container_of_a_subscriber_frees_its_memory(sockets: Path) -> None:
    async with (
        container(party("publish", sockets, 64)) as publisher,
        container(party("subscribe", sockets, 0)) as one,
        container(party("subscribe", sockets, 1)) as keeper,
    ):
        for subscriber in (one, keeper):
            await subscriber.says("received True")
        await publisher.says("delivered to 2")
        assert await publisher.says("drained") == f"drained with {64 << 20}\n"
        await keeper.kill()
        async with asyncio.timeout(5):
            await publisher.says("free")


async def test_a_container_of_another_user_gets_a_clear_error(sockets: Path) -> None:
    async with container(party("receive", sockets)) as receiver:
        await receiver.says("listens")
        async with container(party("send", sockets, 1, 1, user=USER + 1)) as sender:
            await sender.says("AccessDeniedError: this user may not connect to /run/aiotensor/engine.sock")


async def test_containers_in_user_namespaces_need_the_same_user_of_the_machine(sockets: Path) -> None:
    os.chown(sockets, OTHER_USERS + USER, OTHER_USERS + USER)
    async with container(party("receive", sockets, first_user=OTHER_USERS)) as receiver:
        await receiver.says("listens")
        async with container(party("send", sockets, 16, 1, first_user=OTHER_USERS)) as sender:
            assert await sender.ends() == 0, sender.printed
        assert await receiver.says("received") == "received 16 True\n"
        # As with `hostUsers: false`: the same id is another user of the machine.
        async with container(party("send", sockets, 16, 1, first_user=OTHER_USERS + 65536)) as sender:
            await sender.says("AccessDeniedError: this user may not connect")
