"""One address for the tensors and the messages of an engine: a folder that contains both sockets."""

import asyncio
import os
import stat
from pathlib import Path

import pytest

from aiotensor import TensorReceiver, TensorSender, UsageError
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.inspection import Inspection, inspect
from tests.channel.parties import Answer, Place, Question, answer
from tests.channel.peers import listening
from verification.patterns import BIG, pattern

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


async def test_an_engine_and_its_client_use_the_same_address(folder: Path) -> None:
    engine = f"engine://{folder}/engine"
    async with (
        listening(Place(engine, engine, "")) as (server, _),
        MessageClient(engine, sender=TensorSender(engine), reply_type=Answer) as client,
    ):
        assert sorted(os.listdir(folder / "engine")) == ["messages", "tensors"]
        assert stat.S_IMODE((folder / "engine").stat().st_mode) == 0o700
        assert server.address == engine
        assert engine in repr(server)
        serving = asyncio.create_task(server.serve(answer))
        got = await client.request(Question(5, pattern(5, BIG)))
        assert got.total == int(pattern(5, BIG).sum())
        found = await inspect(engine, patience_s=10)
        assert isinstance(found, Inspection)
        serving.cancel()
    assert os.listdir(folder / "engine") == []


async def test_the_address_of_the_file_in_the_folder_is_equivalent(folder: Path) -> None:
    async with TensorReceiver(f"engine://{folder}/engine") as receiver:
        async with TensorSender(f"unix://{folder}/engine/tensors") as sender:
            await sender.ready()
            assert sender.receiver_id == receiver.id
        with pytest.raises(UsageError, match="already listens"):
            await TensorReceiver(f"unix://{folder}/engine/tensors").__aenter__()


async def test_the_error_about_a_missing_parent_names_the_folder(folder: Path) -> None:
    engine = f"engine://{folder}/missing/engine"
    for opening in (TensorReceiver(engine), MessageServer(engine, Question)):
        with pytest.raises(FileNotFoundError, match="does not exist") as caught:
            await opening.__aenter__()
        assert caught.value.filename == f"{folder}/missing/engine"


@pytest.mark.parametrize("is_folder", [True, False])
async def test_the_wrong_kind_of_address_raises_instead_of_waiting(folder: Path, is_folder: bool) -> None:
    """A folder in place of the socket, and a socket in place of the folder."""
    engine = f"engine://{folder}/engine"
    async with TensorReceiver(engine), MessageServer(engine, Question):
        tensors, messages, expected = (
            (f"unix://{folder}/engine", f"ipc://{folder}/engine", f"the address is {engine}")
            if is_folder
            else (f"{engine}/tensors", f"{engine}/messages", f"{folder}/engine/.* is not a folder")
        )
        with pytest.raises(UsageError, match=expected):
            async with TensorSender(tensors) as sender:
                await sender.send(pattern(1, BIG))
        async with MessageClient(messages, reply_type=Answer) as client:
            with pytest.raises(UsageError, match=expected):
                await client.request(Question(5, pattern(5, 2)))
        with pytest.raises(UsageError, match=expected):
            await inspect(tensors, patience_s=10)
