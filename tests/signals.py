"""Signal dispositions of the test run and of the processes that tests start."""

import signal
from collections.abc import Iterable
from types import FrameType

__all__ = ["ignore_in_this_process", "ignored_signals"]

# `nohup make test &`, cron and scripts ignore these signals, and tests send them. SIGHUP stays ignored: a run
# under nohup continues after its terminal is closed, with all processes of its tests.
_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)


def ignored_signals() -> list[int]:
    """Return the signals that this process inherited as ignored."""
    return [int(number) for number in _SIGNALS if signal.getsignal(number) is signal.SIG_IGN]


def ignore_in_this_process(numbers: Iterable[int]) -> None:
    """Ignore signals here, but not in the programs that this process starts.

    A new program inherits ``SIG_IGN``, and Python then installs no handler for Ctrl-C. A handler that does
    nothing has the same effect in this process, and is reset to the default disposition by `exec`.
    """
    for number in numbers:
        signal.signal(number, _do_nothing)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass
