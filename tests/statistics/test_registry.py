"""The open objects of a process are found by their endpoints, and their counts persist after closing."""

import asyncio
import gc
import signal
from typing import Any

import pytest

from aiotensor import SenderStatistics, TensorQueue, TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.errors import ClosedError, UsageError
from aiotensor.runtime.affinity import LoopAffinity
from aiotensor.statistics import registry
from aiotensor.statistics.registry import HasStatistics, Snapshot
from aiotensor.transports.endpoints import route_to
from aiotensor.types import ClientStatistics, ReceiverStatistics
from tests.channel.parties import Answer, Question, place
from tests.pairs import endpoint
from tests.runtime.test_affinity import forks, in_a_fork
from tests.statistics.objects import PATIENCE_S, Counted, answers_at, close, open_counted, present
from verification.patterns import pattern
from verification.waiting import until

# Endpoints


async def test_each_kind_of_object_is_found_by_its_endpoint_while_it_is_open(
    nothing_left_behind: None,
) -> None:
    with place() as here:
        other = here.messages.replace("/m", "/n")
        client: MessageClient[Answer] = MessageClient([here.messages, other], reply_type=Answer)
        parties: dict[str, HasStatistics] = {
            here.tensors: TensorReceiver(here.tensors),
            here.answers: TensorSender(here.answers),
            here.messages: MessageServer(here.messages, Question),
            f"{here.messages},{other}": client,
        }
        for at, party in parties.items():
            assert not present(registry.collect(0.0), at)
            async with party:  # type: ignore[attr-defined]
                assert present(registry.collect(0.0), at) == [party.statistics()]
                there = await asyncio.to_thread(registry.collect, PATIENCE_S)
                assert present(there, at) == [party.statistics()]
            assert not present(registry.collect(0.0), at)


async def test_objects_of_all_queues_are_at_one_endpoint(nothing_left_behind: None) -> None:
    before = len(present(registry.collect(0.0), "queue"))
    with endpoint("queue") as one, endpoint("queue") as another:
        async with TensorReceiver(one), TensorSender(one), TensorSender(another):
            assert len(present(registry.collect(0.0), "queue")) == before + 3
    assert len(present(registry.collect(0.0), "queue")) == before


async def test_a_server_at_any_free_port_is_found_by_its_actual_port(nothing_left_behind: None) -> None:
    async with MessageServer("tcp://127.0.0.1:0", Question) as server:
        assert not server.address.endswith(":0")
        assert present(registry.collect(0.0), server.address) == [server.statistics()]


async def test_an_object_that_could_not_be_opened_is_not_found(nothing_left_behind: None) -> None:
    with place() as here:
        async with TensorReceiver(here.tensors) as receiver:
            with pytest.raises(UsageError):
                await TensorReceiver(here.tensors).__aenter__()
            assert present(registry.collect(0.0), here.tensors) == [receiver.statistics()]


def test_a_queue_has_the_same_name_in_every_process() -> None:
    queue = TensorQueue()
    assert route_to(queue).label == "queue"
    assert route_to("unix:///run/s").label == "unix:///run/s"
    queue.close()


def test_the_name_of_a_path_that_is_not_utf_8_can_be_encoded() -> None:
    assert route_to("unix:///run/ä\udcff").label == "unix:///run/ä\\udcff"


# Counts of closed objects


async def test_counts_of_closed_senders_and_receivers_persist_and_add_up(nothing_left_behind: None) -> None:
    with place() as here:

        def counted() -> tuple[float, float]:
            counts = registry.collect(0.0).counts
            sent = counts[SenderStatistics, here.tensors]["tensors_sent", ""]
            return sent, counts[ReceiverStatistics, here.tensors]["tensors_taken", ""]

        for turn in range(1, 4):
            async with TensorReceiver(here.tensors) as receiver, TensorSender(here.tensors) as sender:
                await receiver.receive(await sender.send(pattern(0, 3)))
                assert counted() == (turn, turn)
            assert counted() == (turn, turn)


async def test_counts_include_messages_that_closing_discards(nothing_left_behind: None) -> None:
    with place() as here:
        async with TensorSender(here.tensors) as sender:
            message = sender.message()
            await message.__aenter__()
        counts = registry.collect(0.0).counts[SenderStatistics, here.tensors]
        assert counts["messages_discarded", ""] == 1


async def test_counts_include_the_waits_and_errors_of_calls_that_closing_fails(
    nothing_left_behind: None,
) -> None:
    with place() as here:
        async with TensorSender(here.tensors, 1) as sender:
            message = sender.message()
            await message.__aenter__()
            waiting = [asyncio.create_task(sender.send(pattern(0, 3))) for _ in range(3)]
            await until(lambda: sender.statistics().waiting == 3)
        await asyncio.wait(waiting)
        assert [type(task.exception()) for task in waiting] == [ClosedError] * 3
        counts = registry.collect(0.0).counts[SenderStatistics, here.tensors]
        waits = {bound: number for (name, bound), number in counts.items() if name == "permit_waits"}
        assert counts["errors", "ClosedError"] == 3
        assert sum(number for bound, number in waits.items() if bound != "total_s") == 3
        del waiting


