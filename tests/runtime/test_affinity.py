import asyncio
import os
import selectors
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import pytest

from aiotensor import TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.errors import ClosedError, UsageError
from aiotensor.runtime.affinity import FEW_ITEMS, FreedItems, LoopAffinity


def in_a_thread(work: Callable[[], object]) -> BaseException | None:
    """Run a function in another thread, and return its error."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def in_a_fork(work: Callable[[], object]) -> str:
    """Run a function in a forked child, and return the type and the text of its error."""
    reading_end, writing_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        report = "nothing was raised"
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            report = f"{type(error).__name__}: {error}"
        finally:
            os.write(writing_end, report.encode())
            os._exit(0)
    os.close(writing_end)
    with open(reading_end) as pipe:
        report = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return report


forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Opened(Protocol):
    """An asynchronous context manager."""

    def __aenter__(self) -> Coroutine[Any, Any, object]: ...


@pytest.mark.promise(23)
def test_opening_under_another_async_library_raises_usage_error() -> None:
    openers: list[Opened] = [
        TensorSender("unix:///tmp/nobody"),
        TensorReceiver("unix:///tmp/nobody"),
        MessageClient("unix:///tmp/nobody", dict),
        MessageServer("unix:///tmp/nobody", dict),
    ]
    for opener in openers:
        # As trio does, this drives the coroutine by hand in a thread where no loop of asyncio runs.
        with pytest.raises(
            UsageError, match=r"no asyncio event loop.*requires asyncio \(or uvloop\).*trio.*anyio"
        ):
            opener.__aenter__().send(None)


async def test_an_object_is_opened_once_and_used_while_it_is_open(address: str) -> None:
    sender = TensorSender(address)
    with pytest.raises(UsageError, match=r"this TensorSender is not open yet: enter it with `async with`"):
        sender.discard_all()
    async with sender:
        sender.discard_all()
        with pytest.raises(UsageError, match="is already open: enter it once and share it between tasks"):
            await sender.__aenter__()
        sender.discard_all()
    with pytest.raises(ClosedError, match="this TensorSender was closed: create a new one"):
        sender.discard_all()
    with pytest.raises(ClosedError, match="this TensorSender was closed: create a new one"):
        await sender.__aenter__()
    never_opened = TensorSender(address)
    await never_opened.aclose()
    with pytest.raises(ClosedError):
        await never_opened.__aenter__()


def test_use_in_another_loop_of_the_same_thread_raises_usage_error() -> None:
    async def opened() -> LoopAffinity:
        home = LoopAffinity("TensorSender")
        home.enter()
        return home

    home = asyncio.run(opened())

    async def use(what: Callable[[], object]) -> None:
        what()

    for what in (home.check, home.check_place):
        with pytest.raises(UsageError, match="belongs to another event loop: open one in each loop"):
            asyncio.run(use(what))
        assert "run_coroutine_threadsafe" in str(in_a_thread(what))
    home.check()  # callbacks of the thread may use it after its loop has stopped


@forks
@pytest.mark.promise(23)
async def test_neither_unopened_nor_open_nor_closed_objects_can_be_used_after_a_fork(address: str) -> None:
    sender = TensorSender(address)

    def check() -> None:
        for use in (sender.discard_all, sender.statistics, lambda: sender.__aenter__().send(None)):
            report = in_a_fork(use)
            assert report.startswith("UsageError: this TensorSender was inherited by a forked process")
            assert "get_context('spawn')" in report

    check()
    async with sender:
        check()
    check()


# Freed items


class Collected:
    """Record the handled items."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.loop = asyncio.get_running_loop()
        self.items: FreedItems[int] = FreedItems(self.handle)
        self.items.bind()
        self._waiting: dict[int, asyncio.Future[None]] = {}

    def handle(self, items: list[int]) -> None:
        self.calls.append(items)
        for count, future in self._waiting.items():
            if len(self.all) >= count and not future.done():
                future.set_result(None)

    @property
    def all(self) -> list[int]:
        return [item for call in self.calls for item in call]

    async def until(self, count: int) -> None:
        if len(self.all) < count:
            await self._waiting.setdefault(count, self.loop.create_future())


class Drowsy(selectors.DefaultSelector):
    """A selector that does something when the loop has decided to sleep until it is woken."""

    def __init__(self) -> None:
        super().__init__()
        self.before_sleep: list[Callable[[], object]] = []

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None and self.before_sleep:
            self.before_sleep.pop()()
        return super().select(timeout)


def test_an_item_freed_just_before_the_loop_sleeps_wakes_the_loop() -> None:
    selector = Drowsy()

    async def main() -> list[int]:
        collected = Collected()
        selector.before_sleep.append(lambda: collected.items(7))
        await collected.until(1)
        return collected.all

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        assert runner.run(main()) == [7]


class Chain(Collected):
    """Frees the next thing while it handles the last."""

    def handle(self, items: list[int]) -> None:
        super().handle(items)
        if items[-1] < 2:
            self.items(items[-1] + 1)


async def test_items_freed_during_handling_are_not_lost() -> None:
    chain = Chain()
    chain.items(0)
    await chain.until(3)

    assert chain.calls == [[0], [1], [2]]


class Failing(Collected):
    """Fails for the first items."""

    def handle(self, items: list[int]) -> None:
        super().handle(items)
        if len(self.calls) == 1:
            raise KeyError(items[0])


async def test_a_limited_number_of_items_is_handled_in_each_iteration_also_after_a_failure() -> None:
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    failing = Failing()
    for item in range(2 * FEW_ITEMS + 1):
        failing.items(item)
    await failing.until(2 * FEW_ITEMS + 1)

    assert [len(items) for items in failing.calls] == [FEW_ITEMS, FEW_ITEMS, 1]
    assert [type(context["exception"]) for context in reported] == [KeyError]


async def test_freed_items_keep_no_reference_to_their_handler() -> None:
    collected = Collected()
    items, calls, handler = collected.items, collected.calls, weakref.ref(collected)
    items(0)
    del collected
    assert handler() is None

    items(1)
    await asyncio.sleep(0)
    assert calls == []
