"""The folder of a queue: who may open it, how processes get it, and its removal."""

import asyncio
import multiprocessing
import os
import pickle
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aiotensor import ClosedError, PeerLostError, UsageError
from aiotensor.queues import MessageQueue
from tests.queues.parties import check, close, get, message, open_consumer, process, queue_of

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Number(msgspec.Struct):
    value: int


def _put_from_child(queue: MessageQueue[Number]) -> None:
    async def produce() -> None:
        async with queue.producer() as producer:
            await producer.put(Number(7))

    asyncio.run(produce())


@pytest.mark.parametrize(
    "method", ["fork", *[pytest.param(name, marks=pytest.mark.extended) for name in ("spawn", "forkserver")]]
)
async def test_a_queue_can_be_an_argument_of_a_child_process(method: str) -> None:
    with queue_of(message_type=Number) as queue:
        async with queue.consumer() as consumer:
            context: Any = multiprocessing.get_context(method)
            child = context.Process(target=_put_from_child, args=(queue,))
            child.start()
            assert [got async for got in consumer] == [Number(7)]
            await asyncio.to_thread(child.join)
            assert child.exitcode == 0


async def test_unrelated_processes_use_one_folder(folder: Path) -> None:
    path = folder / "queue"
    with MessageQueue(folder=path, consumers=2) as queue:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        async with process() as other:
            await other.call(_open_consumer_in, str(path))
            async with queue.producer() as producer:
                await producer.put(message(1))
                assert await other.call(get, 1) == [1]
            await other.call(close)
    assert os.listdir(path) == []


async def _open_consumer_in(state: Any, path: str) -> None:
    await open_consumer(state, MessageQueue(folder=path, consumers=2))


async def test_a_second_run_in_a_folder_needs_the_close_of_the_first(folder: Path) -> None:
    def run() -> MessageQueue[Any]:
        return MessageQueue(folder=folder / "queue")

    async def exchange(producing: MessageQueue[Any], consuming: MessageQueue[Any]) -> None:
        async with consuming.consumer() as consumer:
            async with producing.producer() as producer:
                await producer.put(message(1))
                assert check(await consumer.get()) == 1
            assert [got async for got in consumer] == []

    first = run(), run()
    await exchange(*first)
    with pytest.raises(
        UsageError, match=rf"earlier run, call `close\(\)`.* remove the folder {folder}/queue$"
    ):
        await run().producer().__aenter__()
    for queue in first:
        queue.close()
    second = run(), run()
    await exchange(*second)
    for queue in second:
        queue.close()
    assert os.listdir(folder / "queue") == []


def _files(queue: MessageQueue[Any]) -> list[str]:
    path = queue._settings.folder.path
    return os.listdir(path) if os.path.exists(path) else []


@pytest.mark.parametrize("is_private", [True, False])
async def test_the_last_producer_or_consumer_removes_the_files_of_a_closed_queue(
    folder: Path, is_private: bool
) -> None:
    queue = MessageQueue(folder=None if is_private else folder / "queue")
    producer = await queue.producer().__aenter__()
    async with queue.consumer() as consumer:
        queue.close()
        queue.close()
        await producer.put(message(1))
        assert check(await consumer.get()) == 1
        await producer.aclose()
        assert _files(queue)
    assert not _files(queue)
    with pytest.raises(ClosedError, match="was closed"):
        await queue.consumer().__aenter__()


async def _create(state: Any) -> MessageQueue[Any]:
    queue: MessageQueue[Any] = MessageQueue()
    state.others["queue"] = queue
    return queue


@pytest.mark.promise(2)
async def test_others_remove_the_folder_of_a_killed_process() -> None:
    async with process() as creator:
        queue = await creator.call(_create)
        async with queue.producer():
            async with queue.consumer():
                pass
            assert "slots" in _files(queue)
            creator.kill()
            await creator.ended()
            assert "slots" in _files(queue)
        assert not await asyncio.to_thread(os.path.exists, queue._settings.folder.path)


def test_a_copy_of_a_queue_does_not_remove_the_folder() -> None:
    with queue_of(producers=3) as queue:
        copy = pickle.loads(pickle.dumps(queue))
        assert repr(copy) == repr(queue)
        copy.close()
        assert os.path.exists(queue._settings.folder.path)


@pytest.mark.promise(40)
async def test_removing_the_folder_of_a_queue_is_an_error_at_its_consumers(folder: Path) -> None:
    with MessageQueue(folder=folder / "queue") as queue:
        async with queue.consumer() as consumer:
            getting = asyncio.create_task(consumer.get())
            await asyncio.sleep(0)
            shutil.rmtree(folder / "queue")
            with pytest.raises(PeerLostError, match="were removed while it was in use"):
                await getting
            with pytest.raises(PeerLostError, match="were removed while it was in use"):
                async for _ in consumer:
                    pass


async def test_too_many_producers_or_consumers_raise_with_a_suggestion() -> None:
    with queue_of(producers=2) as queue:
        async with queue.consumer(), queue.producer(), queue.producer():
            with pytest.raises(
                UsageError, match=r"producers of this queue is 2.*pass a larger number of producers"
            ):
                await queue.producer().__aenter__()
            with pytest.raises(
                UsageError, match=r"consumers of this queue is 1.*pass a larger number of consumers"
            ):
                await queue.consumer().__aenter__()
        async with queue.consumer():
            pass
        with pytest.raises(UsageError, match="as many are open or have closed"):
            await queue.producer().__aenter__()


INVALID: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"producers": 0}, ValueError, "producers must be at least 1"),
    ({"consumers": 0}, ValueError, "consumers must be at least 1"),
    ({"max_messages": 0}, ValueError, "max_messages"),
    ({"arena_bytes": 0}, ValueError, "arena_bytes"),
    ({"max_body_bytes": 0}, ValueError, "max_body_bytes"),
    ({"grace_s": -1}, ValueError, "grace_s"),
    ({"folder": "/tmp/" + "x" * 100}, ValueError, "folder with a shorter path"),
    ({"folder": "/missing/queue"}, FileNotFoundError, "No such file or directory: '/missing/queue'"),
    ({"folder": "queue"}, ValueError, "'queue' of a queue must be an absolute path"),
    ({"producers": "3"}, TypeError, "integer"),
    ({"message_type": 8}, TypeError, "pass the capacity as max_messages=8"),
    ({"message_type": int | list[str] | tuple[int, ...]}, TypeError, "union"),
]


def test_invalid_arguments_raise_and_leave_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for options, error, text in INVALID:
        with pytest.raises(error, match=text):
            MessageQueue(**options)
    assert os.listdir(tmp_path) == []
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ValueError, match="choose a folder with a shorter path"):
        MessageQueue()
    assert os.listdir(deep) == []


def test_a_file_and_the_folder_of_another_user_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_text("")
    with pytest.raises(UsageError, match="not a folder of this user"):
        MessageQueue(folder=folder / "file")
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(UsageError, match="not a folder of this user"):
        MessageQueue(folder=folder)
    assert os.listdir(folder) == ["file"]
