"""The event loops of tests and verification programs, in their own process and in its children."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import uvloop

from verification.eager import eager_task

FACTORIES: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}

# An eager task runs up to its first wait when it is created.
MODES = ["plain", "debug", "eager"]


class Kind(NamedTuple):
    """A description of a loop, from which another process can create one."""

    factory: str
    mode: str

    def make(self) -> asyncio.AbstractEventLoop:
        loop = FACTORIES[self.factory]()
        set_mode(loop, self.mode)
        return loop


def kind_of(loop: asyncio.AbstractEventLoop) -> Kind:
    """Return the description of a loop."""
    mode = "debug" if loop.get_debug() else "eager" if loop.get_task_factory() is not None else "plain"
    return Kind("uvloop" if isinstance(loop, uvloop.Loop) else "asyncio", mode)


def set_mode(loop: asyncio.AbstractEventLoop, mode: str) -> None:
    """Switch a loop to one of the modes."""
    loop.set_debug(mode == "debug")
    loop.set_task_factory(eager_task if mode == "eager" else None)


@contextmanager
def complaints() -> Iterator[list[str]]:
    """Collect the log lines of asyncio, such as those about destroyed tasks and unhandled errors."""
    said: list[str] = []
    handler = _Listener(said)
    logger = logging.getLogger("asyncio")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


class _Listener(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        # In debug mode asyncio logs long steps, also if only the machine is slow.
        if not str(record.msg).startswith("Executing"):
            self._said.append(self.format(record))
