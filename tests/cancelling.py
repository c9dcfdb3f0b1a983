"""Run an operation again and again, and cancel it wherever it suspends, in every way there is.

A coroutine can only be cancelled where it suspends, so it is driven by hand here, and its suspensions are
counted: the first run is left alone, the next one is cancelled at the first suspension, the next at the
second, until there is none left. If it suspends again while it cleans up, it is cancelled there once more.
After each run everything is to be as it was before; see `holdings`.
"""

import asyncio
import enum
import types
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, NamedTuple, TypeVar

from tests.holdings import Party, Watch
from verification.waiting import until

__all__ = ["Attempt", "Plan", "Running", "Way", "cancel_everywhere"]

T = TypeVar("T")

_TURNS_LATER = 3


class Way(enum.Enum):
    """When a run is cancelled, as seen from what it waits for."""

    AT_ONCE = "at the moment when it suspends"
    LATER = "some turns of the loop after it suspended"
    WITH_RESULT = "in the turn in which what it waits for has come, before it runs on"
    # With the help of the test, which brings what is waited for by `Running.bring`:
    WHILE_WAITING = "while it waits, just long enough before what it waits for comes"
    BEFORE_RESULT = "in the turn in which what it waits for comes, just before that"


_ALONE = (Way.AT_ONCE, Way.LATER, Way.WITH_RESULT)
_BROUGHT = (Way.WHILE_WAITING, Way.BEFORE_RESULT)


class Plan(NamedTuple):
    """Where and how one run is cancelled."""

    at: int = 0  # the number of the suspension, from 1; 0 for nowhere
    way: Way = Way.AT_ONCE
    again: int = 0  # a later suspension, in the cleaning up, to be cancelled at once

    def __str__(self) -> str:
        if not self.at:
            return "not cancelled"
        again = f", and again at suspension {self.again}" if self.again else ""
        return f"cancelled at suspension {self.at}, {self.way.value}{again}"


class Facts:
    """What happened to an operation in one run."""

    def __init__(self) -> None:
        self.suspensions = 0
        self.cancels = 0
        self.was_brought = False
        self.has_ended = False


