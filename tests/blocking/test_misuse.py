"""Misuse raises immediately: before opening, after closing, after a fork, in an event loop."""

import asyncio
import inspect
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import aiotensor
from aiotensor import ClosedError, UsageError, blocking, broadcast, channel, queues, ranks
from aiotensor.blocking import MessageServer, TensorReceiver, TensorSender
from aiotensor.blocking.portal import BlockingObject
from tests.blocking.waiting import Place, in_thread
from tests.channel.parties import Question
from tests.runtime.test_affinity import forks, in_a_fork
from verification.patterns import pattern

_CHILD_S = 20  # the limit for a child that hangs

Object = BlockingObject[Any, Any]
Uses = dict[str, Callable[[], object]]


def _uses(thing: Object) -> Uses:
    """Return the methods of an open object, by name."""
    if isinstance(thing, TensorSender):
        return {
            "ready": lambda: thing.ready(nbytes=0),
            "send": lambda: thing.send(pattern(0, 3)),
            "send_nowait": lambda: thing.send_nowait(pattern(0, 3)),
            "post": lambda: thing.post(pattern(0, 3)),
            "message": thing.message,
            "discard_all": thing.discard_all,
        }
    assert isinstance(thing, MessageServer)
    return {"next": thing.next, "arrived": thing.arrived}


def _iterations(thing: Object) -> Uses:
    if isinstance(thing, MessageServer):
        return {"iterate": lambda: list(thing), "serve": lambda: thing.serve(lambda _: None)}
    return {}


@pytest.fixture(params=["sender", "server"])
def thing(request: pytest.FixtureRequest, place: Place) -> Iterator[Object]:
    """Make an object of each kind."""
    is_sender = request.param == "sender"
    thing: Object = TensorSender(place.tensors) if is_sender else MessageServer(place.messages, Question)
    yield thing
    thing.close()


def test_calls_before_opening_raise_usage_error(thing: Object) -> None:
    for use in (_uses(thing) | _iterations(thing)).values():
        with pytest.raises(UsageError, match="is not open yet: enter it with `with`"):
            use()
    assert thing.statistics() == thing.inner.statistics()


@pytest.mark.parametrize("was_open", [True, False])
def test_calls_after_closing_raise_closed_error(was_open: bool, thing: Object) -> None:
    if was_open:
        thing.__enter__()
    thing.close()
    for use in _uses(thing).values():
        with pytest.raises(ClosedError, match="was closed: create a new one"):
            use()
    with pytest.raises(ClosedError, match="was closed: create a new one"), thing:
        pass
    for use in _iterations(thing).values():
        assert not use()  # they end
    thing.close()


def test_an_object_can_be_opened_only_once(thing: Object) -> None:
    with thing:
        with pytest.raises(UsageError, match="was already opened: create a new one"), thing:
            pass
        thing.call(lambda: None)  # it is as open as it was


def test_waiting_calls_in_the_thread_of_an_event_loop_raise_usage_error(thing: Object) -> None:
    async def use() -> list[str]:
        texts = []
        every = {**_uses(thing), **_iterations(thing), "close": thing.close, "open": thing.__enter__}
        every.pop("post", None)  # it never waits
        for one in every.values():
            with pytest.raises(UsageError) as caught:
                one()
            texts.append(str(caught.value))
        return texts

    with thing:
        texts = asyncio.run(use())
        assert all("would block the event loop of this thread" in text for text in texts)
        assert asyncio.run(asyncio.to_thread(thing.statistics)) is not None


@forks
@pytest.mark.promise(23)
def test_every_use_in_a_forked_child_raises_usage_error(thing: Object) -> None:
    with thing:
        uses = {**_uses(thing), **_iterations(thing), "close": thing.close, "open": thing.__enter__}
        for use in uses.values():
            report = in_a_fork(use)
            assert report.startswith("UsageError")
            assert "was inherited by a forked process" in report
        if isinstance(thing, TensorSender):
            with pytest.raises(TimeoutError):  # the parent still works
                thing.send(pattern(1, 3), timeout=0.01)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_opens_objects_of_its_own(place: Place) -> None:
    with TensorReceiver(place.tensors) as receiver:
        child = os.fork()
        if child == 0:
            signal.alarm(_CHILD_S)
            try:
                with TensorSender(place.tensors) as sender:
                    sender.send(pattern(4, 1000))
                os._exit(0)
            finally:
                os._exit(1)
        assert torch.equal(receiver.next().tensor, pattern(4, 1000))
        assert os.waitpid(child, 0)[1] == 0


_MADE_BY_METHODS = ("OpenMessage", "Permit", "QueueConsumer", "QueueProducer", "Request")


def _async_class(name: str) -> Any:
    places = (aiotensor, channel, queues, broadcast, ranks)
    return next(getattr(place, name) for place in places if hasattr(place, name))


def test_names_arguments_and_defaults_are_those_of_the_async_api() -> None:
    for name in blocking.__all__:
        theirs, ours = _async_class(name), getattr(blocking, name)
        if name not in _MADE_BY_METHODS:
            assert _arguments(ours) == _arguments(theirs), name
        for method in [one for one in vars(theirs) if not one.startswith("_")]:
            there, here = getattr(theirs, method), getattr(ours, "close" if method == "aclose" else method)
            if callable(there):
                expected, found = _arguments(there), _arguments(here)
                if "timeout" not in expected:
                    found.pop("timeout", None)
                expected.pop("max_concurrent", None)  # of tasks, which there are none of here
                assert found == expected, (name, method)


def _arguments(function: Callable[..., object]) -> dict[str, object]:
    """Return the parameters of a function, with their defaults."""
    return {name: one.default for name, one in inspect.signature(function).parameters.items()}


def test_an_object_that_could_not_be_opened_is_closed(place: Place) -> None:
    with TensorReceiver(place.tensors):
        second = TensorReceiver(place.tensors)
        with pytest.raises(UsageError, match="listens"), second:
            pass
        with pytest.raises(ClosedError):
            second.next()
        second.statistics()


def test_only_one_of_several_threads_can_open_an_object(place: Place) -> None:
    for _ in range(5):
        sender = TensorSender(place.tensors)
        opening = [in_thread(sender.__enter__) for _ in range(4)]
        errors = [one.exception() for one in opening]
        assert sorted(str(type(error).__name__) for error in errors) == ["NoneType"] + 3 * ["UsageError"]
        sender.close()
