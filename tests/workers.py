"""Worker processes of pytest-xdist, and the tests of a worker that dies.

pytest-timeout ends the process of a test that hangs, and a test may crash its process. The test that was
running then counts as failed, and a new worker runs the remaining tests of the dead one. If too many workers
die, the run fails, and lists the tests that never ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from tests import signals

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling
    from xdist.workermanage import WorkerController

__all__ = ["configure"]

_MOST_LISTED = 50


def configure(config: pytest.Config) -> None:
    """Set up the process that starts the workers, or one of the workers; or the only process of a run."""
    worker_input: dict[str, Any] | None = getattr(config, "workerinput", None)
    ignored = signals.ignored_signals()
    if worker_input is None:
        config.pluginmanager.register(_Workers(ignored))
    else:
        ignored += worker_input["ignored_signals"]
    signals.ignore_in_this_process(ignored)


class _Workers:
    """A plugin for the process that starts the workers.

    Args:
        ignored: signals that the run ignores.
    """

    def __init__(self, ignored: Sequence[int]) -> None:
        self._ignored = list(ignored)
        self._collected: dict[str, None] = {}
        self._reported: set[str] = set()
        self._died = False

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: WorkerController) -> None:
        """Send the ignored signals to a worker, which does not inherit them."""
        node.workerinput["ignored_signals"] = self._ignored

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Producer) -> Scheduling | None:
        """Replace the scheduler of ``--dist loadfile``."""
        if config.getvalue("dist") != "loadfile":
            return None
        from tests.scheduling import FileScheduling

        return FileScheduling(config, log)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, error: object | None) -> None:
        """Record the death of a worker, even of one without remaining tests."""
        self._died = self._died or error is not None

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Record the collected tests."""
        self._collected.update(dict.fromkeys(ids))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember a test that ran, or during which a worker died."""
        self._reported.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fail a run in which a worker died or tests were left out."""
        if exitstatus == pytest.ExitCode.OK and (self._died or self._never_ran()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        """List the tests that never ran, unless the user stopped the run."""
        never_ran = self._never_ran()
        if not never_ran or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        terminalreporter.section(f"{len(never_ran)} of {len(self._collected)} tests never ran", red=True)
        for test in never_ran[:_MOST_LISTED]:
            terminalreporter.line(f"NEVER RAN {test}")
        if len(never_ran) > _MOST_LISTED:
            terminalreporter.line(f"... and {len(never_ran) - _MOST_LISTED} more")

    def _never_ran(self) -> list[str]:
        return [test for test in self._collected if test not in self._reported]