class Running(Generic[T]):
    """An operation in a task of its own, that is cancelled as planned.

    Args:
        operation: a coroutine that has not begun.
        plan: where to cancel it.
        facts: gets noted what happens.
    """

    def __init__(self, operation: Coroutine[Any, Any, T], plan: Plan, facts: Facts) -> None:
        self._facts = facts
        self._operation = operation
        self._plan = plan
        self._is_suspended = False
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(), name="the operation")

    async def completed(self) -> bool:
        """Wait for the end, and say whether it is that of the operation itself; its errors are raised."""
        await asyncio.wait([self._task])
        self._facts.has_ended = True
        if self._task.cancelled():
            assert self.cancels, "it was cancelled by somebody else"
            return False
        error = self._task.exception()
        if error is not None:
            raise error
        assert not self.cancels, "it was cancelled, and went on as if it had not been"
        return True

    @property
    def suspensions(self) -> int:
        """Count how often it has suspended."""
        return self._facts.suspensions

    @property
    def cancels(self) -> int:
        """Count how often it was cancelled."""
        return self._facts.cancels

    @property
    def value(self) -> T:
        """Return what the operation returned."""
        return self._task.result()

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the loop turn until something is so, or the operation has ended."""
        await until(lambda: self._task.done() or bool(condition()))

    async def bring(self, give: Callable[[], object]) -> None:
        """Do what the operation waits for, and cancel it around that if it is planned so."""
        self._facts.was_brought = True
        await self.until(lambda: self._is_suspended)
        if not self.cancels and self._is_at(self._plan.at):
            if self._plan.way is Way.WHILE_WAITING:
                self._cancel()
                await asyncio.wait([self._task])
            elif self._plan.way is Way.BEFORE_RESULT:
                self._cancel()
        give()

    async def _run(self) -> T:
        return await self._drive()

    @types.coroutine
    def _drive(self) -> Generator[Any, None, T]:
        step: Callable[[], Any] = lambda: self._operation.send(None)  # noqa: E731
        while True:
            try:
                waits_for = step()
            except StopIteration as end:
                result: T = end.value
                return result
            self._suspend(waits_for)
            try:
                yield waits_for
            except BaseException as error:  # noqa: BLE001 - it is the operation's, whatever it is
                step = lambda error=error: self._operation.throw(error)  # type: ignore[misc]  # noqa: E731
            else:
                step = lambda: self._operation.send(None)  # noqa: E731
            self._is_suspended = False

    def _suspend(self, waits_for: "asyncio.Future[Any] | None") -> None:
        self._facts.suspensions += 1
        self._is_suspended = True
        at = self.suspensions
        if self.cancels:
            if at == self._plan.again:
                self._cancel()
        elif at == self._plan.at:
            way = self._plan.way
            if way is Way.AT_ONCE:
                self._cancel()
            elif way is Way.LATER:
                self._loop.call_soon(self._cancel_later, at, _TURNS_LATER - 1)
            elif way is Way.WITH_RESULT and waits_for is not None:
                # Ahead of the task's own callback, which is added when this is yielded to it.
                waits_for.add_done_callback(lambda _: self._cancel_at(at))
            elif way is Way.WITH_RESULT:
                self._loop.call_soon(self._cancel_at, at)  # it waits for nothing but its turn

    def _is_at(self, at: int) -> bool:
        return self._is_suspended and self.suspensions == at and not self._task.done()

    def _cancel_later(self, at: int, turns: int) -> None:
        if not self._is_at(at):
            return
        if turns:
            self._loop.call_soon(self._cancel_later, at, turns - 1)
        else:
            self._cancel()

    def _cancel_at(self, at: int) -> None:
        if self._is_at(at):
            self._cancel()

    def _cancel(self) -> None:
        self._facts.cancels += 1
        self._task.cancel()


class Attempt:
    """One run of an operation, with what has to be done around it.

    Args:
        plan: where to cancel it.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.facts: Facts | None = None

    def start(self, operation: Coroutine[Any, Any, T]) -> Running[T]:
        """Begin the operation that is to be cancelled; once."""
        assert self.facts is None, "an attempt is about one operation"
        self.facts = Facts()
        return Running(operation, self.plan, self.facts)


async def cancel_everywhere(attempt: Callable[[Attempt], Awaitable[None]], *parties: Party) -> Counter[Way]:
    """Have an operation cancelled at each of its suspensions, in each way, and check what is left each time.

    Args:
        attempt: prepares, starts the operation by `Attempt.start`, and checks what became of it. It lets go
            of everything before it returns.
        parties: those whose books are to be as they were before, and who are to be able to go on.

    Returns:
        how often it was cancelled in each way: nothing if it never suspends.
    """
    found: Counter[Way] = Counter()
    with Watch(parties) as watch:

        async def run(plan: Plan) -> Facts:
            one = Attempt(plan)
            try:
                await attempt(one)
                assert one.facts is not None, "the attempt started no operation"
                assert one.facts.has_ended, "the attempt did not wait until its operation had `completed`"
                await watch.check()
            except BaseException as error:
                error.add_note(f"The operation was {plan}.")
                raise
            return one.facts

        ways = _ALONE + _BROUGHT if (await run(Plan())).was_brought else _ALONE
        for way in ways:
            at, last = 1, 1
            while at <= last:
                facts = await run(Plan(at, way))
                if facts.cancels:
                    found[way] += 1
                    for again in range(at + 1, facts.suspensions + 1):
                        await run(Plan(at, way, again))
                # There may be more, had it gone on.
                at, last = at + 1, facts.suspensions + bool(facts.cancels)
    found = +found
    for way in ways:
        # Some turns later it may have gone on already.
        assert way in found or way is Way.LATER or not found, f"it was never cancelled {way.value}"
    return found