async def test_an_object_freed_without_closing_keeps_its_last_read_counts() -> None:
    at = f"freed in {asyncio.get_running_loop()}"
    counted, _ = open_counted(5, at)
    assert answers_at(registry.collect(0.0), at) == 5
    del counted
    gc.collect()
    snapshot = registry.collect(0.0)

    assert not present(snapshot, at)
    assert answers_at(snapshot, at) == 5


def test_an_object_whose_loop_was_closed_first_keeps_its_last_counts() -> None:
    async def open_and_collect() -> Counted:
        counted, _ = open_counted(7, "closed loop")
        assert answers_at(registry.collect(0.0), "closed loop") == 7
        return counted

    counted = asyncio.run(open_and_collect())
    counted.answers = 100
    snapshot = registry.collect(PATIENCE_S)

    assert (answers_at(snapshot, "closed loop"), snapshot.unanswered) == (7, 0)
    assert not present(snapshot, "closed loop")
    assert len(counted.readers) == 1


def test_an_object_that_is_closed_after_its_loop_is_removed_immediately() -> None:
    async def open_one() -> tuple[Counted, LoopAffinity]:
        return open_counted(3, "after its loop")

    counted, affinity = asyncio.run(open_one())
    counted.answers = 4
    close(affinity)
    assert counted not in registry.owners()
    assert answers_at(registry.collect(0.0), "after its loop") == 4


async def test_the_256_endpoints_that_were_closed_last_are_remembered() -> None:
    at = f"place in {asyncio.get_running_loop()}"
    stays, stays_open = open_counted(1, f"{at} 0")
    for number in range(600):
        _, affinity = open_counted(1, f"{at} {number}")
        close(affinity)
        await asyncio.sleep(0)
    snapshot = registry.collect(0.0)
    in_use = {there for there, _ in snapshot.present}
    assert sum(there not in in_use for _, there in snapshot.counts) == 256
    assert answers_at(snapshot, f"{at} 599") == 1
    assert answers_at(snapshot, f"{at} 0") == 1 + stays.answers  # this object is still open
    assert (ClientStatistics, f"{at} 1") not in snapshot.counts
    close(stays_open)


async def test_counts_at_endpoints_in_use_are_kept_for_any_number_of_endpoints() -> None:
    at = f"used in {asyncio.get_running_loop()}"
    kept = []
    for number in range(300):
        _, affinity = open_counted(1, f"{at} {number}")
        kept.append(open_counted(1, f"{at} {number}"))
        close(affinity)
        await asyncio.sleep(0)
    snapshot = registry.collect(0.0)
    assert [answers_at(snapshot, f"{at} {number}") for number in range(300)] == [2] * 300
    for _, affinity in kept:
        close(affinity)


# Signals and forks


class InterruptedErrors(dict[str, int]):
    """Errors, counting which is interrupted by a signal."""

    def items(self) -> Any:
        if callable(signal.getsignal(signal.SIGUSR1)):
            signal.raise_signal(signal.SIGUSR1)
        return super().items()


class InterruptedLoop(asyncio.SelectorEventLoop):
    """A loop, a look at which is interrupted by a signal."""

    def is_closed(self) -> bool:
        if callable(signal.getsignal(signal.SIGUSR1)):
            signal.raise_signal(signal.SIGUSR1)
        return super().is_closed()


@pytest.mark.parametrize("amid", ["sweeping", "counting"])
def test_a_signal_handler_may_collect_amid_another_collection(amid: str) -> None:
    at = f"interrupted amid {amid}"
    snapshots: list[Snapshot] = []

    def handle(*_: object) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # one at a time
        snapshots.append(registry.collect(0.0))
        signal.signal(signal.SIGUSR1, handle)

    async def open_three() -> list[tuple[Counted, LoopAffinity]]:
        errors = InterruptedErrors(other=1) if amid == "counting" else None
        opened = [open_counted(number, at, errors) for number in (1, 10, 100)]
        registry.collect(0.0)
        return opened

    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    loop = InterruptedLoop() if amid == "sweeping" else asyncio.SelectorEventLoop()
    try:
        kept = loop.run_until_complete(open_three())
        loop.close()
        signal.signal(signal.SIGUSR1, handle)
        snapshots.append(registry.collect(0.0))
        snapshots.append(registry.collect(0.0))
    finally:
        signal.signal(signal.SIGUSR1, before)
    kept.clear()
    assert len(snapshots) > 2
    assert {answers_at(snapshot, at) for snapshot in snapshots} == {111}


@forks
async def test_a_forked_child_finds_no_object_of_its_parent() -> None:
    at = f"parent in {asyncio.get_running_loop()}"
    counted, _ = open_counted(1, at)

    def fail_with_snapshot() -> None:
        raise RuntimeError(str(registry.collect(0.0)._replace(number=0)))

    assert in_a_fork(fail_with_snapshot) == f"RuntimeError: {Snapshot([], {}, {}, 0, 0)}"
    assert present(registry.collect(0.0), at) == [counted.statistics()]
