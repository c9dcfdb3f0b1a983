"""Any thread finds the open objects of a process, and their counts persist after they are closed."""

import asyncio
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pytest

from aiotensor import SenderStatistics, TensorQueue, TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.errors import ClosedError, UsageError
from aiotensor.runtime.affinity import LoopAffinity
from aiotensor.statistics import registry
from aiotensor.statistics.registry import COUNTERS, Report, Statistics, Watched
from aiotensor.transports.endpoints import name_of
from aiotensor.types import ClientStatistics, ReceiverStatistics, ServerStatistics
from tests.channel.parties import Answer, Question, place
from tests.loops import let_threads_run
from tests.pairs import endpoint, pattern, until
from tests.runtime.test_affinity import forks, in_a_fork

PATIENCE_S = 20.0  # more than a loop needs to answer that is not blocked


class Told:
    """An open object with given statistics."""

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.looks: list[int] = []  # the threads that asked

    def statistics(self) -> ClientStatistics:
        self.looks.append(threading.get_ident())
        return ClientStatistics(1, (1,), 0, 0, self.answers, 0, 0, 0, {})


def open_told(answers: int, at: str) -> tuple[Told, LoopAffinity]:
    told, home = Told(answers), LoopAffinity("Told")
    home.enter()
    home.settle(told, at)
    return told, home


def leave(home: LoopAffinity) -> None:
    with home.leaving():
        home.is_closed = True


def answers_at(report: Report, at: str) -> float:
    return report.counts[ClientStatistics, at]["answers", ""]


def present(report: Report, at: str) -> list[Statistics]:
    return [statistics for there, statistics in report.present if there == at]


@contextmanager
def loop_in_a_thread() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def do(loop: asyncio.AbstractEventLoop, work: Callable[[], object]) -> None:
    """Do something in a loop of another thread, and wait for its end."""

    async def run() -> None:
        work()

    asyncio.run_coroutine_threadsafe(run(), loop).result(PATIENCE_S)


async def test_every_kind_of_object_is_found_by_its_endpoint_while_it_is_open(
    nothing_left_behind: None,
) -> None:
    with place() as here:
        other = here.messages.replace("/m", "/n")
        client: MessageClient[Answer] = MessageClient([here.messages, other], reply_type=Answer)
        parties: dict[str, Watched] = {
            here.tensors: TensorReceiver(here.tensors),
            here.answers: TensorSender(here.answers),
            here.messages: MessageServer(here.messages, Question),
            f"{here.messages},{other}": client,
        }
        for at, party in parties.items():
            assert not present(registry.look(0.0), at)
            async with party:  # type: ignore[attr-defined]
                assert present(registry.look(0.0), at) == [party.statistics()]
                there = await asyncio.to_thread(registry.look, PATIENCE_S)
                assert present(there, at) == [party.statistics()]
            assert not present(registry.look(0.0), at)


async def test_those_on_a_queue_are_all_at_one_endpoint(nothing_left_behind: None) -> None:
    before = len(present(registry.look(0.0), "queue"))
    with endpoint("queue") as one, endpoint("queue") as another:
        async with TensorReceiver(one), TensorSender(one), TensorSender(another):
            assert len(present(registry.look(0.0), "queue")) == before + 3
    assert len(present(registry.look(0.0), "queue")) == before


async def test_a_server_at_a_port_that_was_free_is_found_by_that_port(nothing_left_behind: None) -> None:
    async with MessageServer("tcp://127.0.0.1:0", Question) as server:
        assert not server.address.endswith(":0")
        assert present(registry.look(0.0), server.address) == [server.statistics()]


async def test_what_could_not_be_opened_is_not_found(nothing_left_behind: None) -> None:
    with place() as here:
        async with TensorReceiver(here.tensors) as receiver:
            with pytest.raises(UsageError):
                await TensorReceiver(here.tensors).__aenter__()
            assert present(registry.look(0.0), here.tensors) == [receiver.statistics()]


async def test_what_closed_senders_and_receivers_have_counted_stays_and_adds_up(
    nothing_left_behind: None,
) -> None:
    with place() as here:

        def counted() -> tuple[float, float]:
            counts = registry.look(0.0).counts
            sent = counts[SenderStatistics, here.tensors]["tensors_sent", ""]
            return sent, counts[ReceiverStatistics, here.tensors]["tensors_taken", ""]

        for turn in range(1, 4):
            async with TensorReceiver(here.tensors) as receiver, TensorSender(here.tensors) as sender:
                await receiver.receive(await sender.send(pattern(0, 3)))
                assert counted() == (turn, turn)
            assert counted() == (turn, turn)


