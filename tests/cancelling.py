"""Run an operation repeatedly, and cancel it at each of its suspensions, in several ways.

A coroutine can only be cancelled where it suspends, so this module drives it and counts its suspensions. The
first run is not cancelled, the next one at the first suspension, the next one at the second, and so on. If
the operation suspends again during its cleanup, a further run cancels it there once more. After each run
`holdings` compares all held resources with those before.
"""

import asyncio
import enum
import types
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, NamedTuple, TypeVar

from tests.holdings import Party, Watch
from verification.waiting import until

T = TypeVar("T")

_TURNS_LATER = 3
_TRIES = 10


class Way(enum.Enum):
    """The moment of a cancellation, relative to the suspension and to the awaited result."""

    AT_ONCE = "when it suspends"
    LATER = "some iterations after it suspended"
    WITH_RESULT = "in the iteration of the result, before it continues"
    # The test provides the result, in `Running.bring`:
    WHILE_WAITING = "while it waits, some iterations before the result"
    BEFORE_RESULT = "in the iteration of the result, just before it"


_ALONE = (Way.AT_ONCE, Way.LATER, Way.WITH_RESULT)
_BROUGHT = (Way.WHILE_WAITING, Way.BEFORE_RESULT)


class Plan(NamedTuple):
    """Where and how one run is cancelled."""

    at: int = 0  # the number of the suspension, from 1; 0 for nowhere
    way: Way = Way.AT_ONCE
    again: int = 0  # a later suspension, during the cleanup, which is cancelled at once

    def __str__(self) -> str:
        if not self.at:
            return "not cancelled"
        again = f", and again at suspension {self.again}" if self.again else ""
        return f"cancelled at suspension {self.at}, {self.way.value}{again}"


class Facts:
    """The suspensions and cancellations of an operation in one run."""

    def __init__(self) -> None:
        self.suspensions = 0
        self.cancels = 0
        self.was_brought = False
        self.has_ended = False


class Running(Generic[T]):
    """An operation in a separate task, which is cancelled as planned.

    Args:
        operation: a coroutine that has not started.
        plan: where and how to cancel it.
        facts: the record to fill.
    """

    def __init__(self, operation: Coroutine[Any, Any, T], plan: Plan, facts: Facts) -> None:
        self._facts = facts
        self._operation = operation
        self._plan = plan
        self._is_suspended = False
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(), name="the operation")

    async def completed(self) -> bool:
        """Wait for the end; return False if the operation was cancelled, and raise its errors."""
        await asyncio.wait([self._task])
        self._facts.has_ended = True
        if self._task.cancelled():
            assert self.cancels, "another task has cancelled it"
            return False
        error = self._task.exception()
        if error is not None:
            raise error
        assert not self.cancels, "it ignored its cancellation"
        return True

    @property
    def suspensions(self) -> int:
        """Return the number of suspensions."""
        return self._facts.suspensions

    @property
    def cancels(self) -> int:
        """Return the number of cancellations."""
        return self._facts.cancels

    @property
    def value(self) -> T:
        """Return the result of the operation."""
        return self._task.result()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition is true or the operation has ended."""
        await until(lambda: self._task.done() or bool(condition()))

    async def bring(self, give: Callable[[], object]) -> None:
        """Provide the awaited result by calling `give`; cancel the operation before that if planned."""
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
            except BaseException as error:  # noqa: BLE001 - the operation handles it
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
                self._loop.call_soon(self._cancel_at, at)  # it only yields

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
    """One run of an operation, with its preparation and its checks.

    Args:
        plan: where and how to cancel it.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.facts: Facts | None = None

    def start(self, operation: Coroutine[Any, Any, T]) -> Running[T]:
        """Start the operation to be cancelled; may be called once."""
        assert self.facts is None, "an attempt has one operation"
        self.facts = Facts()
        return Running(operation, self.plan, self.facts)


async def cancel_everywhere(attempt: Callable[[Attempt], Awaitable[None]], *parties: Party) -> Counter[Way]:
    """Cancel an operation at each of its suspensions, in each way, and check for leaks after each run.

    Args:
        attempt: prepares a run, starts the operation by `Attempt.start`, and checks its effects. It keeps no
            reference when it returns.
        parties: the objects that must work and hold the same resources after each run as before.

    Returns:
        the number of cancellations in each way; empty if the operation never suspends.
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
            # The number of suspensions can differ between runs, so the planned one may not occur.
            for _ in range(_TRIES):
                at, last = 1, 1
                while at <= last:
                    facts = await run(Plan(at, way))
                    if facts.cancels:
                        found[way] += 1
                        for again in range(at + 1, facts.suspensions + 1):
                            await run(Plan(at, way, again))
                    # Without the cancellation there may be further suspensions.
                    at, last = at + 1, facts.suspensions + bool(facts.cancels)
                # Some iterations later it may have continued already.
                if found[way] or way is Way.LATER or not found:
                    break
            else:
                raise AssertionError(f"it was never cancelled {way.value}")
    return +found