async def test_what_was_counted_while_closing_is_counted(nothing_left_behind: None) -> None:
    with place() as here:
        async with TensorSender(here.tensors) as sender:
            message = sender.message()
            await message.__aenter__()
        counts = registry.look(0.0).counts[SenderStatistics, here.tensors]
        assert counts["messages_discarded", ""] == 1


async def test_what_those_counted_who_waited_for_what_was_closed_is_counted(
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
        counts = registry.look(0.0).counts[SenderStatistics, here.tensors]
        assert counts["errors", "ClosedError"] == 3
        assert (
            sum(
                number
                for (name, bound), number in counts.items()
                if name == "permit_waits" and bound != "total_s"
            )
            == 3
        )
        del waiting


async def test_what_was_freed_without_being_closed_keeps_what_was_last_seen_of_it() -> None:
    at = f"freed in {asyncio.get_running_loop()}"
    told, _ = open_told(5, at)
    assert answers_at(registry.look(0.0), at) == 5
    del told
    gc.collect()
    report = registry.look(0.0)

    assert not present(report, at)
    assert answers_at(report, at) == 5


def test_of_a_loop_that_was_closed_before_its_objects_the_last_counts_stay_and_nobody_waits_for_it() -> None:
    async def open_and_look() -> Told:
        told, _ = open_told(7, "closed loop")
        assert answers_at(registry.look(0.0), "closed loop") == 7
        return told

    told = asyncio.run(open_and_look())
    told.answers = 100
    report = registry.look(PATIENCE_S)

    assert (answers_at(report, "closed loop"), report.unanswered) == (7, 0)
    assert not present(report, "closed loop")
    assert len(told.looks) == 1


def test_an_object_is_asked_in_its_own_thread_only() -> None:
    with loop_in_a_thread() as loop:
        found: list[tuple[Told, LoopAffinity]] = []
        do(loop, lambda: found.append(open_told(1, "asked")))
        [(told, home)] = found
        report = registry.look(PATIENCE_S)
        assert (answers_at(report, "asked"), report.unanswered) == (1, 0)
        assert threading.get_ident() not in told.looks
        do(loop, lambda: leave(home))
        assert not present(registry.look(PATIENCE_S), "asked")


def test_a_loop_that_does_not_answer_is_passed_by_and_what_it_said_last_is_told_again() -> None:
    with loop_in_a_thread() as loop:
        kept: list[tuple[Told, LoopAffinity]] = []
        do(loop, lambda: kept.append(open_told(3, "blocked")))
        assert answers_at(registry.look(PATIENCE_S), "blocked") == 3
        blocked, go_on = threading.Event(), threading.Event()

        def block() -> None:
            blocked.set()
            go_on.wait()

        loop.call_soon_threadsafe(block)
        blocked.wait()
        kept[0][0].answers = 4
        report = registry.look(0.05)
        go_on.set()
        assert (answers_at(report, "blocked"), report.unanswered) == (3, 1)
        assert len(present(report, "blocked")) == 1
        report = registry.look(PATIENCE_S)
        assert (answers_at(report, "blocked"), report.unanswered) == (4, 0)
        assert not registry._books.questions


def test_a_loop_that_does_not_run_is_not_waited_for() -> None:
    loop = asyncio.new_event_loop()
    kept: list[tuple[Told, LoopAffinity]] = []

    async def run() -> None:
        kept.append(open_told(1, "stopped"))

    with ThreadPoolExecutor(1) as elsewhere:
        elsewhere.submit(loop.run_until_complete, run()).result()
        report = registry.look(PATIENCE_S)  # longer than this test may take
        assert report.unanswered == 0  # no object was asked
        assert not present(report, "stopped")  # it was never found
        loop.close()
        assert registry.look(PATIENCE_S).unanswered == 0


def test_a_loop_that_ends_with_a_question_in_it_is_not_waited_for() -> None:
    asked, ended = threading.Event(), threading.Event()
    loop = asyncio.new_event_loop()
    kept: list[tuple[Told, LoopAffinity]] = []

    async def run() -> None:
        kept.append(open_told(1, "ends"))
        loop.stop()
        is_open.set()
        asked.wait()  # the loop has no further turn for later calls

    is_open = threading.Event()
    take = loop.call_soon_threadsafe

    def call_soon_threadsafe(*args: Any, **options: Any) -> asyncio.Handle:
        handle = take(*args, **options)
        asked.set()
        return handle

    loop.call_soon_threadsafe = call_soon_threadsafe  # type: ignore[method-assign,assignment]

    def live() -> None:
        task = loop.create_task(run())
        loop.run_forever()
        loop.close()
        del task
        ended.set()

    thread = threading.Thread(target=live)
    thread.start()
    is_open.wait()
    report = registry.look(PATIENCE_S * 100)  # longer than this test may take
    assert ended.wait(PATIENCE_S)
    thread.join()
    assert report.unanswered == 0
    assert not registry._books.questions


def test_what_is_asked_after_it_was_closed_tells_what_the_next_one_who_looks_is_told() -> None:
    with loop_in_a_thread() as loop:
        found: list[tuple[Told, LoopAffinity]] = []
        do(loop, lambda: found.append(open_told(1, "late")))
        [(told, home)] = found
        blocked, go_on = threading.Event(), threading.Event()

        def close() -> None:
            leave(home)
            loop.call_soon(lambda: setattr(told, "answers", 100))  # after it was struck out
            blocked.set()
            go_on.wait()

        loop.call_soon_threadsafe(close)
        blocked.wait()
        with ThreadPoolExecutor(1) as elsewhere:
            looking = elsewhere.submit(registry.look, PATIENCE_S)
            while not registry._books.questions:
                let_threads_run()
            go_on.set()
            assert answers_at(looking.result(), "late") == 1
        assert told.answers == 100
        assert answers_at(registry.look(PATIENCE_S), "late") == 1


def test_two_loops_that_ask_each_other_both_get_their_answer() -> None:
    kept: list[tuple[Told, LoopAffinity]] = []
    both = threading.Barrier(2)
    reports: list[Report] = []

    def ask() -> None:
        both.wait()  # from here on each of the two loops is blocked
        reports.append(registry.look(PATIENCE_S))

    with loop_in_a_thread() as one, loop_in_a_thread() as another:
        for loop in (one, another):
            do(loop, lambda: kept.append(open_told(1, "mutual")))
        for loop in (one, another):
            loop.call_soon_threadsafe(ask)
        for loop in (one, another):
            do(loop, lambda: None)
    assert [report.unanswered for report in reports] == [0, 0]
    assert [answers_at(report, "mutual") for report in reports] == [2, 2]


def test_many_threads_may_look_at_once_while_objects_come_and_go() -> None:
    end = threading.Event()
    seen: list[list[float]] = []

    def watch() -> None:
        mine: list[float] = []
        while not end.is_set():
            with suppress(KeyError):  # no object was open yet
                mine.append(answers_at(registry.look(PATIENCE_S), "busy"))
        seen.append(mine)

    async def come_and_go() -> None:
        for _ in range(200):
            told, home = open_told(0, "busy")
            told.answers += 1
            await asyncio.sleep(0)
            leave(home)

    watchers = [threading.Thread(target=watch) for _ in range(3)]
    for watcher in watchers:
        watcher.start()
    with loop_in_a_thread() as loop:
        asyncio.run_coroutine_threadsafe(come_and_go(), loop).result(PATIENCE_S)
    end.set()
    for watcher in watchers:
        watcher.join()
    for mine in seen:
        assert mine == sorted(mine)  # counters never decrease
    assert answers_at(registry.look(0.0), "busy") == 200
    assert not registry._books.questions


def test_of_two_reports_the_one_with_the_larger_number_has_all_counts_of_the_other() -> None:
    kept: list[tuple[Told, LoopAffinity]] = []
    blocked, asked, go_on = threading.Event(), threading.Event(), threading.Event()

    def block() -> None:
        blocked.set()
        go_on.wait()

    async def open_and_close() -> Report:
        _, home = open_told(7, "opened later")
        leave(home)
        await asyncio.sleep(0)
        return registry.look(0.0)

    with loop_in_a_thread() as loop, ThreadPoolExecutor(1) as elsewhere:
        do(loop, lambda: kept.append(open_told(1, "opened earlier")))
        take = loop.call_soon_threadsafe
        take(block)
        blocked.wait()

        def call_soon_threadsafe(*args: Any, **options: Any) -> asyncio.Handle:
            asked.set()
            return take(*args, **options)

        loop.call_soon_threadsafe = call_soon_threadsafe  # type: ignore[method-assign,assignment]
        looking = elsewhere.submit(registry.look, PATIENCE_S)
        asked.wait()
        with asyncio.Runner() as runner:
            earlier = runner.run(open_and_close())
        go_on.set()
        later = looking.result()
        assert later.number > earlier.number
        assert answers_at(earlier, "opened later") == answers_at(later, "opened later") == 7


async def test_endpoints_that_were_closed_are_not_remembered_for_ever() -> None:
    at = f"place in {asyncio.get_running_loop()}"
    told, _ = stays, home_of_it = open_told(1, f"{at} 0")
    for number in range(600):
        told, home = open_told(1, f"{at} {number}")
        leave(home)
        await asyncio.sleep(0)
    in_use = {one.endpoint for one in registry._books.open}
    assert sum(endpoint not in in_use for _, endpoint in registry._books.closed) == 256
    report = registry.look(0.0)
    assert answers_at(report, f"{at} 599") == told.answers
    assert answers_at(report, f"{at} 0") == 1 + stays.answers  # another object is still open
    assert (ClientStatistics, f"{at} 1") not in report.counts
    leave(home_of_it)


async def test_what_was_counted_at_an_endpoint_in_use_is_kept_however_many_there_are() -> None:
    at = f"used in {asyncio.get_running_loop()}"
    kept = []
    for number in range(300):
        _, home = open_told(1, f"{at} {number}")
        kept.append(open_told(1, f"{at} {number}"))
        leave(home)
        await asyncio.sleep(0)
    report = registry.look(0.0)
    assert [answers_at(report, f"{at} {number}") for number in range(300)] == [2] * 300
    for _, home in kept:
        leave(home)


def test_what_is_closed_after_its_loop_is_kept_at_once() -> None:
    async def open_one() -> tuple[Told, LoopAffinity]:
        return open_told(3, "after its loop")

    told, home = asyncio.run(open_one())
    told.answers = 4
    leave(home)
    assert not [one for one in registry._books.open if one.endpoint == "after its loop"]
    assert answers_at(registry.look(0.0), "after its loop") == 4


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
def test_the_handler_of_a_signal_may_look_amid_a_look(amid: str) -> None:
    at = f"interrupted amid {amid}"
    reports: list[Report] = []

    def handle(*_: object) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # one at a time
        reports.append(registry.look(0.0))
        signal.signal(signal.SIGUSR1, handle)

    async def open_three() -> list[tuple[Told, LoopAffinity]]:
        those = [open_told(number, at) for number in (1, 10, 100)]
        registry.look(0.0)
        return those

    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    loop = InterruptedLoop() if amid == "sweeping" else asyncio.SelectorEventLoop()
    try:
        kept = loop.run_until_complete(open_three())
        for one in registry._books.open:
            if one.endpoint == at and amid == "counting":
                assert one.last is not None
                one.last = msgspec.structs.replace(one.last, errors=InterruptedErrors())
        loop.close()
        signal.signal(signal.SIGUSR1, handle)
        reports.append(registry.look(0.0))
        reports.append(registry.look(0.0))
    finally:
        signal.signal(signal.SIGUSR1, before)
    kept.clear()
    assert len(reports) > 2
    assert {answers_at(report, at) for report in reports} == {111}


@forks
async def test_a_forked_child_finds_nothing_of_its_parent() -> None:
    at = f"parent in {asyncio.get_running_loop()}"
    told, _ = open_told(1, at)

    def look() -> None:
        raise RuntimeError(str(registry.look(0.0)._replace(number=0)))

    assert in_a_fork(look) == f"RuntimeError: {Report([], {}, {}, 0, 0)}"
    assert present(registry.look(0.0), at) == [told.statistics()]


def test_all_that_is_said_is_either_a_count_or_of_the_moment() -> None:
    moments = {
        SenderStatistics: {
            "max_concurrent_videos",
            "in_flight",
            "peak_in_flight",
            "waiting",
            "longest_wait_s",
        }
        | {"holders", "arena_bytes", "bytes_in_use", "peak_bytes_in_use", "warm_bytes", "largest_free_bytes"},
        ReceiverStatistics: {"senders", "max_senders", "waiting", "unclaimed_tensors", "unclaimed_bytes"}
        | {"mapped_bytes", "max_mapped_bytes", "promised_messages", "max_unclaimed_messages"}
        | {"leases", "leased_bytes", "peak_leased_bytes"},
        ClientStatistics: {"servers", "in_flight", "waiting"},
        ServerStatistics: {"clients", "max_clients", "waiting", "max_waiting", "waiting_bytes"}
        | {"max_waiting_bytes", "in_hand"},
    }
    assert moments.keys() == COUNTERS.keys()
    for kind, names in COUNTERS.items():
        assert not moments[kind] & set(names)
        assert moments[kind] | set(names) == set(kind.__struct_fields__)


def test_a_queue_is_named_alike_in_every_process() -> None:
    queue = TensorQueue()
    assert name_of(queue) == "queue"
    assert name_of("unix:///run/s") == "unix:///run/s"
    queue.close()


def test_a_path_that_is_no_utf_8_has_a_name_that_is() -> None:
    assert name_of("unix:///run/ä\udcff") == "unix:///run/ä\\udcff"
